"""Evidence without recorded calls: findings, which state how far they can be trusted; here from NCCL's reports.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.groups import group_of_plan, kinds_of_size
from rankmesh.debug.doctor.ras import Communicator, Count, Report
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import in_words

__all__ = ["Finding", "all_known", "by_cause", "contradictions", "findings_of", "merged", "ranks_in_words"]

_ORDER = (
    *("failed", "dead", "unresponsive", "different", "elsewhere", "behind", "versions", "network", "missing"),
    *("ahead", "incomplete", "ended", "differ", "waiting", "left"),
)
_CONFIDENCE = ("certain", "likely", "possible")
# Lines of the program that a finding adds.
_SITES = 4
_LIKELY = ("dead", "unresponsive", "different", "behind")
_WHY = {"ahead": "; they made a call that the others did not make, or wait in it for them"}
_MISSING = {
    "dead": "is considered dead by NCCL",
    "unresponsive": "did not answer NCCL's request",
    "left": "answered, and is not a member of this communicator any more",
}


@dataclass(frozen=True)
class Finding:
    """A fact of a report or of logs about some ranks of the job; ``ranks`` is empty where only positions are known."""

    cause: str
    ranks: tuple[int, ...]
    group: str
    evidence: str
    confidence: str
    source: str

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data."""
        return {**vars(self), "ranks": list(self.ranks)}


