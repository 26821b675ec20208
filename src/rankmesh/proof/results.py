"""Check: every group of a plan built and proved, by the ranks of this job or by ranks started on this machine.

Each rank writes a *diary*, one JSON line an event, where the one that shows the table can read it: a folder when the
ranks are started here, the job's store inside a job. A rank that dies leaves its diary at the group where it was.

```
{"event": "connected", "seconds": 0.12}
{"event": "proved", "group": "tp", "operations": ["all-reduce", ...], "seconds": 0.01}
{"event": "failed", "kind": "ProofError", "message": "..."}
{"event": "done"}
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankmesh.groups.connect import connect
from rankmesh.launch.started import Launch
from rankmesh.launch.world import enter
from rankmesh.plan.plan import Plan
from rankmesh.proof.prove import prove
from rankmesh.watch.joined import recorded

__all__ = ["CheckResult", "Diary", "KindResult", "RankFailure", "collect", "next_group", "run_rank"]

Diary = list[dict[str, Any]]
Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank: ``kind`` is the error's name.

    ``lost`` is a rank that died without a word, ``stopped`` one that the launcher ended because another had failed.
    """

    rank: int
    kind: str
    message: str
    group: str | None


@dataclass(frozen=True)
class KindResult:
    """One kind of group over all ranks: how many groups and ranks proved it, out of how many."""

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
    """The outcome of a check: every kind, and every rank that failed."""

    world_size: int
    backend: str
    kinds: tuple[KindResult, ...]
    failures: tuple[RankFailure, ...]
    connect: float = 0.0
    seconds: float = field(default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every group of the plan was proved on every member."""
        return not self.failures and all(kind.ranks == kind.expected for kind in self.kinds)

    @property
    def causes(self) -> tuple[RankFailure, ...]:
        """The failures that come first: ranks that died, else wrong answers, else the errors that follow."""
        return tuple(failure for failure in self.failures if _order(failure)[0] == _order(self.failures[0])[0])

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that died or were not heard of."""
        return tuple(failure.rank for failure in self.failures if failure.kind == "lost")


def run_rank(plan: Plan, launch: Launch, backend: str | None, timeout: float, write: Write) -> bool:
    """Check this rank: initialise, connect, prove each group, and write the diary; whether all went well."""
    import torch.distributed as dist

    write({"event": "started"})
    try:
        with recorded(enter(launch, backend, timeout)) as me, connect(plan, timeout=timeout) as groups:
            write({"event": "connected", "backend": me.backend, "seconds": groups.phases["all"]})
            for proof in prove(groups, str(me.device)):
                write(
                    {
                        "event": "proved",
                        "group": proof.name,
                        "operations": proof.operations,
                        "seconds": proof.seconds,
                    }
                )
            # A rank that leaves early would close connections on which a slower one still waits.
            dist.barrier()
    except Exception as error:  # noqa: BLE001  - whatever ends a rank is in its diary, for the one that reports
        message = _first_line(error)
        write({"event": "failed", "kind": type(error).__name__, "message": message[:500]})
        return False
    write({"event": "done"})
    return True


def _first_line(error: Exception) -> str:
    """What an error says, without the place in torch's sources that its network errors begin with."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"^\[/\S+:\d+\] ", "", line)


def collect(plan: Plan, diaries: Mapping[int, Diary], seconds: float) -> CheckResult:
    """The result that the diaries of all ranks tell."""
    world = range(plan.world_size)
    proved: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in plan.kinds}
    for rank in world:
        for event in diaries.get(rank, ()):
            if event["event"] == "proved":
                proved[event["group"]][rank] = event
    connected = [event for rank in world for event in diaries.get(rank, ()) if event["event"] == "connected"]
    return CheckResult(
        world_size=plan.world_size,
        backend=connected[0]["backend"] if connected else "none",
        kinds=tuple(_kind(plan, name, found) for name, found in proved.items()),
        failures=tuple(sorted(_failures(plan, diaries), key=_order)),
        connect=max((event["seconds"] for event in connected), default=0.0),
        seconds=seconds,
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


def _failures(plan: Plan, diaries: Mapping[int, Diary]) -> Iterable[RankFailure]:
    for rank in range(plan.world_size):
        diary = diaries.get(rank, [])
        if diary and diary[-1]["event"] == "done":
            continue
        failed = next((event for event in diary if event["event"] == "failed"), None)
        if failed is not None:
            yield RankFailure(rank, failed["kind"], failed["message"], next_group(plan, rank, diary))
        else:
            yield RankFailure(rank, "lost", _last_words(diary), next_group(plan, rank, diary))


_CAUSES = ("lost", "ProofError", "AgreementError", "ConnectError", "PlanError")
# What a rank sees when one of its peers ends.
_CONSEQUENCES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "stopped")


def _order(failure: RankFailure) -> tuple[int, int]:
    """Causes before consequences: a rank whose peer died sees a closed connection."""
    kinds = (*_CAUSES, "any other", *_CONSEQUENCES)
    return kinds.index(failure.kind if failure.kind in kinds else "any other"), failure.rank


def _last_words(diary: Diary) -> str:
    if not diary:
        return "was not heard of; it did not start, or died before it began"
    return f"was not heard of again after it had {_PAST.get(diary[-1]['event'], diary[-1]['event'])}"


_PAST = {"started": "started", "connected": "connected", "proved": "proved a group"}


def next_group(plan: Plan, rank: int, diary: Diary) -> str | None:
    """The group that the rank was at: the first of its own that it has not proved."""
    done = {event["group"] for event in diary if event["event"] == "proved"}
    if not any(event["event"] == "connected" for event in diary):
        return None
    return next((name for name in plan.of(rank) if name not in done), None)


def line(event: Mapping[str, Any]) -> str:
    """One diary line."""
    return json.dumps(event) + "\n"
