"""The diagnosis: causes before consequences, one sentence, and who waits.

>>> from rankmesh.debug.doctor.diagnosis import diagnose
>>> diagnose({}).verdict
'no rank left a recording: the cause is not known'
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.causes import CAUSES, Cause, wait_in
from rankmesh.debug.doctor.failures import Failure, is_secondary, lines_of_failures
from rankmesh.debug.doctor.folder import read_paths
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, history_of
from rankmesh.debug.doctor.lines import Line, recordings_of, with_lines
from rankmesh.debug.doctor.nccl import NcclLog, lines_of_nccl
from rankmesh.debug.doctor.order import divergences
from rankmesh.debug.doctor.parting import departure
from rankmesh.debug.doctor.ras import Report, contradictions, equal_counts, lines_of_reports
from rankmesh.debug.doctor.reader import Progress
from rankmesh.debug.doctor.recording import TRUST, Recording
from rankmesh.debug.doctor.roots import roots
from rankmesh.debug.doctor.stacks import Place, lines_of_stacks
from rankmesh.debug.doctor.waits import Waits, waits_of
from rankmesh.debug.doctor.watchdog import Log, lines_of_logs
from rankmesh.debug.slow import SlowReport
from rankmesh.errors import first_of, in_words

__all__ = ["Diagnosis", "diagnose", "doctor", "report", "summary"]

# For how many causes the ranks that wait because of them are counted, and for how many it is searched where a rank left
# the order.
_COUNTED, _DEPARTED = 64, 8
# How many causes a report lists, and how many lines of code of each.
_SHOWN = 8
# How many lines of code the log shows.
_PLACES = 4
# Causes that lie with a single rank, and causes by which the minority of a group left the others.
_OF_A_RANK, _DIVERGED = ("dead", "absent", "late"), ("different", "order")
# What lines show only if no other rank can be the cause.
_INFERRED = (*_OF_A_RANK, "crosswise")
# What a divergence of the same ranks or the same group explains, and what may have begun at an earlier call.
_EXPLAINED, _LEFT_THE_ORDER = ("absent", "late", "crosswise"), ("absent", *_DIVERGED)


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a hang: its causes, those that explain others first, and the ranks that wait.

    ``notes`` are about files: left out, not readable, or at odds with each other. ``remarks`` are facts of reports and
    logs that name no rank of the job. ``seen`` is about a job that does not seem to hang: the watch's earlier
    diagnosis, or that counts are equal. ``slow`` is the watch's last report on its speed.
    """

    causes: tuple[Cause, ...]
    waiting: tuple[int, ...]
    world_size: int
    notes: tuple[str, ...]
    history: History
    waits: Waits
    remarks: tuple[str, ...] = ()
    seen: str = ""
    slow: SlowReport | None = None

    @property
    def verdict(self) -> str:
        """The diagnosis in one sentence."""
        if not self.causes:
            if self.waiting or self.remarks:
                return "; ".join([*self.remarks[:_SHOWN], *self._waits()])
            if failed := {rank: found.failure for rank, found in self.history.recordings.items() if found.failure}:
                error = next(iter(failed.values()))
                return f"no rank waits, but {in_words(sorted(failed))} failed ({error}); the cause is not known"
            if self.seen:
                return self.seen
            if self.slow:
                sentences = (f"slow: {finding.sentence}" for finding in self.slow.findings)
                return next(sentences, "no rank waits, and nothing is slow")
            if not any(map(self.history.has, self.history.recordings)):
                return "no rank left a recording: the cause is not known"
            return "; ".join(["no rank waits: nothing in these recordings hangs", *self._waits()])
        cause, same = self.causes[0], self._first_kind
        ranks = _ranks_of(same)
        trust = f" ({cause.confidence})" if cause.confidence else ""
        if cause.cause in _OF_A_RANK and (failed_by := self._failed_by(ranks)):
            return f"failed: {'; '.join(filter(None, [failed_by, cause.evidence]))}{trust}"
        count = "1 more call" if len(same) == 2 else f"{len(same) - 1} more calls"
        more = f" (and {count} like it: {in_words(ranks)})" if len(same) > 1 else ""
        # An unresponsive rank is not dead: its process runs.
        runs = cause.cause == "dead" and self.history.are_alive(cause.ranks)
        return f"{'unresponsive' if runs else cause.cause}: {cause.evidence}{more}{trust}"

    def _waits(self) -> Iterator[str]:
        """Yield the waiting ranks of each call, the lines of other ranks, and that no cause is known."""
        for call in self.waits.calls[:_PLACES]:
            not_there = f", {in_words(call.missing)} {'does' if len(call.missing) == 1 else 'do'} not"
            yield wait_in(call) + f" at {call.site}" * bool(call.site) + not_there * bool(call.missing)
        sites = {rank: at.site for rank, one in self.history.recordings.items() if (at := one.in_call) and at.running}
        yield from [f"rank {rank} is at {site}" for rank, site in sites.items() if site][:_PLACES]
        if self.waiting:
            yield "nothing here shows for which rank"
            all_wait = set(self.waiting) >= self.history.recordings.keys()
            if self.history.is_partial or (all_wait and not any(call.missing for call in self.waits.calls)):
                yield "nothing is known of the other ranks: add their files"

    def _failed_by(self, ranks: Sequence[int]) -> str:
        """Describe the errors by which these ranks failed; "" if one of them has none of its own."""
        errors = {rank: found.failure for rank, found in self.history.recordings.items() if rank in ranks}
        if len(errors) < len(ranks) or not all(
            error and not is_secondary(error.partition(", at ")[0]) for error in errors.values()
        ):
            return ""
        return "; ".join(f"rank {rank} failed: {error}" for rank, error in errors.items())

    @property
    def at_fault(self) -> tuple[int, ...]:
        """The ranks to blame; none in a deadlock, or if the cause is not known.

        If more than half of a group have not made a call, none is to blame: the others may have made it by mistake.
        """
        same = self._first_kind
        kind = same[0].cause if same else ""
        shares = [(len(cause.ranks), len(cause.group.members)) for cause in same]
        is_minority = all(2 * ranks < members for ranks, members in shares)
        is_half = all(2 * ranks <= members for ranks, members in shares)
        named = kind == "dead" or (kind in _OF_A_RANK and is_half) or (kind in _DIVERGED and is_minority)
        return tuple(_ranks_of(same)) if named else ()

    @property
    def _first_kind(self) -> list[Cause]:
        """The first cause and all others of its kind."""
        return [cause for cause in self.causes if cause.cause == self.causes[0].cause]

    @property
    def unrecorded(self) -> tuple[int, ...]:
        """The ranks without a recording of their own that no cause names."""
        named = {rank for cause in self.causes for rank in cause.ranks}
        there = (rank for rank in range(self.world_size) if not self.history.has(rank))
        return tuple(rank for rank in there if rank not in named)

    def to_dict(self) -> dict[str, object]:
        """Return the diagnosis as plain data."""
        return {
            "verdict": self.verdict,
            "causes": [cause.to_dict() for cause in self.causes],
            "waiting": list(self.waiting),
            "world_size": self.world_size,
            "recordings": [rank for rank, one in self.history.recordings.items() if one.from_rank and not one.source],
            "remarks": list(self.remarks),
            "slow": [finding.to_dict() for finding in self.slow.findings] if self.slow else [],
            "notes": list(self.notes),
        }


