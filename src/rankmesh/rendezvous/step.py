"""One step of a round: what participants arrive with, the keys that they use, what they get, and how long they wait.

```
WaitPolicy       for a limit, a shorter one where this proposal differs from the first
WhileProgress    the limit begins again whenever a participant has reported progress
UntilEnough      for a limit, or until nobody is left to wait for
```
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_args

from rankmesh.rendezvous.channel import foreign

__all__ = [
    "JSON",
    "NOTHING",
    "POLL",
    "AlreadyConcluded",
    "Codec",
    "Outcome",
    "Probe",
    "Proposal",
    "Reason",
    "Step",
    "UntilEnough",
    "WaitPolicy",
    "WhileProgress",
    "parsed",
    "read_message",
]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from rankmesh.rendezvous.arrivals import Arrivals
    from rankmesh.rendezvous.round import Round

    # What is not said to have a type of its own is JSON data.
    _Value = TypeVar("_Value", default=Any)
else:
    from typing import TypeVar

    _Value = TypeVar("_Value")

Reason = Literal["agreed", "different", "missing", "lost", "failed", "withdrawn", "twice"]
_NAMES = ("ranks", "missing", "fields")
# Seconds between two looks at who has arrived, answered, or left; and once that has been asked for long.
POLL, _SELDOM = 0.02, 1.0
# Seconds that a probe may take at most, whatever is written.
_LONGEST = 1e6


@dataclass(frozen=True)
class Proposal:
    """A participant's proposal.

    ``digest`` must be equal on all; ``document`` is what it stands for, published only when a coordinator asks why
    proposals differ. ``text`` is one line, given to the coordinator for each rank. Both may be empty.
    """

    digest: str = ""
    document: Callable[[], str] = str
    text: str = ""


NOTHING = Proposal()


@dataclass(frozen=True)
class Codec(Generic[_Value]):
    """JSON form of an outcome's value; ``read`` may raise whatever data of a wrong shape raises."""

    write: Callable[[_Value], object]
    read: Callable[[Any], _Value]


JSON: Codec[Any] = Codec(lambda value: value, lambda data: data)


@dataclass(frozen=True)
class Outcome(Generic[_Value]):
    """Why a round ended: ``agreed``, or what kept its participants from it.

    ``ranks`` are the ranks to look at, ``missing`` the absent ones among them, ``fields`` what differs between
    proposals; ``message`` states it in words, and ``value`` is what the coordinator concluded, None where
    it concluded nothing.

    >>> outcome = Outcome("missing", ranks=(3,), missing=(3,), message="waited 2 s for rank 3")
    >>> Outcome.read(outcome.text, "key") == outcome, outcome.agreed, Outcome().agreed
    (True, False, True)
    >>> [Outcome.read(Outcome(value=value).text, "key").value for value in (0, False, [], None)]
    [0, False, [], None]
    """

    reason: Reason = "agreed"
    ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    message: str = ""
    value: _Value = None  # type: ignore[assignment]  # where it is agreed, it has one

    @property
    def agreed(self) -> bool:
        """True if the participants go on."""
        return self.reason == "agreed"

    @property
    def text(self) -> str:
        """The outcome as JSON, without the fields that have their defaults."""
        return self.written(JSON)

    def written(self, codec: Codec[_Value]) -> str:
        """Return the outcome as JSON, its value by the codec."""
        default, here = vars(Outcome()), dict(vars(self))
        if self.value is not None:
            here["value"] = codec.write(self.value)
        return json.dumps({name: value for name, value in here.items() if name == "reason" or value != default[name]})

    @classmethod
    def read(cls, text: str, key: str, codec: Codec[Any] = JSON) -> Outcome:
        """Return the outcome that a text states; raise ``AgreementError`` for what no coordinator has written."""
        return _outcome(parsed(text, key), text, key, codec)


@dataclass(frozen=True)
class Probe:
    """The coordinator ``rank`` asks who is responsive, and says what it concludes within ``seconds``.

    >>> read_message(Probe(3, 2.0).text, "key", JSON)
    Probe(rank=3, seconds=2.0)
    """

    rank: int
    seconds: float

    @property
    def text(self) -> str:
        """The probe as JSON."""
        return json.dumps({"probe": self.rank, "seconds": self.seconds})


