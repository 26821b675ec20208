"""Reports of ``ncclras`` (NCCL 2.24 and newer), as text and as JSON: counts of launches in each communicator.

```
#0-0 (0123456789abcdef) MISMATCH                                     communicator 0123456789abcdef
  Communicator ranks have different AllGather operation counts    ─>   AllGather   641   2 ranks: 12, 13
  30 ranks have launched up to operation 640                                       640   30 ranks: the others
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 1012 on node 10.0.0.2
```

NCCL numbers ranks by their position in a communicator. In one of all GPUs of the job that is the rank; ranks of others
are found there by host, process and GPU. The text lists only the few ranks of an outlier.

Counts are launches at one moment, without an order: ranks of a job that runs differ by one, too. Whoever has launched
more than another rank waits in its last call. NCCL counts no sends and receives, in which a rank may wait, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Budget, Limits, Unreadable, parse_json, read_text
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import DEFAULT, kinds_of_size
from rankmesh.debug.doctor.lines import Line
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import RecordingError, in_words

__all__ = [
    *("Communicator", "Process", "Report"),
    *("contradictions", "equal_counts", "lines_of_reports", "is_report", "read_report", "report_of"),
]

# One of 8,192 ranks in six communicators each has about 25 MB and a million values.
_LIMITS = Limits(size=64 << 20, values=1 << 22, depth=16)
_POSITIONS = 2**20
# What a report begins with.
_IS_TEXT = re.compile(
    rb"^(?:Job summary|Communicators\.\.\. ?|#\d+-\d+ \([0-9a-f]{1,16}\) (?:MISMATCH|INCOMPLETE).*)\r?$", re.M
)
_IS_JSON = re.compile(rb'^\s*\{.*"communicators(?:_count)?"\s*:', re.S)

Process = tuple[str, int, int]
"""Host, process id and GPU."""


@dataclass(frozen=True)
class Communicator:
    """One communicator: ``missing`` positions with the problem of each, and ``counts`` by operation where they differ.

    The counts are positions by the number of launches, () if the report does not list all of them.

    ``processes`` and ``ranks`` of the job are by position, as far as they are known; ``answered`` are positions with
    data.
    """

    hash: str
    size: int
    counts: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    processes: Mapping[int, Process] = field(default_factory=dict)
    answered: frozenset[int] = frozenset()
    ranks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """One report; ``total`` counts the GPUs of the job, 0 if it is not stated."""

    path: str
    total: int
    communicators: tuple[Communicator, ...]


def _ranked(communicators: Collection[Communicator], total: int) -> tuple[Communicator, ...]:
    """Return communicators with their ranks; without them where two communicators of the whole job contradict."""
    whole = [one for one in communicators if one.size == total]
    named = {(process, place) for one in whole for place, process in one.processes.items()}
    names = dict(named)
    if len(names) < len(named):
        return tuple(communicators)
    every = {place: place for place in range(total)} if whole else {}
    return tuple(replace(one, ranks=every if one.size == total else _places(one, names)) for one in communicators)


def _places(one: Communicator, names: Mapping[Process, int]) -> dict[int, int]:
    return {place: names[process] for place, process in one.processes.items() if process in names}


def is_report(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a report."""
    return _IS_TEXT.search(head) is not None or _IS_JSON.match(head) is not None


def read_report(path: Path) -> Report:
    """Return the report in a file; ``RecordingError`` if it cannot be read."""
    try:
        return report_of(read_text(path, _LIMITS.size), path.name)
    except Unreadable as error:
        raise RecordingError(
            f"{path.name} {error}: skipped; write the report again with ncclras -f json", path=str(path)
        ) from error


def report_of(text: str, path: str = "") -> Report:
    """Return the report that a text holds; ``Unreadable`` if it is not one."""
    if text.lstrip()[:1] != "{":
        return _of_text(text, path)
    try:
        return _of_json(parse_json(text, _LIMITS), path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"is not a report of ncclras ({error!r:.80})") from error


# -- JSON ------------------------------------------------------------------------------------------------------------


def _of_json(data: Mapping[str, Any], path: str) -> Report:
    found = tuple(_communicator(about) for about in data["communicators"])
    processes = {process for one in found for process in one.processes.values()}
    return Report(path, len(processes), _ranked(found, len(processes)))


def _communicator(about: Mapping[str, Any]) -> Communicator:
    counts: dict[str, dict[int, list[int]]] = {}
    processes, missing = {}, {}
    for rank in about["ranks"]:
        position, processes[position] = _process(rank)
        for operation, launched in rank["collective_counts"].items():
            counts.setdefault(str(operation)[:40], {}).setdefault(_whole(launched, 2**63), []).append(position)
    answered = frozenset(processes)
    for rank in about["missing_ranks"]:
        position, processes[position] = _process(rank)
        status = rank["status"]
        missing[position] = (
            "dead" if status["considered_dead"] else "unresponsive" if status["unresponsive"] else "left"
        )
    differing = {
        operation: {launched: tuple(sorted(ranks)) for launched, ranks in sorted(by.items())}
        for operation, by in counts.items()
        if len(by) > 1
    }
    size = _whole(about["size"])
    return Communicator(
        str(about["hash"])[:18].removeprefix("0x").zfill(16), size, differing, missing, processes, answered
    )


