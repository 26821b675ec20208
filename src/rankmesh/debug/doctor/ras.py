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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Budget, Limits, Unreadable, parse_json, read_text
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import DEFAULT, kinds_of_size
from rankmesh.debug.doctor.lines import Line, ranks_of_processes
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import RecordingError, in_words

__all__ = ["Communicator", "Report", "contradictions", "equal_counts", "is_report", "lines_of_reports", "read_report"]

# One of 8,192 ranks in six communicators each has about 25 MB and a million values.
_LIMITS = Limits(size=64 << 20, values=1 << 22, depth=16)
_POSITIONS = 2**20
# What a report begins with.
_IS_TEXT = re.compile(
    rb"^(?:Job summary|Communicators\.\.\. ?|#\d+-\d+ \([0-9a-f]{1,16}\) (?:MISMATCH|INCOMPLETE).*)\r?$", re.M
)
_IS_JSON = re.compile(rb'^\s*\{.*"communicators(?:_count)?"\s*:', re.S)

# Host, process id and GPU.
_Process = tuple[str, int, int]


@dataclass
class Communicator:
    """One communicator: ``missing`` positions with the problem of each, and ``rows`` of launches by operation.

    A row has the number of launches, how many positions made as many, and those that the report lists. ``processes``
    are by position, as far as they are known; ``answered`` are positions with data.
    """

    hash: str
    size: int
    rows: dict[str, list[tuple[int, int, list[int]]]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    processes: dict[int, _Process] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)

    @property
    def counts(self) -> Iterator[tuple[str, dict[int, list[int]]]]:
        """Each operation whose launches differ, with the positions by number of launches, [] where they are not known.

        A single row whose positions are not listed has all others, if as many are left.
        """
        for operation, rows in self.rows.items():
            listed = {position for *_, positions in rows for position in positions}.union(self.missing)
            is_single = sum(len(positions) != ranks for _, ranks, positions in rows) == 1
            others = [position for position in range(self.size) if position not in listed] if is_single else []
            if len(rows) > 1:
                places = ((n, ranks, at if len(at) == ranks else others) for n, ranks, at in sorted(rows))
                yield operation, {n: sorted(at) if len(at) == ranks else [] for n, ranks, at in places}


@dataclass(frozen=True)
class Report:
    """One report; ``total`` counts the GPUs of the job, 0 if it is not stated."""

    path: str
    total: int
    communicators: tuple[Communicator, ...]

    def ranks(self) -> Iterator[tuple[Communicator, Mapping[int, int]]]:
        """Yield each communicator with the ranks of its positions, as far as they are known."""
        whole = [one for one in self.communicators if one.size == self.total]
        names = ranks_of_processes((process, place) for one in whole for place, process in one.processes.items())
        for one in self.communicators:
            if names is not None and one.size == self.total:
                yield one, dict(enumerate(range(self.total)))
            else:
                yield one, {place: names[at] for place, at in one.processes.items() if names and at in names}