def _ranks_of(causes: Iterable[Cause]) -> list[int]:
    return sorted({rank for cause in causes for rank in cause.ranks})


def doctor(
    paths: str | Path | Sequence[str | Path], plan: Plan | None = None, progress: Progress | None = None
) -> Diagnosis:
    """Diagnose a hang by these files and folders; a plan names groups by kind and coordinate.

    ``progress`` gets how many recordings are read, and of how many.
    Raises ``RecordingError`` if none of them holds a recording or other evidence.
    """
    found = read_paths([Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)], progress)
    reports = found.of(Report)
    slow = max(found.of(SlowReport), key=lambda report: report.time, default=None)
    reported = max((report.total for report in reports), default=0)
    stated = plan.world_size if plan is not None else reported
    logged = list(lines_of_logs(found.of(Log), plan, stated))
    ranks = [*found.recordings, *(line.rank for line in logged if not line.is_position)]
    size = max(stated, found.size, len(slow.places) if slow else 0, *(rank + 1 for rank in ranks))
    evidence: list[Line | str] = [
        *lines_of_failures(found.of(Failure), size),
        *logged,
        *lines_of_stacks(found.of(Place), size),
    ]
    for line in (*lines_of_reports(reports, plan), *lines_of_nccl(found.of(NcclLog))):
        if isinstance(line, Line) and not line.job and found.recordings:
            line = replace(line, job=line.source)  # its groups have other names and numbers than those of recordings
        evidence.append(line)
    remarks = [line for line in evidence if isinstance(line, str)]
    jobs = {"": [], **grouped((line.job, line) for line in evidence if isinstance(line, Line))}
    diagnosis = diagnose(with_lines(found.recordings, recordings_of(jobs.pop(""), size)), plan)
    for job, of_job in jobs.items():
        one = diagnose(recordings_of(of_job), None if of_job[0].is_position else plan)
        verdict = re.sub(r"\brank(s?)\b", r"position\1", one.verdict) if of_job[0].is_position else one.verdict
        remarks.append(f"{job}: {verdict}")
    counted = equal_counts(reports)
    notes = (*found.notes, *contradictions(reports, found.recordings))
    if counted and (remarks or diagnosis.causes or diagnosis.waiting):
        notes = (*notes, f"{reports[0].path}: {counted}")
    return replace(
        diagnosis,
        remarks=tuple(remarks),
        notes=notes,
        world_size=diagnosis.world_size if found.recordings else max(diagnosis.world_size, size),
        seen=f"no rank waits any more; while the job ran the watch found: {found.watched}"
        if found.watched
        else counted,
        slow=slow,
    )


