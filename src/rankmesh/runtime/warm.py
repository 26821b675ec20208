"""Warm-up: every communicator used once, in plan order, each within a bounded time.

```
canonical groups   one all-reduce of one number
pipelines          the number to next and to prev besides: pipelines talk to their neighbours, not to the group
```
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankmesh.errors import ConnectError, first_line
from rankmesh.runtime.handles import LiveGroup

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups

__all__ = ["warm_up"]


def warm_up(groups: LiveGroups, timeout: timedelta) -> dict[str, float]:
    """Warm up the canonical groups of a rank, and its pipelines; the seconds that each took."""
    seconds = {}
    for name, group in groups.items():
        if group.size > 1 and (group.local.canonical == name or group.local.spec.pipeline):
            started = time.perf_counter()
            with groups.world.diagnosed(f"warm_up of {group.local}"):
                _use(group, timeout)
            seconds[name] = time.perf_counter() - started
    return seconds


def _use(group: LiveGroup, timeout: timedelta) -> None:
    device = "cuda" if "nccl" in dist.get_backend(group.pg) else "cpu"
    try:
        for work in _works(group, torch.ones(1, device=device), timeout):
            # Torch's work objects have no return value that says "late"; they raise.
            work.wait(timeout)
    except RuntimeError as error:
        raise ConnectError(
            f"group {group.local} was not warm within {timeout.total_seconds():g} s ({first_line(error)}); its members "
            f"are {list(group.ranks[:16])}; look at the logs of the members for the one that is not there",
            group=group.name,
            ranks=group.ranks,
            late=True,
        ) from error


def _works(group: LiveGroup, one: torch.Tensor, timeout: timedelta) -> list[dist.Work]:
    works = [_all_reduce(group, one, timeout)]
    if group.local.spec.pipeline:
        for to, back in ((group.next, group.prev), (group.prev, group.next)):
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, one.clone(), to, group=group.pg),
                    dist.P2POp(dist.irecv, torch.empty_like(one), back, group=group.pg),
                ]
            )
    return [work for work in works if work is not None]


def _all_reduce(group: LiveGroup, one: torch.Tensor, timeout: timedelta) -> dist.Work | None:
    """Return an all-reduce that ends by itself: gloo can destroy no group that still waits in one."""
    if dist.get_backend(group.pg) != "gloo":
        # NCCL's watchdog ends the process at the time limit of a collective; there only the wait is limited.
        work: dist.Work | None = dist.all_reduce(one, group=group.pg, async_op=True)
        return work
    options = dist.AllreduceOptions()
    options.timeout = timeout
    return group.pg.allreduce([one], options)
