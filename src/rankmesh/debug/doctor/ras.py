"""Reports of ``ncclras``, as text and as JSON (NCCL 2.24 and newer): what NCCL's own threads say of each communicator.

```
#0-0 (0123456789abcdef) MISMATCH                                     communicator 0123456789abcdef
  Communicator ranks have different AllGather operation counts    ─>   AllGather   641   2 ranks: 12, 13
  30 ranks have launched up to operation 640                                       640   30 ranks: the others
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 1012 on node 10.0.0.2
```

NCCL numbers ranks by their position in a communicator. In one of all GPUs of the job that is the rank; ranks of others
are found there by host, process and GPU. The text lists only the few ranks of an outlier.

```
ahead                     launched more operations than the others: made a call that they did not make, or waits
behind                    launched fewer operations than the others, and nowhere more than another rank
different                 launched fewer of one operation, and more of another
differ                    counts differ, and no rank can be named
dead, unresponsive, left  NCCL has no data: considered dead, no answer, not a member any more
```

Counts are launches at one moment, without an order: ranks of a job that runs differ by one, too. No finding is certain.
A rank that is behind in one communicator and ahead in another waits there for others, and is not named. Nor is any
where different ranks are behind, or one does not answer: NCCL counts no sends and receives, in which a rank may wait.
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
from rankmesh.debug.doctor.evidence import Finding, all_known, ranks_in_words
from rankmesh.debug.doctor.groups import group_of_plan, kinds_of_size
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import RecordingError, in_words

__all__ = [
    *("Communicator", "Count", "Process", "Report"),
    *("contradictions", "equal_counts", "findings_of_reports", "is_report", "read_report", "report_of"),
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
class Count:
    """How many ranks have launched this many operations; their ``positions`` where the report lists them all."""

    launched: int
    ranks: int
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Communicator:
    """One communicator: ``counts`` by operation where they differ, ``missing`` positions with what is wrong with each.

    ``processes`` and ``ranks`` of the job are by position, as far as they are known; ``answered`` are positions with
    data.
    """

    hash: str
    size: int
    counts: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    processes: Mapping[int, Process] = field(default_factory=dict)
    answered: frozenset[int] = frozenset()
    ranks: Mapping[int, int] = field(default_factory=dict)

    def key(self, position: int) -> object:
        """Return what is the same for a rank in all communicators."""
        return self.ranks.get(position, (self.hash, position))

    def known(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks at these positions; none unless all are known."""
        return all_known(map(self.ranks.get, positions))


@dataclass(frozen=True)
class Report:
    """One report; ``total`` counts the GPUs of the job, 0 if it does not say."""

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
        operation: tuple(Count(launched, len(ranks), tuple(sorted(ranks))) for launched, ranks in sorted(by.items()))
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
    answered = {position for rows in counts.values() for count in rows for position in count.positions}
    return replace(one, counts={**one.counts, **counts}, missing=missing, answered=one.answered | answered)


def _completed(size: int, rows: list[tuple[int, int, list[int]]], missing: Mapping[int, str]) -> tuple[Count, ...]:
    """Return the counts; a single one whose ranks are not listed has all others, if their number is the same."""
    listed = {position for _, _, positions in rows for position in positions}
    others = [position for position in range(size) if position not in listed and position not in missing]
    unlisted = sum(len(positions) != ranks for _, ranks, positions in rows)
    completed = [
        (launched, ranks, positions if len(positions) == ranks else others if unlisted == 1 else [])
        for launched, ranks, positions in rows
    ]
    return tuple(Count(n, ranks, tuple(p) if len(p) == ranks else ()) for n, ranks, p in sorted(completed))


# -- findings --------------------------------------------------------------------------------------------------------

_LIKELY = ("dead", "unresponsive", "different", "behind")
_WHY = {"ahead": "; they made a call that the others did not make, or wait in it for them"}
_MISSING = {
    "dead": "is considered dead by NCCL",
    "unresponsive": "did not answer NCCL's request",
    "left": "answered, and is not a member of this communicator any more",
}


def findings_of_reports(reports: Iterable[Report], plan: Plan | None = None) -> tuple[Finding, ...]:
    """Return what the reports say of ranks."""
    return tuple(finding for report in reports for finding in _of_report(report, plan))


def _of_report(report: Report, plan: Plan | None) -> Iterator[Finding]:
    suspects = _suspects(report.communicators)
    for one in report.communicators:
        label = _label(one, report, plan)
        for state, what in _MISSING.items():
            if places := tuple(place for place, found in sorted(one.missing.items()) if found == state):
                evidence = f"{_words(one, places, plan)} of {label}: {what}"
                yield _finding(state, one.known(places), label, evidence, report)
        for cause, places, evidence in _differences(one, plan, suspects):
            yield _finding(cause, one.known(places), label, f"{label}: {evidence}", report)


