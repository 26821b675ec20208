"""The diagnosis: causes before consequences, a verdict in one sentence, and who waits.

>>> from rankmesh.debug.doctor.diagnosis import diagnose
>>> diagnose({}).verdict
'no rank waits: nothing in these recordings hangs'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.causes import CAUSES, Cause
from rankmesh.debug.doctor.divergence import divergences
from rankmesh.debug.doctor.folder import read_folder
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, history_of
from rankmesh.debug.doctor.recording import Recording
from rankmesh.debug.doctor.roots import roots
from rankmesh.debug.doctor.waits import Turn, Waits, waits_of
from rankmesh.errors import in_words

__all__ = ["Diagnosis", "diagnose", "doctor"]

# For how many causes it is counted how many ranks wait because of them.
_COUNTED = 64


@dataclass(frozen=True)
class Diagnosis:
    """What hangs: the causes, the first one first, and the ranks that wait; ``notes`` are on what was not read."""

    causes: tuple[Cause, ...]
    waiting: tuple[int, ...]
    world_size: int
    notes: tuple[str, ...]
    history: History
    waits: Waits

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.causes:
            if self.waiting:
                return f"{in_words(self.waiting)} wait, and nothing in these recordings says for what"
            return "no rank waits: nothing in these recordings hangs"
        first = self.causes[0]
        alike = [cause for cause in self.causes if cause.cause == first.cause]
        ranks = sorted({rank for cause in alike for rank in cause.ranks})
        more = f" (and {len(alike) - 1} more calls like it: {in_words(ranks)})" if len(alike) > 1 else ""
        return f"{first.cause}: {first.evidence}{more}"

    def to_dict(self) -> dict[str, object]:
        """The diagnosis as plain data."""
        return {
            "verdict": self.verdict,
            "causes": [cause.to_dict() for cause in self.causes],
            "waiting": list(self.waiting),
            "world_size": self.world_size,
            "recordings": sorted(rank for rank in self.history.recordings if self.history.has(rank)),
            "notes": list(self.notes),
        }


def doctor(folder: str | Path, plan: Plan | None = None) -> Diagnosis:
    """What hangs, by the recordings in a folder; a plan tells the groups by kind and coordinate.

    Raises ``RecordingError`` for a folder without recordings.
    """
    found = read_folder(Path(folder))
    return diagnose(found.recordings, plan, found.notes)


def diagnose(recordings: Mapping[int, Recording], plan: Plan | None = None, notes: tuple[str, ...] = ()) -> Diagnosis:
    """What hangs, by the recordings of the ranks."""
    history = history_of(recordings, plan)
    waits = waits_of(history)
    waiting = tuple(waits.waiting)
    diverged = list(divergences(history))
    calls = {cause.group: cause.call for cause in diverged}
    odd = {rank for cause in diverged for rank in cause.ranks}
    explained = {"absent", "late", "crosswise"}
    others = [
        cause
        for cause in roots(history, waits, calls)
        if not (cause.cause in explained and (odd & set(cause.ranks) or _follows(cause, calls)))
    ]
    causes = [*diverged, *others]
    counted = [_counted(cause, waits) if place < _COUNTED else cause for place, cause in enumerate(causes)]
    ordered = sorted(counted, key=_first)
    return Diagnosis(tuple(ordered), waiting, history.world_size, notes, history, waits)


def _first(cause: Cause) -> tuple[object, ...]:
    """What comes first: what explains most; a call that all have entered may only be under way, and comes last."""
    return cause.cause == "stuck", -cause.explains, CAUSES.index(cause.cause), cause.ranks


def _follows(cause: Cause, diverged: Mapping[KnownGroup, int]) -> bool:
    """Whether a cause lies behind a divergence of its group."""
    return diverged.get(cause.group, cause.call + 1) <= cause.call


def _counted(cause: Cause, waits: Waits) -> Cause:
    """The cause with the number of ranks that wait because of it, directly or behind others."""
    for_whom: dict[int, list[Turn]] = {}
    for turn in waits.turns:
        for rank in turn.missing:
            for_whom.setdefault(rank, []).append(turn)
    reached = {turn for turn in waits.turns if turn.group is cause.group and turn.number >= cause.call}
    if cause.cause not in ("different", "order", "stuck"):
        reached = {turn for turn in reached if set(turn.missing) & set(cause.ranks)}
        reached |= {turn for rank in cause.ranks for turn in for_whom.get(rank, ())}
    open_turns, ranks = list(reached), set(cause.ranks) & set(waits.of_rank)
    while open_turns:
        for rank in open_turns.pop().waiting:
            if rank not in ranks:
                ranks.add(rank)
                fresh = [turn for turn in for_whom.get(rank, ()) if turn not in reached]
                reached.update(fresh)
                open_turns += fresh
    return replace(cause, explains=len(ranks))
