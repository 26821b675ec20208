"""Measure: what the collectives of each kind take, all groups of the kind at once and one group alone.

```
kind     collectives                              at once  |======|  every group of the kind, after one barrier
pp       send/recv                                alone    |===|     one group after the other, the rest waits
ep       all-to-all                               hop      |==|      to the next member: whose message came late
others   all-reduce, all-gather, reduce-scatter
```

Each rank times its own calls; a group takes as long as its slowest member (`rankmesh.core.measured`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankmesh.core.measured import HOP, Measurement, measurement
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, quoted
from rankmesh.launch.started import host_name
from rankmesh.rendezvous import gather, gather_results
from rankmesh.runtime.handles import LiveGroup

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups
    from rankmesh.runtime.world import World

__all__ = ["SIZES", "collectives_of", "measure"]

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20)
# Groups of one kind that are also taken alone: the time that this takes grows with them.
_SINGLE = 8
_ROUNDS, _CALLS = 3, 4

# torch 2.13 gave these two their names; it warns of the ones before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Progress = Callable[[int, int], None]


def collectives_of(spec: GroupSpec) -> tuple[str, ...]:
    """Return the role of a kind of group, by its axes.

    >>> [collectives_of(GroupSpec(name)) for name in ("pp", "ep", "embd")]
    [('send/recv',), ('all-to-all',), ('all-reduce', 'all-gather', 'reduce-scatter')]
    """
    if spec.pipeline:
        return ("send/recv",)
    if spec.axes == ("ep",):
        return ("all-to-all",)
    return ("all-reduce", "all-gather", "reduce-scatter")


def measure(
    groups: LiveGroups, sizes: Iterable[int], kinds: Iterable[str] | None, progress: Progress | None, limit: timedelta
) -> Measurement:
    """See ``LiveGroups.measure``."""
    plan = groups.plan
    chosen = tuple(kinds) if kinds is not None else tuple(names[0] for names in plan.sharing)
    given = tuple(sizes)
    if not given or min(given) < 1:
        raise PlanError(
            f"sizes {quoted(given)} cannot be measured; give bytes that a rank holds, such as (4096, 1048576)"
        )
    world, ranks = groups.world, range(plan.mesh.rank_range.offset, plan.mesh.rank_range.stop)
    among = world.round(f"measure/{plan.digest[:16]}/{groups.epoch}", ranks)
    # Each thread has a current GPU of its own, at first the first one.
    device = _device(world.default.backend)
    wait = _barrier(world, f"{among.name}/barrier", ranks, limit)

    def work() -> dict[str, object]:
        rows = list(_rows(groups, chosen, given, progress, wait, device))
        wait()
        return {"rank": groups.rank, "host": host_name(), "rows": rows, "speed": _speed(device)}

    rows_of_all = gather_results(among, work, list, limit.total_seconds(), "measure()")
    hosts = {each["rank"]: each["host"] for each in rows_of_all}
    found = measurement(
        plan,
        [hosts.get(rank, "") for rank in range(ranks.stop)],
        world.default.backend,
        {each["rank"]: each["rows"] for each in rows_of_all},
    )
    return replace(found, speed=min(each["speed"] for each in rows_of_all))


def _rows(
    groups: LiveGroups,
    kinds: tuple[str, ...],
    sizes: tuple[int, ...],
    progress: Progress | None,
    wait: Callable[[], None],
    device: str,
) -> Iterator[tuple[str, str, int, float, float | None]]:
    """Yield kind, collective, bytes, and the seconds of this rank's group: with all of the kind at once, and alone.

    Ranks without a group of a kind wait at its barriers.
    """
    plan = groups.plan
    named = [name for name in kinds if plan.groups(name).size > 1]
    cases = [(name, what, size) for name in named for what in (*collectives_of(plan.spec(name)), HOP) for size in sizes]
    for number, (name, what, size) in enumerate(cases):
        group = groups.get(name, None)
        run = None if group is None else _Call(group, what, size, device)
        for _ in range(2):  # the first call of all connects
            wait()
            if run is not None:
                run.seconds(1)
        together = [_timed(wait, run, what) for _ in range(_ROUNDS)]
        isolated = None if what == HOP else _isolated(groups, name, run, wait)
        if run is not None:
            yield name, what, size, median(together), isolated
        if progress is not None:
            progress(number + 1, len(cases))


def _timed(wait: Callable[[], None], run: _Call | None, what: str) -> float:
    wait()
    return 0.0 if run is None else run.seconds(1 if what == HOP else _CALLS)


def _isolated(groups: LiveGroups, name: str, run: _Call | None, wait: Callable[[], None]) -> float | None:
    """Return the time of this rank's group alone, None where it is not among those that are taken."""
    every = groups.plan.groups(name)
    step = max(1, len(every) // _SINGLE)
    found = None
    for index in range(0, len(every), step):
        is_member = run is not None and every.index_of(groups.rank) == index
        times = []
        for _ in range(_ROUNDS if len(every) > 1 else 1):
            wait()
            if is_member and run is not None:
                times.append(run.seconds(_CALLS))
        found = median(times) if times else found
    return found


def _device(backend: str) -> str:
    return f"cuda:{torch.cuda.current_device()}" if "nccl" in backend and torch.cuda.is_available() else "cpu"


def _speed(device: str) -> float:
    """FLOP/s of a large matrix product on this rank: in bfloat16 on a GPU, in single precision on a CPU."""
    cuda = device != "cpu"
    size = 8192 if cuda else 512
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    times = []
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        matrix @ matrix
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(times[1:])


def _barrier(world: World, name: str, ranks: range, limit: timedelta) -> Callable[[], None]:
    """Return a barrier for all ranks of the plan: the world's own, or the store's if the world has more ranks."""
    if len(ranks) < world.default.size:
        return lambda: gather(world.round(name, ranks), 0, len, limit.total_seconds(), "measure()")
    # Torch guesses a GPU where none is given, and warns.
    devices = [torch.cuda.current_device()] if world.default.backend == "nccl" else None
    return lambda: dist.barrier(device_ids=devices)


class _Call:
    """One collective of one group, with its tensors."""

    def __init__(self, group: LiveGroup, what: str, size: int, device: str) -> None:
        self._group, self._cuda = group, device != "cpu"
        self._came = 0.0
        count = max(1, size // 4)
        # What is cut in equal parts holds a multiple of the group's size.
        whole = -(-count // group.size) * group.size
        make: dict[str, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(self._given, group=group.pg),
            "all-gather": lambda: _gather(self._got, self._given, group=group.pg),
            "reduce-scatter": lambda: _scatter(self._got, self._given, group=group.pg),
            "all-to-all": lambda: dist.all_to_all_single(self._got, self._given, group=group.pg),
            "send/recv": self._send_recv,
            HOP: self._hop,
        }
        self._run = make[what]
        self._given = torch.ones(whole if what in ("reduce-scatter", "all-to-all") else count, device=device)
        shape = {"all-gather": count * group.size, "reduce-scatter": whole // group.size}.get(what, self._given.numel())
        self._got = torch.empty(shape, device=device)

    def seconds(self, calls: int) -> float:
        """Seconds of one call, the mean of several in a row."""
        self._settle()
        started = time.perf_counter()
        for _ in range(calls):
            self._run()
        self._settle()
        ended = self._came or time.perf_counter()
        return (ended - started) / calls

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _send_recv(self) -> None:
        """To the next stage, from the one before: nothing goes round the end."""
        group = self._group
        operations = [] if group.is_last else [dist.P2POp(dist.isend, self._given, group.next, group=group.pg)]
        operations += [] if group.is_first else [dist.P2POp(dist.irecv, self._got, group.prev, group=group.pg)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _hop(self) -> None:
        """Send round the ring; this rank's time ends when the message to it has come."""
        group = self._group
        *sent, received = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._given, group.next, group=group.pg),
                dist.P2POp(dist.irecv, self._got, group.prev, group=group.pg),
            ]
        )
        received.wait()  # of NCCL one work stands for both
        self._settle()
        self._came = time.perf_counter()
        for work in sent:
            work.wait()