def _process(rank: Mapping[str, Any]) -> tuple[int, Process]:
    process = str(rank["host"])[:80], _whole(rank["pid"], 2**31), _whole(rank["cuda_dev"], 2**31)
    return _whole(rank["rank"]), process


def _whole(value: object, end: int = _POSITIONS) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r:.40} where a number below {end} was expected")
    return value


# -- text ------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"#(\d{1,7})-\d{1,7} \(([0-9a-f]{1,16})\) (\w+)")
_OPERATION = re.compile(r"Communicator ranks have different (\w{1,40}) operation counts")
_RANK = r"Rank (?P<rank>\d{1,7}) "
_LAUNCHED = r"(?:launched up to operation (?P<launched>\d{1,18})|not launched any operations)"
_MANY = re.compile(rf"(?P<ranks>\d{{1,7}}) ranks have {_LAUNCHED}")
_ONE = re.compile(rf"{_RANK}has {_LAUNCHED}")
_LISTED = re.compile(rf"{_RANK}--")
_LEFT = re.compile(r"Rank (\d{1,7}) has status NOCOMM")
_AT = re.compile(r"GPU (\d{1,4})\b.{0,40} managed by process (\d{1,9}) on node (\S{1,80})")
_DEAD = re.compile(r"Process (\d{1,9}) on node (\S{1,80}) managing")
_STATUS = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")


def _of_text(text: str, path: str) -> Report:
    lines = [line.strip() for line in text.splitlines()]
    sizes, total, dead = _sizes(lines), _total(lines), set(_dead(lines))
    budget, parts = Budget(_LIMITS.values), dict[str, Communicator]()
    for (group, name), section, inside in _sections(lines):
        if group not in sizes:
            continue  # without the table of groups nobody knows its size
        one = parts.get(name, Communicator(name, sizes[group]))
        read = _incomplete if section == "INCOMPLETE" else _mismatch if section == "MISMATCH" else None
        if read is not None:
            operations = sum(_OPERATION.match(line) is not None for line in inside)
            budget.spend(one.size * (1 + operations))
            one = read(replace(one, processes={**one.processes, **_processes(inside)}), inside)
        gone = {p: "dead" for p in one.missing if one.processes.get(p, ("", 0, 0))[:2] in dead}
        parts[name] = replace(one, missing={**one.missing, **gone})
    if not parts and not sizes:
        raise Unreadable("is not a complete report of ncclras: it has no table of communicators")
    return Report(path, total, _ranked(parts.values(), total))


def _total(lines: list[str]) -> int:
    """Return the number of GPUs, the last one below the last heading "(total)"."""
    found = [after.split() for line, after in pairwise(lines) if line.startswith("(total)")]
    return int(found[-1][-1]) if found and found[-1] and found[-1][-1].isdecimal() and len(found[-1][-1]) < 8 else 0


def _sizes(lines: list[str]) -> dict[str, int]:
    """Return the ranks of a communicator by group, from the table that the report begins with."""
    rows = (line.split() for line in lines)
    return {
        row[0]: int(row[4])
        for row in rows
        if 7 <= len(row) <= 8 and row[6] in _STATUS and row[0].isdecimal() and row[4].isdecimal()
        if len(row[4]) < 8 and 0 < int(row[4]) <= _POSITIONS
    }