@dataclass(frozen=True)
class _Named:
    """One communicator with the names of its ranks."""

    one: Communicator
    label: str
    ranks: Mapping[int, int]

    def key(self, position: int) -> object:
        """Return what is the same for a rank in all communicators."""
        return self.ranks.get(position, (self.one.hash, position))

    def known(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks at these positions; none unless all are known."""
        return all_known(map(self.ranks.get, positions))


def all_known(ranks: Iterable[int | None]) -> tuple[int, ...]:
    """Return ranks in order; none unless all are known."""
    found = list(ranks)
    return tuple(sorted(rank for rank in found if rank is not None)) if None not in found else ()


def ranks_in_words(ranks: Sequence[int], positions: Iterable[int]) -> str:
    """Return ranks in words, or their positions in the group where the ranks are not known."""
    return in_words(ranks) if ranks else in_words(positions).replace("rank", "position", 1)


def findings_of(reports: Iterable[Report], plan: Plan | None = None) -> tuple[Finding, ...]:
    """Return what the reports say, the likeliest cause first."""
    return by_cause(finding for report in reports for finding in _of_report(report, plan))


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with failures first, then the certain ones, then the likeliest cause first."""

    def key(one: Finding) -> tuple[bool, bool, int]:
        return one.cause != "failed", one.confidence != "certain", _ORDER.index(one.cause)

    return tuple(sorted(findings, key=key))


def merged(findings: Iterable[Finding], sites: Mapping[int, str]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Merge the findings that name the same ranks, the likeliest first, and return notes on those that name others.

    A rank that is named has its line of the program in the evidence, by ``sites``.
    """
    kept: dict[object, Finding] = {}
    for finding in by_cause(findings):
        known = kept.get(finding.ranks or finding)
        if known is not None and known.source != finding.source:
            kept[finding.ranks] = replace(
                known,
                evidence=f"{known.evidence}; {finding.evidence}",
                confidence=min(known.confidence, finding.confidence, key=_CONFIDENCE.index),
                source=f"{known.source} and {finding.source}",
            )
        else:
            kept[(finding.ranks or finding) if known is None else finding] = finding
    found = tuple(_with_sites(finding, sites) for finding in kept.values())
    named = [finding for finding in found if finding.ranks]
    first = f"{named[0].source} names {in_words(named[0].ranks)}" if named else ""
    notes = (
        f"{first}, and {other.source} {in_words(other.ranks)} ({other.cause})"
        for other in named[1:]
        if not set(other.ranks) & set(named[0].ranks) and other.source != named[0].source
    )
    return found, tuple(notes)


def _with_sites(finding: Finding, sites: Mapping[int, str]) -> Finding:
    """Add to a finding the lines of the program at which its ranks are, unless it has them."""
    lines = {rank: sites[rank] for rank in finding.ranks if rank in sites and sites[rank] not in finding.evidence}
    words = "".join(f"; rank {rank} is at {site}" for rank, site in list(lines.items())[:_SITES])
    return replace(finding, evidence=finding.evidence + words)


def contradictions(reports: Iterable[Report], recordings: Mapping[int, Recording]) -> Iterator[str]:
    """Yield where a report and the recordings differ on whether a rank responds."""
    for report in reports:
        missing, answered = set[int](), set[int]()
        for one in report.communicators:
            ranks = report.ranks_of(one)
            gone = (place for place, state in one.missing.items() if state != "left")
            missing |= {ranks[place] for place in gone if place in ranks}
            answered |= {ranks[place] for place in one.answered if place in ranks}
        wrote = {rank for rank, recording in recordings.items() if recording.from_rank}
        if both := missing & wrote:
            yield f"{report.path} has no data of {in_words(both)}, which left a recording at another time"
        if recordings and (both := answered - missing - wrote):
            yield f"{report.path} has data of {in_words(both)}, which left no recording: the process ran"


def _of_report(report: Report, plan: Plan | None) -> Iterator[Finding]:
    named = [_named(report, one, plan) for one in report.communicators]
    suspects = _suspects(named)
    for each in named:
        for state, what in _MISSING.items():
            places = [place for place, found in sorted(each.one.missing.items()) if found == state]
            if places:
                evidence = f"{_words(each, places, plan)} of {each.label}: {what}"
                yield _finding(state, each.known(places), each.label, evidence, report)
        yield from _differences(each, report, plan, suspects)


def _suspects(named: Sequence[_Named]) -> set[object]:
    """Return the ranks that are behind wherever ranks are, and ahead of nobody; none if some rank did not answer."""
    if any(state != "left" for each in named for state in each.one.missing.values()):
        return set()
    every = [(each, counts) for each in named for counts in each.one.counts.values()]
    ahead = {each.key(place) for each, counts in every for place in _more(counts)}
    behind = []
    for each, counts in every:
        odd, cause = _odd(each.one.size, counts)
        ranks = {each.key(place) for count in odd for place in count.positions} - ahead
        behind += [ranks] if cause == "behind" and ranks else []
    return set.intersection(*behind) if behind else set()


def _named(report: Report, one: Communicator, plan: Plan | None) -> _Named:
    ranks = report.ranks_of(one)
    members = tuple(ranks[place] for place in sorted(ranks)) if len(ranks) == one.size else ()
    group = group_of_plan(plan, members)
    if group is not None:
        return _Named(one, str(group), ranks)
    if members and one.size == report.total:
        return _Named(one, "world", ranks)
    kinds = " or ".join(kinds_of_size(plan, one.size)[:4])
    return _Named(
        one, f"communicator {one.hash} of {one.size} ranks" + (f", {kinds} by its size" if kinds else ""), ranks
    )


def _differences(each: _Named, report: Report, plan: Plan | None, suspects: set[object]) -> Iterator[Finding]:
    """Yield a finding for each set of ranks of a communicator that has launched other counts than the most of it."""
    outliers: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for operation, counts in each.one.counts.items():
        odd, cause = _odd(each.one.size, counts)
        places = tuple(sorted(place for count in odd for place in count.positions))
        if len(places) != sum(count.ranks for count in odd):
            places = ()
        outliers.setdefault(places, []).append((cause, _counted(each, operation, counts, plan)))
    for places, found in outliers.items():
        causes = {cause for cause, _ in found}
        cause = "different" if places and causes == {"ahead", "behind"} else found[0][0]
        if cause == "behind" and not {each.key(place) for place in places} <= suspects:
            cause, places = "differ", ()
        why = _WHY.get(cause, "")
        evidence = f"{each.label}: {'; '.join(text for _, text in found)}{why}"
        yield _finding(cause, each.known(places), each.label, evidence, report)


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


def _counted(each: _Named, operation: str, counts: Sequence[Count], plan: Plan | None) -> str:
    """Return the counts of an operation in words, the smallest set first."""
    ascending = sorted(counts, key=lambda count: (count.ranks, count.launched))
    parts = []
    for place, count in enumerate(ascending):
        others = f"the {count.ranks} others" if place and place == len(ascending) - 1 else f"{count.ranks} ranks"
        is_short = count.positions and 2 * count.ranks <= each.one.size
        parts.append(f"{_words(each, count.positions, plan) if is_short else others} at {count.launched}")
    return f"{operation} launched: {', '.join(parts)}"


def _words(each: _Named, places: Sequence[int], plan: Plan | None) -> str:
    """Return ranks in words: with the group that they are, or as positions where their ranks are not known."""
    ranks = each.known(places)
    group = group_of_plan(plan, ranks) if len(ranks) > 1 else None
    words = ranks_in_words(ranks, places)
    return words if group is None else f"{words} ({group})"


def _finding(cause: str, ranks: tuple[int, ...], group: str, evidence: str, report: Report) -> Finding:
    confidence = "likely" if cause in _LIKELY else "possible"
    return Finding(cause, ranks, group, evidence, confidence, report.path)
