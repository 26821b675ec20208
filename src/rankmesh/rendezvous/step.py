"""One step of a round: what participants arrive with, how long they wait, and the keys that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankmesh.rendezvous.outcome import Outcome

if TYPE_CHECKING:
    from rankmesh.rendezvous.arrivals import Arrivals

__all__ = ["NOTHING", "AlreadyConcluded", "Patience", "Proposal", "Step"]


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
