"""Disagreement: why a meeting comes to nothing, found out by one rank for all.

```
all came, claims differ      call: each rank tells its claim               who differs from the most, in which fields
all of the world waits       each of these meetings waits for a rank       the same, over all of these meetings
                             that waits at another: call them all
time is over                 who is not on the roll                        who is missing, and who waits elsewhere
time is over, all came       call: who does not answer                     who was lost
```

Who waits where is on the rolls of the meetings: under ``0-4`` those of the first four ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankmesh.core.rank_range import RankRange
from rankmesh.errors import in_words
from rankmesh.rendezvous.store import LARGEST, JobStore, checked
from rankmesh.runtime.claim import Claim
from rankmesh.runtime.phase import Phase
from rankmesh.runtime.verdicts import GO, Verdict, different, failed, lost

__all__ = ["Disagreement"]

_POLL = 0.05
# Times the moment that an answer takes: nobody is in a hurry where all wait in vain.
_TELL = 2


@dataclass(frozen=True)
class _Waiting:
    """A meeting without a verdict, and the ranks that wait there."""

    circle: str
    turn: int
    span: RankRange
    here: tuple[int, ...]

    @property
    def place(self) -> str:
        return f"{self.circle}/{self.turn}"

    @property
    def absent(self) -> list[int]:
        here = set(self.here)
        return [rank for rank in self.span.members if rank not in here]


class Disagreement:
    """What one rank of a meeting finds out, and tells, when the meeting comes to nothing."""

    def __init__(self, store: JobStore, claim: Claim, turn: int) -> None:
        self._store, self._claim = store, claim
        self._own = _Waiting(claim.circle, turn, claim.span, ())
        self._author = False
        self.phase = self._phase(self._own)
        # Counts the ranks that make this rank's claim.
        self.alike = f"{self._own.place}/claim/{claim.digest}"

    def _phase(self, meeting: _Waiting) -> Phase:
        return Phase(self._store, f"{meeting.place}/agree", meeting.span, self._claim.rank, self._tell)

    # -- what a rank tells when it is called --------------------------------------------------------------------

    def _tell(self) -> None:
        """Write which claim this rank makes; the first of those that make it writes what it says."""
        claim = self._claim
        document = f"claims/{claim.digest}"
        if self._store.first(f"{document}/author", claim.rank) == claim.rank:
            self._author = True
            # What a store does not take is not shown: whether ranks agree, the hash says.
            large = len(claim.document) >= LARGEST
            self._store.write(document, {} if large else dict(claim.fields))
        self._store.write(f"told/{claim.rank}", {"claim": claim.digest})

    def make_known(self) -> None:
        """Say that these ranks meet, once: whoever asks where ranks wait looks there too."""
        if self._store.first(f"{self._own.circle}/known", self._claim.rank) == self._claim.rank:
            self._store.append("circles", self._own.circle)

    # -- the four ways ------------------------------------------------------------------------------------------

    def told(self) -> Verdict:
        """All came, and not all make one claim."""
        verdict = self._end([replace(self._own, here=tuple(self._own.span.members))])
        return verdict or self.phase.hear_of(self.phase.judge())

    def end_what_waits_in_vain(self) -> None:
        """Every rank of the world waits: end the meetings of which none can become complete any more."""
        end = time.monotonic() + self.phase.moment
        # A rank counts itself before it is on a roll.
        meetings = self._open()
        while sum(len(meeting.here) for meeting in meetings) < self._claim.world_size and time.monotonic() < end:
            time.sleep(_POLL)
            meetings = self._open()
        self._end(_in_vain(meetings))

    def out_of_time(self, seconds: float) -> Verdict:
        """This rank has lost patience: say who is missing, who differs, or who was lost."""
        judge = self.phase.judge()
        if judge != self._claim.rank:
            return self.phase.hear_of(judge)
        absent = self.phase.roll.absent()
        came = self._claim.span.size - len(absent)
        self._over(self._own)
        if absent and self._store.count(self.alike, 0) == came:
            return self.phase.announce(self._missing(absent, seconds))
        self.phase.wake(self.phase.moment)
        silent = self.phase.silent(time.monotonic() + self.phase.moment, besides=absent)
        if not absent:
            return self.phase.conclude(lost(silent) if silent else GO)
        verdict = self._difference(set(self._claim.span.members).difference(absent))
        missing = self._missing(absent, seconds)
        words = f"{verdict['message']}; {missing['message']}"
        return self.phase.conclude(verdict | {"missing": missing["missing"], "message": words})

    def _missing(self, absent: Sequence[int], seconds: float) -> Verdict:
        away = set(absent)
        elsewhere = {rank: meeting.span for meeting in self._open() for rank in away.intersection(meeting.here)}
        size = self._claim.span.size
        came = f"{size - len(absent)} of {size} did"
        message = f"waited {seconds:g} s for {in_words(absent)}, which did not arrive ({came})"
        if elsewhere:
            rank = min(elsewhere)
            span = elsewhere[rank]
            message += f"; rank {rank} waits to connect a plan of the ranks {span.offset} to {span.stop - 1}"
        message += "; look at the logs of the missing ranks, or give connect() a longer timeout"
        return failed(message, absent, missing=absent)

    # -- several meetings ---------------------------------------------------------------------------------------

    def _open(self) -> list[_Waiting]:
        """The meetings without a verdict, with the ranks that wait there."""
        found = []
        for circle in (f"0-{self._claim.world_size}", *self._store.lines("circles")):
            span = _span(circle)
            turn = self._store.count(f"{circle}/turn", 0)
            meeting = _Waiting(circle, turn, span, ())
            if not self._store.has(f"{meeting.place}/agree/verdict"):
                absent = set(self._phase(meeting).roll.absent())
                found.append(replace(meeting, here=tuple(rank for rank in span.members if rank not in absent)))
        return [meeting for meeting in found if meeting.here]

    def _end(self, meetings: Iterable[_Waiting]) -> Verdict | None:
        """Give their verdict to those of these meetings that no other rank judges; this rank's own."""
        phases = {meeting: self._phase(meeting) for meeting in meetings}
        mine = {meeting: phase for meeting, phase in phases.items() if phase.judge() == self._claim.rank}
        # First all of them get a next turn: who hears a verdict meets nobody who is still to hear one.
        for meeting in mine:
            self._over(meeting)
        seconds = _TELL * max((phase.moment for phase in mine.values()), default=0.0)
        for phase in mine.values():
            phase.wake(seconds)
        end = time.monotonic() + seconds
        for meeting, phase in mine.items():
            phase.silent(end, besides=meeting.absent)
        # All verdicts, and only then the first of them: who hears one takes away what it told.
        verdicts = {meeting: self._difference(_involved(meeting, mine)) for meeting in mine}
        given = {meeting.place: mine[meeting].conclude(verdict) for meeting, verdict in verdicts.items()}
        return given.get(self._own.place)

    def _difference(self, ranks: Iterable[int]) -> Verdict:
        """What differs between the claims that these ranks have told; those that told none are lost."""
        listed = sorted(ranks)
        told = self._store.read_all([f"told/{rank}" for rank in listed])
        waiting: dict[str, list[int]] = {}
        for key, data in told.items():
            digest = checked(data, key, claim=str)["claim"]
            waiting.setdefault(digest, []).append(int(key.rpartition("/")[2]))
        if len(told) < len(listed):
            return lost(sorted(set(listed) - {rank for ranks in waiting.values() for rank in ranks}))
        return different(waiting, {digest: dict(self._fields(digest)) for digest in waiting})

    def _fields(self, digest: str) -> Mapping[str, Any]:
        """What a claim says; nothing where the rank that was to write it is gone."""
        key = f"claims/{digest}"
        return self._store.read(key) if self._store.wait(key, self.phase.moment) else {}

    # -- what is left in the store ------------------------------------------------------------------------------

    def _over(self, meeting: _Waiting) -> None:
        """The meeting comes to nothing: these ranks meet anew, and its keys go when they have."""
        self._store.advance(f"{meeting.circle}/turn", meeting.turn)
        self._remember(meeting)

    def remember(self) -> None:
        """The meeting has failed after the ranks agreed: its keys go with those of the next."""
        self._remember(self._own)

    def _remember(self, meeting: _Waiting) -> None:
        self._store.append(f"{meeting.circle}/failed", meeting.place)

    def withdraw(self) -> None:
        """This rank hears no more of the meeting: delete what it told, and the claim that it was the last to make."""
        claim, alike = self._claim, self.alike
        if self._store.count(alike, -1) == 0:
            self._store.delete(alike)
        self._store.delete(f"told/{claim.rank}")
        if self._author:
            self._store.delete(f"claims/{claim.digest}")
            self._store.delete(f"claims/{claim.digest}/author")

    def forget(self) -> None:
        """Delete the keys of the meetings of these ranks that failed; all of them have heard why."""
        key = f"{self._own.circle}/failed"
        places = self._store.lines(key)
        for place in places:
            for phase in ("agree", "make"):
                for old in Phase(self._store, f"{place}/{phase}", self._claim.span, self._claim.rank).keys:
                    self._store.delete(old)
            self._store.delete(f"{place}/left")
        if places:
            self._store.delete(key)


def _span(circle: str) -> RankRange:
    offset, stop = map(int, circle.split("-"))
    return RankRange(offset, stop - offset)


def _in_vain(meetings: Iterable[_Waiting]) -> list[_Waiting]:
    """The meetings that cannot become complete: each waits for a rank that waits at another one of them.

    A rank that waits nowhere may still come; one that waits at a meeting that can become complete may come then.
    """
    vain = {meeting.place: meeting for meeting in meetings}
    place = {rank: meeting.place for meeting in vain.values() for rank in meeting.here}
    while True:
        hopeful = [name for name in vain if not any(place.get(rank) in vain for rank in vain[name].absent)]
        if not hopeful:
            return list(vain.values())
        for name in hopeful:
            del vain[name]


def _involved(meeting: _Waiting, others: Iterable[_Waiting]) -> set[int]:
    """The ranks that wait where ranks wait that this meeting waits for, its own among them."""
    rivals = [other for other in others if any(rank in meeting.span for rank in other.here)]
    return {rank for rival in rivals for rank in rival.here}
