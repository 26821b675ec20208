"""Arrivals: what the coordinator of a step finds out about its participants before it concludes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rankmesh.errors import in_words
from rankmesh.rendezvous.step import POLL, AlreadyConcluded, Outcome, Probe, Step, parsed

if TYPE_CHECKING:
    from rankmesh.rendezvous.round import Round

__all__ = ["Arrivals", "Conclude", "lost", "twice"]

_Result = TypeVar("_Result")


@dataclass
class Arrivals:
    """The participants of a step as its coordinator sees them; ``complete`` is True when all have arrived."""

    round: Round
    step: Step
    complete: bool = False
    # Kept by hand: until Python 3.12 a `cached_property` holds a lock meanwhile, for which simulated ranks would wait.
    _absent: list[int] | None = field(default=None, init=False)
    _texts: dict[int, list[str]] | None = field(default=None, init=False)

    @property
    def absent(self) -> list[int]:
        """The participants that have not arrived."""
        if self._absent is None:
            self._absent = [] if self.complete else self._set("arrived")
        return self._absent

    @property
    def differ(self) -> bool:
        """True if the proposals of the participants that arrived differ."""
        # Who is absent is asked first: a proposal that comes in between would be of nobody, and so not differ.
        self.absent  # noqa: B018  - kept
        # Not all that is odd differs: the first proposal may be of a process that died, and was started again.
        return self._ask(lambda: self.round.channel.wait(self.step.key("odd"), 0)) and len(self.proposals) > 1

    @property
    def proposals(self) -> dict[str, list[int]]:
        """The ranks that arrived, by the digest of their proposal."""
        reference = self._ask(lambda: self.round.channel.read(self.step.key("reference"))) or ""
        odd = self._posted("odd")
        away = set(self.absent)
        found: dict[str, list[int]] = {}
        for rank in self.round.participants:
            if rank not in away:
                found.setdefault(odd[rank][-1] if rank in odd else reference, []).append(rank)
        return found

    @property
    def texts(self) -> dict[int, list[str]]:
        """The texts of each rank that has given one."""
        if self._texts is None:
            self._texts = self._posted("texts")
        return self._texts

    def document(self, digest: str) -> dict[str, object]:
        """Return the document of a digest, published by ranks that answered a probe; empty if none of them did."""
        key = self.step.key(f"document/{digest}")
        text = self._ask(lambda: self.round.channel.read(key))
        return parsed(text, key) if text else {}

    @property
    def concluded(self) -> bool:
        """True if the step has an outcome, or is about to have one."""
        return self._ask(lambda: self.round.channel.wait(self.step.key("outcome"), 0))

    def probe(self, seconds: float = 0.0) -> None:
        """Ask who is responsive; for so long, and a moment more, participants may take to answer.

        Raises ``AlreadyConcluded`` where others have given an outcome meanwhile: this rank was too slow.
        """
        key = self.step.key("outcome")
        probe = Probe(self.round.rank, seconds + self.round.moment).text
        there = self._ask(lambda: self.round.channel.announce(key, probe))
        if there != probe:
            raise AlreadyConcluded(Outcome.read(there, key, self.step.codec))
        self._ask(lambda: self.round.respond(self.step))

    def unresponsive(self, seconds: float = 0.0, *, besides: Iterable[int] = ()) -> list[int]:
        """Wait for answers to a probe for ``seconds`` and a moment; return the participants without one.

        Those ``besides`` are not waited for.
        """
        return self._awaited("responsive", besides, seconds + self.round.moment)

    def settled(self, missing: Callable[[Sequence[int]], Outcome]) -> Outcome | None:
        """Return the outcome of a step in which all arrive with one proposal; None if proposals differ.

        ``missing`` gives the outcome where ranks have not arrived. A probe finds who was lost before proposals count.
        """
        absent, differ = self.absent, self.differ
        if not differ and (absent or self.complete):
            return missing(absent) if absent else Outcome()
        self.probe()
        unresponsive = self.unresponsive(besides=absent)
        if unresponsive:
            return lost(unresponsive, "had arrived")
        return None if differ else Outcome()

    def still_absent(self, seconds: float) -> list[int]:
        """Wait ``seconds`` more for arrivals; return the participants that are absent then."""
        return self._awaited("arrived", (), seconds)

    def _awaited(self, name: str, besides: Iterable[int], seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        expected = set(self.round.participants).difference(besides)
        while (missing := sorted(expected.intersection(self._set(name)))) and time.monotonic() < end:
            # Not slept: ranks that are simulated go on while one of them waits for the store.
            self._ask(lambda: self.round.channel.wait(self.step.key("never"), POLL))
        return missing

    def _posted(self, name: str) -> dict[int, list[str]]:
        writers = len(self.round.participants)
        return self._ask(lambda: self.round.channel.posted(self.step.key(name), writers))

    def _set(self, name: str) -> list[int]:
        return self._ask(lambda: self.round.channel.absent(self.step.key(name), self.round.participants))

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        return self.round.ask(call)


def twice(rank: int, first: str | None, second: str) -> Outcome:
    """Two processes with one rank number."""
    message = (
        f"two processes claim rank {rank}: {first} and {second}; every process needs a rank of its own; "
        "start the ranks with one launcher"
    )
    return Outcome("twice", (rank,), message=message)


def lost(ranks: Sequence[int], doing: str) -> Outcome:
    """Ranks that stopped responding: ``doing`` is what they had done, in words."""
    message = f"{in_words(ranks)} {doing} and stopped responding; look at the logs of the missing ranks"
    return Outcome("lost", tuple(ranks), tuple(ranks), message=message)


Conclude = Callable[[Arrivals], Outcome]