def _dead(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the host and the id of each process that NCCL considers dead."""
    inside = False
    for line in lines:
        inside = line == "DEAD" or (inside and line != "")
        if inside and (match := _DEAD.match(line)):
            yield match[2], int(match[1])


def _sections(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str], str, list[str]]]:
    """Yield the group and hash of each section, what it is about, and its lines."""
    header, inside = None, list[str]()
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            inside.append(line)
            continue
        if header is not None:
            yield (header[1], header[2]), header[3], inside
        header, inside = match, []
    if header is not None:
        yield (header[1], header[2]), header[3], inside


def _processes(lines: Iterable[str]) -> dict[int, Process]:
    found = ((re.match(r"Rank (\d{1,7}) ", line), _AT.search(line)) for line in lines)
    return {int(rank[1]): (at[3], int(at[2]), int(at[1])) for rank, at in found if rank and at}


def _incomplete(one: Communicator, lines: list[str]) -> Communicator:
    ranks = (_LISTED.match(line) for line in lines)
    return replace(one, missing={**one.missing, **{int(match["rank"]): "unresponsive" for match in ranks if match}})


def _mismatch(one: Communicator, lines: list[str]) -> Communicator:
    """Add the counts of a section, each with the positions that it lists."""
    found: dict[str, list[tuple[int, int, list[int]]]] = {}
    rows: list[tuple[int, int, list[int]]] = []
    missing = dict(one.missing)
    for line in lines:
        if match := _OPERATION.match(line):
            rows = found.setdefault(match[1], [])
        elif line == "Communicator ranks have different status":
            rows = []
        elif match := _LEFT.match(line):
            missing[int(match[1])] = "left"
        elif match := _MANY.match(line):
            rows.append((int(match["launched"] or 0), int(match["ranks"]), []))
        elif match := _ONE.match(line):
            rows.append((int(match["launched"] or 0), 1, [int(match["rank"])]))
        elif rows and (match := _LISTED.match(line)):
            rows[-1][2].append(int(match["rank"]))
    counts = {operation: _completed(one.size, rows, missing) for operation, rows in found.items() if len(rows) > 1}
    answered = {position for by in counts.values() for positions in by.values() for position in positions}
    return replace(one, counts={**one.counts, **counts}, missing=missing, answered=one.answered | answered)


def _completed(
    size: int, rows: list[tuple[int, int, list[int]]], missing: Mapping[int, str]
) -> dict[int, tuple[int, ...]]:
    """Return the positions by count; a single count whose ranks are not listed has all others, if as many are left."""
    listed = {position for _, _, positions in rows for position in positions}
    others = [position for position in range(size) if position not in listed and position not in missing]
    is_single = sum(len(positions) != ranks for _, ranks, positions in rows) == 1
    found = {}
    for launched, ranks, positions in sorted(rows):
        places = positions if len(positions) == ranks else others if is_single else []
        found[launched] = tuple(places) if len(places) == ranks else ()
    return found


# -- lines of ranks ----------------------------------------------------------------------------------------------------

_STATES = {"dead": "is considered dead by NCCL", "unresponsive": "did not answer NCCL's request"}


def lines_of_reports(reports: Iterable[Report], plan: Plan | None = None) -> Iterator[Line | str]:
    """Yield a line for each rank and count of the reports; words where they do not list the ranks."""
    for report in reports:
        for one in report.communicators:
            yield from _lines(report, one, plan)


def _lines(report: Report, one: Communicator, plan: Plan | None) -> Iterator[Line | str]:
    stated = {*one.missing, *(place for by in one.counts.values() for places in by.values() for place in places)}
    is_named = all(place in one.ranks for place in stated)
    rank_of = one.ranks if is_named else {place: place for place in stated}
    label = _label(one, plan)
    members = tuple(rank_of[place] for place in range(one.size)) if len(rank_of) == one.size else None
    group = GroupName(one.hash, DEFAULT if one.size == report.total else "", members)
    line = Line(source=report.path, rank=0, job="" if is_named else label, is_position=not is_named, group=group)
    for place, found in sorted(one.missing.items()):
        if found == "left":
            yield f"{report.path}: {in_words([rank_of[place]])} answered, and is not a member of {label} any more"
        else:
            yield replace(line, rank=rank_of[place], state=_STATES[found], alive=found == "unresponsive")
    for operation, counts in one.counts.items():
        # NCCL counts each operation of a communicator apart.
        group = replace(group, name=f"{one.hash} {operation}")
        lowest = min(counts)
        if not all(counts.values()):
            yield f"{label}: {operation} launched {lowest} to {max(counts)} times; ncclras -f json lists the ranks"
        for launched, places in counts.items():
            number, enqueued = (launched, None) if launched > lowest else (None, launched)
            for place in places:
                made = replace(line, group=group, number=number, operation=operation, enqueued=enqueued)
                yield replace(made, rank=rank_of[place])


def _label(one: Communicator, plan: Plan | None) -> str:
    kinds = " or ".join(kinds_of_size(plan, one.size)[:4])
    return f"communicator {one.hash} of {one.size} ranks" + (f", {kinds} by its size" if kinds else "")


def equal_counts(reports: Sequence[Report]) -> str:
    """Return in words that no report shows a mismatch, and how to learn more; "" if one does."""
    if not reports or any(one.counts or one.missing for report in reports for one in report.communicators):
        return ""
    total = max(report.total for report in reports)
    ranks = f"{total} ranks, no mismatch" if total else "no mismatch"
    return f"{ranks}: the counts of each communicator are equal at this moment; a report ten seconds later shows more"


def contradictions(reports: Iterable[Report], recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Describe the ranks that respond by a report and not by the recordings, or the reverse."""
    for report in reports:
        missing, answered = set[int](), set[int]()
        for one in report.communicators:
            gone = (place for place, state in one.missing.items() if state != "left")
            missing |= {one.ranks[place] for place in gone if place in one.ranks}
            answered |= {one.ranks[place] for place in one.answered if place in one.ranks}
        wrote = {rank for rank, recording in recordings.items() if recording.from_rank}
        if both := missing & wrote:
            yield f"{report.path} has no data of {in_words(both)}, which left a recording at another time"
        if recordings and (both := answered - missing - wrote):
            yield f"{report.path} has data of {in_words(both)}, which left no recording: the process ran"
