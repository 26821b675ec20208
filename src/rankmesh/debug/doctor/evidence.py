"""Evidence without recorded calls: findings, which state how far they can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rankmesh.errors import in_words

__all__ = ["Finding", "all_known", "merged", "ranks_in_words"]

_ORDER = (
    *("failed", "dead", "unresponsive", "different", "late", "behind", "versions", "network", "missing"),
    *("ahead", "incomplete", "ended", "differ", "waiting", "left"),
)
_CONFIDENCE = ("certain", "likely", "possible")
# Lines of the program that a finding adds.
_SITES = 4


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


def all_known(ranks: Iterable[int | None]) -> tuple[int, ...]:
    """Return ranks in order; none unless all are known."""
    found = list(ranks)
    return tuple(sorted(rank for rank in found if rank is not None)) if None not in found else ()


def ranks_in_words(ranks: Sequence[int], positions: Iterable[int]) -> str:
    """Return ranks in words, or their positions in the group where the ranks are not known."""
    return in_words(ranks) if ranks else in_words(positions).replace("rank", "position", 1)


def _by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with failures first, then the certain ones, then the likeliest cause first."""

    def key(one: Finding) -> tuple[bool, bool, int]:
        return one.cause != "failed", one.confidence != "certain", _ORDER.index(one.cause)

    return tuple(sorted(findings, key=key))


def merged(findings: Iterable[Finding], sites: Mapping[int, str]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Merge the findings that name the same ranks, the likeliest first, and return notes on those that name others.

    A rank that is named has its line of the program in the evidence, by ``sites``.
    """
    kept: dict[object, Finding] = {}
    for finding in _by_cause(findings):
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
