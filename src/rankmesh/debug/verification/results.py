"""What a check found out: every kind of group, and the ranks that are to blame.

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
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.event_log import EventLog, ended, next_group, where_it_was

__all__ = ["CheckResult", "KindResult", "RankFailure", "collect"]


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank: ``kind`` is the error's name.

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

    ``connect`` is the seconds that the slowest rank took to connect, ``seconds`` those of the whole check. ``verdict``
    is what the recordings of ranks that waited too long say (``rankmesh.debug.doctor``), empty where none did.
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
    plan: Plan, logs: Mapping[int, EventLog], seconds: float, lost: Mapping[int, str], verdict: str = ""
) -> CheckResult:
    """Return the result, from the event logs of all ranks and what is known of those that are ``lost``.

    Others whose log has no end were stopped because of what happened elsewhere; where nothing did, they are stuck.
    """
    verified: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in plan.kinds}
    every = [(rank, event) for rank in range(plan.world_size) for event in logs.get(rank, ())]
    for rank, event in every:
        if event["event"] == "proved":
            verified[event["group"]][rank] = event
    failures = sorted(_failures(plan, logs, lost), key=_order)
    blamed = tuple(failure for failure in failures if _order(failure)[0] == _order(failures[0])[0])
    return CheckResult(
        world_size=plan.world_size,
        backend=next((event["backend"] for _, event in every if event["event"] == "joined"), "none"),
        kinds=tuple(_kind(plan, name, found) for name, found in verified.items()),
        failures=blamed,
        followed=tuple(failures[len(blamed) :]),
        connect=max((event["seconds"] for _, event in every if event["event"] == "connected"), default=0.0),
        seconds=seconds,
        verdict=verdict if failures else "",
    )


def _kind(plan: Plan, name: str, found: Mapping[int, Mapping[str, Any]]) -> KindResult:
    groups = plan.groups(name)
    whole = sum(all(rank in found for rank in members) for members in groups.tolist())
    operations = tuple(dict.fromkeys(word for event in found.values() for word in event["operations"]))
    return KindResult(
        name=name,
        groups=len(groups),
        size=groups.size,
        proved=whole,
        ranks=len(found),
        expected=len(groups) * groups.size,
        operations=operations,
        slowest=max((event["seconds"] for event in found.values()), default=0.0),
    )


def _failures(plan: Plan, logs: Mapping[int, EventLog], lost: Mapping[int, str]) -> list[RankFailure]:
    found = []
    nowhere = not lost and not any(log and log[-1]["event"] == "failed" for log in logs.values())
    for rank in range(plan.world_size):
        log = logs.get(rank, [])
        at = next_group(plan, rank, log)
        if ended(log):
            if log[-1]["event"] == "failed":
                found.append(RankFailure(rank, log[-1]["kind"], log[-1]["message"], at))
        elif rank in lost:
            found.append(RankFailure(rank, "lost", f"{lost[rank]}{where_it_was(log)}", at))
        elif nowhere:
            found.append(RankFailure(rank, "stuck", f"came no further{where_it_was(log)}", at))
        else:
            found.append(RankFailure(rank, "stopped", "was stopped, because another rank had failed", at))
    return found


_CAUSES = ("lost", "ProofError", "AgreementError", "ConnectError", "PlanError")
# What a rank sees when one of its peers ends.
_CONSEQUENCES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "stopped")


def _order(failure: RankFailure) -> tuple[int, int]:
    """Return the place of a failure, causes before consequences: a rank whose peer died sees a closed connection."""
    kinds = (*_CAUSES, "any other", *_CONSEQUENCES)
    return kinds.index(failure.kind if failure.kind in kinds else "any other"), failure.rank