def is_report(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a report."""
    return _IS_TEXT.search(head) is not None or _IS_JSON.match(head) is not None


def read_report(path: Path) -> Report:
    """Return the report in a file; ``RecordingError`` if it cannot be read."""
    try:
        text = read_text(path, _LIMITS.size)
        return _of_json(text, path.name) if text.lstrip()[:1] == "{" else _of_text(text, path.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, Unreadable) else f"is not a report of ncclras ({error!r:.80})"
        raise RecordingError(
            f"{path.name} {why}: skipped; write the report again with ncclras -f json", path=str(path)
        ) from error


# -- JSON ------------------------------------------------------------------------------------------------------------


def _of_json(text: str, path: str) -> Report:
    found = tuple(_communicator(about) for about in parse_json(text, _LIMITS)["communicators"])
    return Report(path, len({process for one in found for process in one.processes.values()}), found)


def _communicator(about: Mapping[str, Any]) -> Communicator:
    one = Communicator(str(about["hash"])[:18].removeprefix("0x").zfill(16), _whole(about["size"]))
    launched: dict[str, dict[int, list[int]]] = {}
    for rank in about["ranks"]:
        position = _whole(rank["rank"])
        one.answered.add(position)
        for operation, count in rank["collective_counts"].items():
            launched.setdefault(str(operation)[:40], {}).setdefault(_whole(count, 2**63), []).append(position)
    for rank in about["missing_ranks"]:
        status = rank["status"]
        found = "dead" if status["considered_dead"] else "unresponsive" if status["unresponsive"] else "left"
        one.missing[_whole(rank["rank"])] = found
    for rank in (*about["ranks"], *about["missing_ranks"]):
        process = str(rank["host"])[:80], _whole(rank["pid"], 2**31), _whole(rank["cuda_dev"], 2**31)
        one.processes[_whole(rank["rank"])] = process
    one.rows = {operation: [(n, len(at), at) for n, at in by.items()] for operation, by in launched.items()}
    return one


def _whole(value: object, end: int = _POSITIONS) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r:.40} where a number below {end} was expected")
    return value


# -- text ------------------------------------------------------------------------------------------------------------

_TOTAL = re.compile(r"^[ \t]*\(total\).*\n.*?(?<!\d)(\d{1,7})[ \t\r]*$", re.M)
_ROW = re.compile(
    r"^[ \t]*(\d{1,7})(?:[ \t]+\S+){3}[ \t]+(\d{1,7})[ \t]+\S+[ \t]+(?:NOCOMM|INIT|RUNNING|FINALIZE|ABORT)\b", re.M
)
_HEADER = re.compile(r"#(\d{1,7})-\d{1,7} \(([0-9a-f]{1,16})\) (\w+)")
_OPERATION = re.compile(r"Communicator ranks have different (\w{1,40})(?P<counts> operation counts)?")
_COUNT = re.compile(
    r"(?:(?P<ranks>\d{1,7}) ranks have|Rank (?P<rank>\d{1,7}) has)"
    r" (?:launched up to operation (?P<launched>\d{1,18})|not launched any operations)"
)
_RANK = re.compile(r"Rank (\d{1,7}) (?P<listed>--)?(?P<left>has status NOCOMM)?")
_AT = re.compile(r"GPU (\d{1,4})\b.{0,40} managed by process (\d{1,9}) on node (\S{1,80})")
_DEAD = re.compile(r"Process (\d{1,9}) on node (\S{1,80}) managing")


def _of_text(text: str, path: str) -> Report:
    sizes = {row[1]: int(row[2]) for row in _ROW.finditer(text) if 0 < int(row[2]) <= _POSITIONS}
    if not sizes:
        raise Unreadable("is not a complete report of ncclras: it has no table of communicators")
    budget, parts, dead = Budget(_LIMITS.values), dict[str, Communicator](), set[tuple[str, int]]()
    one, section, is_dead = None, "", False
    for line in map(str.strip, text.splitlines()):
        is_dead = line == "DEAD" or (is_dead and line != "")
        if match := _HEADER.fullmatch(line):
            section = match[3]
            is_known = match[1] in sizes and section in ("INCOMPLETE", "MISMATCH")
            one = parts.setdefault(match[2], Communicator(match[2], sizes[match[1]])) if is_known else None
            budget.spend(one.size if one else 0)
        elif is_dead and (match := _DEAD.match(line)):
            dead.add((match[2], int(match[1])))
        elif one is not None:
            _add(one, line, section, budget)
    for one in parts.values():
        one.missing |= {place: "dead" for place in one.missing if one.processes.get(place, ("", 0, 0))[:2] in dead}
        one.answered = {place for _, by in one.counts for places in by.values() for place in places}
    totals = _TOTAL.findall(text)
    return Report(path, int(totals[-1]) if totals else 0, tuple(parts.values()))


def _add(one: Communicator, line: str, section: str, budget: Budget) -> None:
    """Add a line of a section to its communicator: a rank that is missing, or counts with the positions below them."""
    rank, at = _RANK.match(line), _AT.search(line)
    if rank and at:
        one.processes[int(rank[1])] = at[3], int(at[2]), int(at[1])
    if section == "INCOMPLETE":
        one.missing |= {int(rank[1]): "unresponsive"} if rank and rank["listed"] else {}
    elif match := _OPERATION.match(line):
        one.rows[match[1] if match["counts"] else ""] = []
        budget.spend(one.size)
    elif rank and rank["left"]:
        one.missing[int(rank[1])] = "left"
    elif one.rows:
        rows = one.rows[next(reversed(one.rows))]
        if match := _COUNT.match(line):
            positions = [int(match["rank"])] if match["rank"] else []
            rows.append((int(match["launched"] or 0), int(match["ranks"] or 1), positions))
        elif rows and rank and rank["listed"]:
            rows[-1][2].append(int(rank[1]))


# -- lines of ranks ----------------------------------------------------------------------------------------------------

_STATES = {"dead": "is considered dead by NCCL", "unresponsive": "did not answer NCCL's request"}


def lines_of_reports(reports: Iterable[Report], plan: Plan | None = None) -> Iterator[Line | str]:
    """Yield a line for each rank and count of the reports; words where they do not list the ranks."""
    for report in reports:
        for one, ranks in report.ranks():
            yield from _lines(report, one, ranks, plan)


def _lines(report: Report, one: Communicator, ranks: Mapping[int, int], plan: Plan | None) -> Iterator[Line | str]:
    counts = dict(one.counts)
    stated = {*one.missing, *(place for by in counts.values() for places in by.values() for place in places)}
    is_named = stated <= ranks.keys()
    rank_of = ranks if is_named else {place: place for place in stated}
    kinds = " or ".join(kinds_of_size(plan, one.size)[:4])
    label = f"communicator {one.hash} of {one.size} ranks" + (f", {kinds} by its size" if kinds else "")
    members = tuple(rank_of[place] for place in range(one.size)) if len(rank_of) == one.size else None
    group = GroupName(one.hash, DEFAULT if one.size == report.total else "", members)
    line = Line(source=report.path, rank=0, job="" if is_named else label, is_position=not is_named, group=group)
    for place, found in sorted(one.missing.items()):
        if found == "left":
            yield f"{report.path}: {in_words([rank_of[place]])} answered, and is not a member of {label} any more"
        else:
            yield replace(line, rank=rank_of[place], state=_STATES[found], alive=found == "unresponsive")
    for operation, by in counts.items():
        # NCCL counts each operation of a communicator apart.
        group = replace(group, name=f"{one.hash} {operation}")
        lowest = min(by)
        if not all(by.values()):
            yield f"{label}: {operation} launched {lowest} to {max(by)} times; ncclras -f json lists the ranks"
        for launched, places in by.items():
            number, enqueued = (launched, None) if launched > lowest else (None, launched)
            for place in places:
                made = replace(line, group=group, number=number, operation=operation, enqueued=enqueued)
                yield replace(made, rank=rank_of[place])


def equal_counts(reports: Sequence[Report]) -> str:
    """State that all counts are equal, and suggest another report; "" if some differ, or without reports."""
    if not reports or any(one.missing or [*one.counts] for report in reports for one in report.communicators):
        return ""
    total = max(report.total for report in reports)
    ranks = f"{total} ranks, no mismatch" if total else "no mismatch"
    return f"{ranks}: the counts of each communicator are equal at this moment; a report ten seconds later shows more"


def contradictions(reports: Iterable[Report], recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Describe the ranks that respond by a report and not by the recordings, or the reverse."""
    wrote = {rank for rank, recording in recordings.items() if recording.from_rank}
    for report in reports if recordings else ():
        missing, answered = set[int](), set[int]()
        for one, ranks in report.ranks():
            missing |= {ranks[place] for place, state in one.missing.items() if state != "left" and place in ranks}
            answered |= {ranks[place] for place in one.answered if place in ranks}
        if both := missing & wrote:
            yield f"{report.path} has no data of {in_words(both)}, which left a recording at another time"
        if both := answered - missing - wrote:
            yield f"{report.path} has data of {in_words(both)}, which left no recording: the process ran"
