"""One step of a round: what participants arrive with, how long they wait, the keys that they use, and what they get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rankmesh.rendezvous.channel import foreign

if TYPE_CHECKING:
    from rankmesh.rendezvous.arrivals import Arrivals

__all__ = ["NOTHING", "AlreadyConcluded", "Outcome", "Patience", "Proposal", "Reason", "Step", "parsed"]

Reason = Literal["agreed", "different", "missing", "lost", "failed", "withdrawn", "twice"]
_NAMES = ("ranks", "missing", "fields")


@dataclass(frozen=True)
class Proposal:
    """What a participant arrives with.

    ``digest`` must be equal on all; ``document`` is what it stands for, published only when a coordinator asks why
    proposals differ. ``text`` is one line, given to the coordinator for each rank. Both may be empty.
    """

    digest: str = ""
    document: Callable[[], str] = str
    text: str = ""


NOTHING = Proposal()


@dataclass(frozen=True)
class Patience:
    """How long a participant waits for the outcome before it concludes without the others.

    ``seconds`` is its limit; ``if_odd`` a shorter one where its proposal differs from the first one's. With
    ``extends`` the limit begins again whenever a participant has called ``advance`` meanwhile. ``meanwhile`` is called
    once, after so many seconds without an outcome. ``enough`` says of the arrivals whether nobody is left to wait for;
    it is asked again and again, soon at first and then once a second.
    """

    seconds: float
    if_odd: float | None = None
    extends: bool = False
    meanwhile: tuple[float, Callable[[], None]] | None = None
    enough: Callable[[Arrivals], bool] | None = None


@dataclass(frozen=True)
class Outcome:
    """Why a round ended: ``agreed``, or what kept its participants from it.

    ``ranks`` are those to look at, ``missing`` those of them that are not there, ``fields`` what differs between
    proposals; ``message`` states it in words, and ``value`` is what the coordinator concluded, as JSON data.

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
    value: Any = None

    @property
    def agreed(self) -> bool:
        """Whether the participants go on."""
        return self.reason == "agreed"

    @property
    def text(self) -> str:
        """The outcome as JSON, without the fields that have their defaults."""
        default = vars(Outcome())
        return json.dumps(
            {name: value for name, value in vars(self).items() if name == "reason" or value != default[name]}
        )

    @classmethod
    def read(cls, text: str, key: str) -> Outcome:
        """The outcome that a text states; ``AgreementError`` for a text that no coordinator has written."""
        data = parsed(text, key)
        lists = {name: data.get(name, []) for name in _NAMES}
        message, reason = data.get("message", ""), data.get("reason")
        right = reason in get_args(Reason) and isinstance(message, str)
        if not right or not all(isinstance(value, list) for value in lists.values()):
            raise foreign(key, f"{text[:60]!r}, which is no outcome of a round")
        ranks, missing, fields = (tuple(lists[name]) for name in _NAMES)
        return cls(cast(Reason, reason), ranks, missing, fields, message, data.get("value"))


def parsed(text: str, key: str) -> dict[str, Any]:
    """The JSON object that a text is; ``AgreementError`` for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise foreign(key, f"{text[:60]!r}, which is no JSON object")
    return data


class AlreadyConcluded(Exception):
    """A step has the ``outcome`` already that a coordinator was about to conclude."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass
class Step:
    """One step of a round: its keys, and which of them this rank knows to be in use.

    ``prober`` is whose probe this rank has answered, ``until`` how long it waits for what comes of that.
    """

    base: str
    proposal: Proposal = NOTHING
    progress: bool = False
    probed: bool = False
    odd: bool = False
    prober: int | None = None
    until: float = 0.0

    def key(self, what: str) -> str:
        """The key of one thing of the step."""
        return f"{self.base}/{what}"

    def keys(self, digests: Iterable[str]) -> list[str]:
        """What the step may have left, besides its sets."""
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