def read_message(text: str, key: str, codec: Codec[Any]) -> Probe | Outcome:
    """Read a coordinator's outcome; raise ``AgreementError`` for data that no coordinator writes."""
    data = parsed(text, key)
    if "probe" not in data:
        return _outcome(data, text, key, codec)
    rank, seconds = data["probe"], data.get("seconds")
    if not isinstance(rank, int) or not isinstance(seconds, int | float):
        raise foreign(key, f"a probe by {rank!r:.60} for {seconds!r:.60} seconds")
    return Probe(rank, min(float(seconds), _LONGEST))


def _outcome(data: dict[str, Any], text: str, key: str, codec: Codec[Any]) -> Outcome:
    lists = {name: data.get(name, []) for name in _NAMES}
    message, reason = data.get("message", ""), data.get("reason")
    right = reason in get_args(Reason) and isinstance(message, str)
    if not right or not all(isinstance(value, list) for value in lists.values()):
        raise foreign(key, f"{text[:60]!r}, which is not an outcome of a round")
    ranks, missing, fields = (tuple(lists[name]) for name in _NAMES)
    value = data.get("value")
    try:
        value = None if value is None else codec.read(value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise foreign(key, f"{text[:60]!r}, whose value is not one of this round") from error
    return Outcome(cast(Reason, reason), ranks, missing, fields, message, value)


def parsed(text: str, key: str) -> dict[str, Any]:
    """Return the JSON object that a text is; raise ``AgreementError`` for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise foreign(key, f"{text[:60]!r}, which is not a JSON object")
    return data


class AlreadyConcluded(Exception):
    """A step has the ``outcome`` already that a coordinator was about to conclude."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass
class Step:
    """One step of a round: its keys, and which of them this rank knows to be in use.

    ``prober`` is the rank whose probe this one has answered, ``until`` when that has to have an outcome.
    """

    base: str
    proposal: Proposal = NOTHING
    codec: Codec[Any] = JSON
    probed: bool = False
    odd: bool = False
    prober: int | None = None
    until: float = 0.0

    @property
    def name(self) -> str:
        """The name of the step in its round."""
        return self.base.rpartition("/")[2]

    def key(self, what: str) -> str:
        """Return the key of one thing of the step."""
        return f"{self.base}/{what}"

    def keys(self, digests: Iterable[str]) -> list[str]:
        """Return the keys that the step may have left, besides its sets."""
        # Documents first: the other keys say which there are, to who goes on where the one that deletes them dies.
        names = [f"document/{digest}" for digest in digests]
        names += ["after"] if self.probed else []
        names += ["odd", "reference"] if self.proposal.digest or self.probed else []
        names += ["texts", "coordinator", "outcome"]
        return [self.key(name) for name in names]

    @property
    def sets(self) -> list[str]:
        """The sets of participants that the step may have left."""
        return [self.key(name) for name in (*(("responsive",) if self.probed else ()), "arrived")]


# -- how long a participant waits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WaitPolicy:
    """Wait for the outcome for at most ``seconds``, or ``if_odd`` if this rank's proposal differs from the first."""

    seconds: float
    if_odd: float = field(default=inf, kw_only=True)

    def wait(self, among: Round, step: Step) -> Outcome | None:
        """Return the outcome; None to conclude without the others."""
        return among.receive(step, min(self.seconds, self.if_odd) if step.odd else self.seconds)


@dataclass(frozen=True)
class WhileProgress(WaitPolicy):
    """Wait for at most ``seconds`` after a participant has called ``Round.advance``."""

    def wait(self, among: Round, step: Step) -> Outcome | None:
        """Return the outcome; None where no participant makes progress any more."""
        before = -1
        while (received := among.receive(step, self.seconds)) is None:
            now = among.progress()
            if now == before:
                return None
            before = now
        return received


@dataclass(frozen=True)
class UntilEnough(WaitPolicy):
    """Wait for at most ``seconds``, or until ``enough(arrivals)``; polled every 20 ms at first, later every second."""

    enough: Callable[[Arrivals], bool]

    def wait(self, among: Round, step: Step) -> Outcome | None:
        """Return the outcome; None once nobody is left to wait for."""
        end, pause = time.monotonic() + self.seconds, POLL
        while (received := among.receive(step, max(min(pause, end - time.monotonic()), 0.0))) is None:
            if self.enough(among.arrivals(step.name)) or time.monotonic() >= end:
                return None
            pause = min(2 * pause, _SELDOM)
        return received
