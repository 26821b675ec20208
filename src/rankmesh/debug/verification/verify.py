"""Verification: every live group against the plan's arithmetic, with real collectives.

```
operation    every member brings           and must get
all-reduce   (its global rank, 1)          (sum of the members, their number)
all-gather   its global rank               the members, in order
broadcast    its global rank               the first member's
send/recv    its global rank, to next      the rank of prev          (pipelines)
```

The expected values come from the plan, the answers from the network: a group with a wrong member, a wrong order, or
the members of another group cannot give all four.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rankmesh.errors import ProofError
from rankmesh.runtime.handles import LiveGroup

__all__ = ["Verified", "verify", "verify_group"]


@dataclass(frozen=True)
class Verified:
    """One group verified on one rank: the operations that gave the expected values, and the seconds they took."""

    name: str
    operations: tuple[str, ...]
    seconds: float


def verify(groups: Mapping[str, LiveGroup], device: str = "cpu") -> Iterator[Verified]:
    """Verify one group after the other, in plan order; every rank of the plan must do the same.

    Raises ``ProofError`` for a wrong answer, naming the group, the operation, and both values.
    """
    for group in groups.values():
        yield verify_group(group, device)


def verify_group(group: LiveGroup, device: str = "cpu") -> Verified:
    """Verify one group; called by all of its members."""
    started = time.perf_counter()
    _expect(group, "rank", dist.get_rank(group.pg), group.rank)
    _expect(group, "members", dist.get_process_group_ranks(group.pg), list(group.ranks))
    done = []
    for operation, (run, expected) in _checks(group).items():
        _expect(group, operation, run(group, device), expected)
        done.append(operation)
    return Verified(group.name, tuple(done), time.perf_counter() - started)


def _checks(group: LiveGroup) -> dict[str, tuple[Callable[[LiveGroup, str], object], object]]:
    checks: dict[str, tuple[Callable[[LiveGroup, str], object], object]] = {
        "all-reduce": (_all_reduce, [sum(group.ranks), group.size]),
        "all-gather": (_all_gather, list(group.ranks)),
        "broadcast": (_broadcast, group.root),
    }
    if group.local.spec.pipeline and group.size > 1:
        checks["send/recv"] = (_send_recv, group.prev)
    return checks


def _me(group: LiveGroup) -> int:
    return group.ranks[group.rank]


def _all_reduce(group: LiveGroup, device: str) -> object:
    tensor = torch.tensor([_me(group), 1], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, group=group.pg)
    return tensor.tolist()


def _all_gather(group: LiveGroup, device: str) -> object:
    mine = torch.tensor([_me(group)], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(every, mine, group=group.pg)
    return [int(tensor.item()) for tensor in every]


def _broadcast(group: LiveGroup, device: str) -> object:
    tensor = torch.tensor([_me(group)], dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=group.root, group=group.pg)
    return int(tensor.item())


def _send_recv(group: LiveGroup, device: str) -> object:
    mine = torch.tensor([_me(group)], dtype=torch.int64, device=device)
    got = torch.full_like(mine, -1)
    operations = [
        dist.P2POp(dist.isend, mine, group.next, group=group.pg),
        dist.P2POp(dist.irecv, got, group.prev, group=group.pg),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return int(got.item())


def _expect(group: LiveGroup, operation: str, got: object, expected: object) -> None:
    if got != expected:
        raise ProofError(
            f"group {group.local} on rank {_me(group)}: {operation} gave {got}, expected {expected} of the members "
            f"{list(group.ranks[:16])}; the process group is not the group of the plan",
            group=group.name,
            operation=operation,
            got=got,
            expected=expected,
        )
