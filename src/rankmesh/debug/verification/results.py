"""The result of a check: every kind of group, and the ranks that are to blame.

```
a rank that died, or does not answer      lost          alone to blame; what the others then saw follows from it
a wrong answer                            ProofError    to blame before the errors that it caused on others
an error of rankmesh, any other error     its name
a closed connection, a launcher's signal  -             follows from what happened on another rank
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.work import Report

__all__ = ["CheckResult", "KindResult", "RankFailure", "collect"]


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank: ``kind`` is the error's name.

    ``lost`` is a rank that died or does not answer, ``stuck`` one that answers and makes no progress, ``stopped`` one
    that was ended because another had failed.
    """

    rank: int
    kind: str
    message: str
    group: str | None


@dataclass(frozen=True)
class KindResult:
    """One kind of group over all ranks: how many groups and ranks verified it, out of how many."""

    name: str
    groups: int
    size: int
    proved: int
    ranks: int
    expected: int
    operations: tuple[str, ...]
    slowest: float


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check: every kind, the ranks that are to blame, and those that failed because of them.

    ``connect`` is how many seconds the slowest rank took to connect, ``seconds`` how many the whole check took.
    ``verdict`` is the diagnosis of ranks that waited too long (``rankmesh.debug.doctor``), empty if none did.
    """

    world_size: int
    backend: str
    kinds: tuple[KindResult, ...]
    failures: tuple[RankFailure, ...]
    followed: tuple[RankFailure, ...] = ()
    connect: float = 0.0
    seconds: float = 0.0
    verdict: str = ""

    @property
    def ok(self) -> bool:
        """Whether every group of the plan was verified on every member."""
        return not self.failures and all(kind.ranks == kind.expected for kind in self.kinds)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that died or do not answer."""
        return tuple(failure.rank for failure in self.failures if failure.kind == "lost")


def collect(
    plan: Plan, reports: Mapping[int, Report], seconds: float, lost: Mapping[int, str], verdict: str = ""
) -> CheckResult:
    """Return the result, from the reports of the ranks that have ended, and the ends of those that are ``lost``.

    Others were stopped because of what happened elsewhere; where nothing did, they are stuck.
    """
    failures = sorted(_failures(plan, reports, lost), key=_order)
    blamed = tuple(failure for failure in failures if _order(failure)[0] == _order(failures[0])[0])
    return CheckResult(
        world_size=plan.world_size,
        backend=next((report.backend for _, report in sorted(reports.items()) if report.backend), "none"),
        kinds=tuple(_kind(plan, name, reports) for name in plan.kinds),
        failures=blamed,
        followed=tuple(failures[len(blamed) :]),
        connect=max((report.connect for report in reports.values()), default=0.0),
        seconds=seconds,
        verdict=verdict if failures else "",
    )


def _kind(plan: Plan, name: str, reports: Mapping[int, Report]) -> KindResult:
    groups = plan.groups(name)
    found = {rank: report.verified[name] for rank, report in sorted(reports.items()) if name in report.verified}
    return KindResult(
        name=name,
        groups=len(groups),
        size=groups.size,
        proved=sum(all(rank in found for rank in members) for members in groups.tolist()),
        ranks=len(found),
        expected=len(groups) * groups.size,
        operations=tuple(dict.fromkeys(word for operations, _ in found.values() for word in operations)),
        slowest=max((seconds for _, seconds in found.values()), default=0.0),
    )


def _failures(plan: Plan, reports: Mapping[int, Report], lost: Mapping[int, str]) -> list[RankFailure]:
    found = []
    nowhere = not lost and not any(report.kind for report in reports.values())
    for rank in range(plan.world_size):
        report = reports.get(rank)
        if report is not None:
            found += [RankFailure(rank, report.kind, report.message, report.group)] if report.kind else []
        elif rank in lost:
            found.append(RankFailure(rank, "lost", lost[rank], None))
        elif nowhere:
            found.append(RankFailure(rank, "stuck", "came no further", None))
        else:
            found.append(RankFailure(rank, "stopped", "was stopped, because another rank had failed", None))
    return found


_CAUSES = ("lost", "ProofError", "AgreementError", "ConnectError", "PlanError")
# What a rank sees when one of its peers ends.
_CONSEQUENCES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "stopped")


def _order(failure: RankFailure) -> tuple[int, int]:
    """Return the place of a failure, causes before consequences: a rank whose peer died sees a closed connection."""
    kinds = (*_CAUSES, "any other", *_CONSEQUENCES)
    return kinds.index(failure.kind if failure.kind in kinds else "any other"), failure.rank