def _suspects(communicators: Sequence[Communicator]) -> set[object]:
    """Return the ranks that are behind wherever ranks are, and ahead of nobody; none if some rank did not answer."""
    if any(state != "left" for one in communicators for state in one.missing.values()):
        return set()
    every = [(one, counts) for one in communicators for counts in one.counts.values()]
    ahead = {one.key(place) for one, counts in every for place in _more(counts)}
    behind = []
    for one, counts in every:
        odd, cause = _odd(one.size, counts)
        ranks = {one.key(place) for count in odd for place in count.positions} - ahead
        behind += [ranks] if cause == "behind" and ranks else []
    return set.intersection(*behind) if behind else set()


def _label(one: Communicator, report: Report, plan: Plan | None) -> str:
    members = tuple(one.ranks[place] for place in sorted(one.ranks)) if len(one.ranks) == one.size else ()
    if (group := group_of_plan(plan, members)) is not None:
        return str(group)
    if members and one.size == report.total:
        return "world"
    kinds = " or ".join(kinds_of_size(plan, one.size)[:4])
    return f"communicator {one.hash} of {one.size} ranks" + (f", {kinds} by its size" if kinds else "")


def _differences(
    one: Communicator, plan: Plan | None, suspects: set[object]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield each set of ranks that has launched other counts than the most: the cause, the positions, and words."""
    outliers: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for operation, counts in one.counts.items():
        odd, cause = _odd(one.size, counts)
        places = tuple(sorted(place for count in odd for place in count.positions))
        if len(places) != sum(count.ranks for count in odd):
            places = ()
        outliers.setdefault(places, []).append((cause, _counted(one, operation, counts, plan)))
    for places, found in outliers.items():
        causes = {cause for cause, _ in found}
        cause = "different" if places and causes == {"ahead", "behind"} else found[0][0]
        if cause == "behind" and not {one.key(place) for place in places} <= suspects:
            cause, places = "differ", ()
        yield cause, places, "; ".join(text for _, text in found) + _WHY.get(cause, "")


def _odd(size: int, counts: Sequence[Count]) -> tuple[Sequence[Count], str]:
    """Return the counts of the minority and how it differs; without a majority, those that are not the highest."""
    usual = max(counts, key=lambda count: (count.ranks, count.launched))
    odd = [count for count in counts if count is not usual]
    if 2 * usual.ranks > size and all(count.launched > usual.launched for count in odd):
        return odd, "ahead"
    if usual is max(counts, key=lambda count: count.launched):
        return odd, "behind"
    return [], "differ"


def _more(counts: Sequence[Count]) -> Iterator[int]:
    """Yield the positions that have launched more than others."""
    lowest = min(count.launched for count in counts)
    return (place for count in counts if count.launched > lowest for place in count.positions)


def _counted(one: Communicator, operation: str, counts: Sequence[Count], plan: Plan | None) -> str:
    """Return the counts of an operation in words, the smallest set first."""
    ascending = sorted(counts, key=lambda count: (count.ranks, count.launched))
    parts = []
    for place, count in enumerate(ascending):
        others = f"the {count.ranks} others" if place and place == len(ascending) - 1 else f"{count.ranks} ranks"
        is_short = count.positions and 2 * count.ranks <= one.size
        parts.append(f"{_words(one, count.positions, plan) if is_short else others} at {count.launched}")
    return f"{operation} launched: {', '.join(parts)}"


def _words(one: Communicator, places: Sequence[int], plan: Plan | None) -> str:
    """Return ranks in words: with the group that they are, or as positions where their ranks are not known."""
    ranks = one.known(places)
    group = group_of_plan(plan, ranks) if len(ranks) > 1 else None
    words = ranks_in_words(ranks, places)
    return words if group is None else f"{words} ({group})"


def _finding(cause: str, ranks: tuple[int, ...], group: str, evidence: str, report: Report) -> Finding:
    confidence = "likely" if cause in _LIKELY else "possible"
    return Finding(cause, ranks, group, evidence, confidence, report.path)


def equal_counts(reports: Sequence[Report]) -> str:
    """Return in words that no report shows a mismatch, and how to learn more; "" if one does."""
    if not reports or any(one.counts or one.missing for report in reports for one in report.communicators):
        return ""
    total = max(report.total for report in reports)
    ranks = f"{total} ranks, no mismatch" if total else "no mismatch"
    return f"{ranks}: the counts of each communicator are equal at this moment; a report ten seconds later shows more"


def contradictions(reports: Iterable[Report], recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Yield where a report and the recordings differ on whether a rank responds."""
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