def diagnose(recordings: Mapping[int, Recording], plan: Plan | None = None) -> Diagnosis:
    """Diagnose a hang by the recordings of the ranks."""
    history = history_of(recordings, plan)
    waits = waits_of(history)
    diverged = list(divergences(history))
    numbers = {cause.group: cause.call for cause in diverged}
    odd = {rank for cause in diverged for rank in cause.ranks}
    others = [
        cause
        for cause in roots(history, waits, numbers)
        if not (cause.cause in _EXPLAINED and (odd & set(cause.ranks) or _follows(cause, numbers)))
    ]
    causes = _trusted(history, _ordered(history, waits, [*diverged, *others]))
    causes[:_DEPARTED] = [_with_departure(history, cause) for cause in causes[:_DEPARTED]]
    return Diagnosis(tuple(causes), tuple(waits.waiting), history.world_size, (), history, waits)


def _trusted(history: History, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, with a confidence where they rest on lines, without those that lines cannot establish.

    A rank for which no line shows a call may still wait in one: it is named if no other rank can be the cause.
    """
    sources = {rank: one.source for rank, one in history.recordings.items() if one.source}
    gone = {rank for rank in sources if not history.recordings[rank].from_rank}
    suspects = gone | {rank for cause in causes if cause.cause in _INFERRED for rank in cause.ranks}
    is_clear = len(suspects) == 1 and history.trust != TRUST[0] and 2 * history.unrecorded < history.world_size
    found = []
    for cause in causes:
        of = [sources[rank] for rank in sorted({*cause.ranks, *cause.group.members}) if rank in sources]
        if not of:
            found.append(cause)
        elif (
            cause.cause in (*_DIVERGED, "stuck")
            or gone.issuperset(cause.ranks)
            or (is_clear and cause.cause in _OF_A_RANK)
        ):
            known = all(rank in history.recordings for rank in cause.ranks)
            trust = (
                "certain" if cause.cause in _DIVERGED else min("likely", history.trust or "possible", key=TRUST.index)
            )
            source = first_of(list(dict.fromkeys(of)))
            found.append(replace(cause, source=source, confidence=trust if known else "possible"))
    return found


def _follows(cause: Cause, diverged: Mapping[KnownGroup, int]) -> bool:
    """Return whether a cause is at the call at which its group diverged, or after it."""
    return diverged.get(cause.group, cause.call + 1) <= cause.call


def _with_departure(history: History, cause: Cause) -> Cause:
    """Add to a cause the first call by which its rank left the order of the group's members, if that is another."""
    if cause.cause not in _LEFT_THE_ORDER or len(cause.ranks) != 1:
        return cause
    found = departure(history, cause.ranks[0], cause.group)
    if found is None or found[:2] == (cause.group, cause.call):
        return cause
    return replace(cause, evidence=f"{cause.evidence}; {found[2]}")


# -- which cause comes first ---------------------------------------------------------------------------------------


def _ordered(history: History, waits: Waits, causes: list[Cause]) -> list[Cause]:
    """Sort causes: what explains others before what others explain, then what explains more ranks.

    A call that all have entered may only be slow, and is last.
    """
    reached = [_reached(history, waits, cause) if place < _COUNTED else set() for place, cause in enumerate(causes)]
    counted = [
        replace(cause, explains=len(ranks & waits.of_rank.keys())) for cause, ranks in zip(causes, reached, strict=True)
    ]

    def explained(place: int) -> bool:
        """Return whether another cause explains this one, and not the reverse: the dead do not explain a wrong call."""
        ranks_of, diverged = set(causes[place].ranks), causes[place].cause in _DIVERGED
        return any(
            ranks_of <= ranks and (causes[other].cause in _DIVERGED or not set(causes[other].ranks) <= reached[place])
            for other, ranks in enumerate(reached)
            if other != place and not (diverged and causes[other].cause == "dead")
        )

    def key(place: int) -> tuple[object, ...]:
        cause = counted[place]
        under_way = cause.cause == "stuck" and not set(cause.ranks) & waits.broken.keys()
        behind = place < _COUNTED and explained(place)
        return under_way, behind, -cause.explains, CAUSES.index(cause.cause), cause.ranks

    return [counted[place] for place in sorted(range(len(causes)), key=key)]


def _reached(history: History, waits: Waits, cause: Cause) -> set[int]:
    """Return the ranks that wait because of a cause, directly or behind others; and those that it ended."""
    reached = {call for call in waits.calls if call.group is cause.group and call.number >= cause.call}
    ranks = set(cause.ranks) & waits.of_rank.keys()
    if cause.cause in _DIVERGED:
        ended = {rank for rank in cause.group.members if not history.has(rank)}
        ranks |= ended
        reached |= {call for rank in ended for call in waits.for_whom.get(rank, ())}
    elif cause.cause != "stuck" or set(cause.ranks) & waits.broken.keys():
        reached = {call for call in reached if set(call.missing) & set(cause.ranks)}
        reached |= {call for rank in cause.ranks for call in waits.for_whom.get(rank, ())}
    pending = list(reached)
    while pending:
        for rank in pending.pop().waiting:
            if rank not in ranks:
                ranks.add(rank)
                fresh = [call for call in waits.for_whom.get(rank, ()) if call not in reached]
                reached.update(fresh)
                pending += fresh
    return ranks


# -- three lines -----------------------------------------------------------------------------------------------------


def summary(diagnosis: Diagnosis) -> list[str]:
    """Summarise a diagnosis in three lines for a log: ranks, lines of code, time; only the first without a cause.

    ```
    late: rank 3 behind by 1 call of dp@tp1: it is in no call at train.py:8 in load; rank 1 waits in all_reduce, ...
    rank 1 is at train.py:31 in step; rank 3 is at train.py:8 in load
    since 14:03:22, for 60 s
    ```
    """
    lines = [diagnosis.verdict]
    sites = diagnosis.causes[0].sites if diagnosis.causes else {}
    if sites:
        shown = sorted(sites, key=lambda rank: (rank not in diagnosis.causes[0].ranks, rank))[:_PLACES]
        lines.append("; ".join(f"rank {rank} is at {sites[rank]}" for rank in sorted(shown)))
    began = min((call.since for call in diagnosis.waits.calls if 0 < call.since < 2**63 - 1), default=0)
    written = max((recording.written for recording in diagnosis.history.recordings.values()), default=0)
    if diagnosis.causes and 0 < began < written:
        since = time.strftime("%H:%M:%S", time.localtime(began / 1e9))
        lines.append(f"since {since}, for {(written - began) / 1e9:.0f} s")
    return lines


# -- the report ------------------------------------------------------------------------------------------------------


def report(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text: one sentence, then the evidence for each cause.

    ```
    late: rank 3 behind by 1 call of dp@tp1: it is in no call at train.py:8 in load; rank 1 waits in all_reduce, ...

    late       rank 3: all_reduce, call 5 of dp@tp1, ranks 1, 3; 3 ranks wait because of it
               rank 1   train.py:31 in step
               rank 3   train.py:8 in load
    waiting    ranks 0, 1, 2
    ```
    """
    first = diagnosis.verdict
    lines = [first]
    if diagnosis.causes:
        lines += ["", *(line for cause in diagnosis.causes[:_SHOWN] for line in _cause_lines(cause, first))]
    if len(diagnosis.causes) > _SHOWN:
        lines.append(f"{'':10} and {len(diagnosis.causes) - _SHOWN} more")
    lines += [f"{'':10} {remark}" for remark in diagnosis.remarks[:_SHOWN] if remark not in first]
    if (unrecorded := diagnosis.unrecorded) and any(not one.source for one in diagnosis.history.recordings.values()):
        lines.append(f"{'unknown':10} {in_words(unrecorded)} left no recording")
    for finding in diagnosis.slow.findings[:_SHOWN] if diagnosis.slow else ():
        lines += [] if finding.sentence in first else [f"{'slow':10} {finding.sentence}"]
    if diagnosis.waiting:
        lines.append(f"{'waiting':10} {in_words(diagnosis.waiting)} of {diagnosis.world_size}")
    return "\n".join(lines)


def _cause_lines(cause: Cause, first: str) -> Iterator[str]:
    """Yield the lines of a cause, with its evidence unless that is in the first line of the report."""
    waits = "1 rank waits" if cause.explains == 1 else f"{cause.explains} ranks wait"
    because = f"; {waits} because of it" if cause.explains else ""
    call = f"call {cause.call} of {cause.group}" if cause.call else str(cause.group)
    where = ", ".join(filter(None, [cause.operation, call, in_words(cause.group.members)]))
    yield f"{cause.cause:10} {in_words(cause.ranks)}: {where}{because}"
    if cause.confidence:
        yield f"{'':10} {cause.confidence}, by {cause.source}"
    if cause.evidence not in first:
        yield f"{'':10} {cause.evidence}"
    for rank, site in sorted(cause.sites.items())[:_SHOWN]:
        yield f"{'':10} rank {rank}  {site}"
