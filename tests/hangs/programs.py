"""Programs that hang, as real ones do: each is one mistake in an otherwise ordinary step, and what it is known for.

Every program is called on each rank, in a gloo world of its size. ``HANGS`` says what is to be found: the cause, the
ranks, the group, and the SPEC that names the groups of those programs that another framework made.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from functools import wraps

import torch
import torch.distributed as dist

import rankmesh as rm


@dataclass(frozen=True)
class Hang:
    """What is to be found of a program: ``spec`` is what the doctor is given.

    Where a rank is missed in several groups at once, ``group`` has each of them.
    """

    size: int
    cause: str
    ranks: tuple[int, ...]
    group: str
    operation: str = "all_reduce"
    spec: str = ""


HANGS: dict[str, Hang] = {}


def hangs(size, cause, ranks, group, operation="all_reduce", spec="", layout="", among=HANGS):
    """Enter a program in a list; after some steps it gets the groups of its layout, if it has one."""

    def enter(program):
        among[program.__name__] = Hang(size, cause, tuple(ranks), group, operation, spec)
        return after_steps(program, layout) if layout else program

    return enter


def after_steps(program, layout):
    """The program of a rank, which gets the groups of a layout after some ordinary steps."""

    @wraps(program)
    def run(rank):
        groups = connected(layout)
        steps(groups)
        program(rank, groups)

    return run


def ones(*sizes, dtype=torch.float32):
    """A tensor of ones, four of them when nothing is said."""
    return torch.ones(sizes or (4,), dtype=dtype)


def connected(spec, *names):
    """The groups of an axis string."""
    mesh = rm.Mesh.parse(spec)
    return rm.connect(rm.Plan(mesh, [rm.GroupSpec(name) for name in names or mesh.axes]))


def steps(groups, count=3):
    """Some ordinary steps: reductions along each group."""
    for _ in range(count):
        for group in groups.values():
            dist.all_reduce(ones(), group=group.pg)


# -- ranks that never come -----------------------------------------------------------------------------------------


@hangs(4, "dead", [3], "dp@tp1", layout="tp=2,dp=2")
def dies(rank, groups):
    """Rank 3 is killed between its two reductions."""
    dist.all_reduce(ones(), group=groups["tp"].pg)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones(), group=groups["dp"].pg)


@hangs(16, "dead", [8, 9, 10, 11], "dp@tp0", spec="tp=4,dp=4", layout="tp=4,dp=4")
def host_dies(rank, groups):
    """Sixteen ranks: those of one host of four die at once."""
    if 8 <= rank < 12:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones(), group=groups["dp"].pg)


@hangs(4, "dead", [2], "dp@tp0|tp@dp1", layout="tp=2,dp=2")
def is_stopped(rank, groups):
    """Rank 2 is stopped, as by a debugger or a frozen cgroup."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    steps(groups)


@hangs(4, "dead", [1], "tp@dp0|dp@tp1", layout="tp=2,dp=2")
def holds_the_interpreter(rank, groups):
    """Rank 1 is in a call of C that holds the interpreter: nothing of its Python runs."""
    if rank == 1:
        re.fullmatch("(a+)+b", "a" * 64)  # tries for ever; no signal wakes it
    steps(groups)


@hangs(4, "late", [3], "dp@tp1", layout="tp=2,dp=2")
def loads_slowly(rank, groups):
    """Rank 3 waits for its data, between its two reductions."""
    dist.all_reduce(ones(), group=groups["tp"].pg)
    if rank == 3:
        time.sleep(100)
    dist.all_reduce(ones(), group=groups["dp"].pg)


@hangs(8, "late", [5], "tp@pp1,dp0|dp@pp1,tp1|pp@dp0,tp1", layout="tp=2,dp=2,pp=2")
def loops_in_python(rank, groups):
    """Eight ranks: rank 5 is in an endless loop of Python."""
    while rank == 5:
        rank = rank + 0
    steps(groups)


@hangs(8, "late", [0], "tp@pp0")
def pipeline_starves(rank):
    """Eight ranks, four stages: the first one never sends, and each waits for the one before."""
    groups = connected("tp=2,pp=4", "tp", "pp")
    steps(groups, 1)
    stage = groups["pp"].rank
    if rank == 0:
        time.sleep(100)
    if stage:
        dist.recv(ones(), groups["pp"].prev, group=groups["pp"].pg)
    if stage < 3:
        dist.send(ones(), groups["pp"].next, group=groups["pp"].pg)
    dist.all_reduce(ones(), group=groups["tp"].pg)


@hangs(4, "absent", [3], "dp@tp1", layout="tp=2,dp=2")
def skips_a_call(rank, groups):
    """Rank 3 leaves out one reduction, and waits at the barrier after it."""
    if rank != 3:
        dist.all_reduce(ones(), group=groups["dp"].pg)
    dist.barrier()


@hangs(4, "absent", [2], "dp@tp0")
def returns_early(rank):
    """Rank 2 ends a step before the others: its data has one batch less."""
    groups = connected("tp=2,dp=2", "dp")
    steps(groups, 4 if rank == 2 else 5)


@hangs(4, "crosswise", [0, 1], "pp")
def ties_embeddings_in_the_world(rank):
    """Four stages: the middle ones have no embedding group, and reduce over the world, which the ends never join."""
    mesh = rm.Mesh(pp=4)
    groups = rm.connect(rm.Plan(mesh, [rm.GroupSpec("pp"), rm.GroupSpec("embd", "pp", pick=rm.ends)]))
    dist.all_reduce(ones(), group=groups["pp"].pg)
    dist.all_reduce(ones(), group=groups["embd"].pg if "embd" in groups else None)
    dist.all_reduce(ones(), group=groups["pp"].pg)


@hangs(4, "late", [1], "world", operation="monitored_barrier", layout="tp=2,dp=2")
def misses_a_monitored_barrier(rank, _groups):
    """Rank 1 does not come to a barrier that the flight recorder does not keep."""
    if rank == 1:
        time.sleep(100)
    dist.monitored_barrier(timeout=None, wait_all_ranks=True)


# -- ranks that call something else --------------------------------------------------------------------------------


@hangs(4, "different", [3], "world", operation="all_reduce", layout="tp=2,dp=2")
def another_operation(rank, _groups):
    """Rank 3 gathers what the others reduce."""
    if rank == 3:
        dist.all_gather([ones() for _ in range(4)], ones())
    else:
        dist.all_reduce(ones())
    dist.barrier()


@hangs(4, "different", [1], "world", layout="tp=2,dp=2")
def another_size(rank, _groups):
    """Rank 1 reduces a larger tensor than the others."""
    dist.all_reduce(ones(4096 if rank == 1 else 16))
    dist.barrier()


@hangs(4, "different", [2], "world", layout="tp=2,dp=2")
def another_dtype(rank, _groups):
    """Rank 2 reduces as many numbers in another dtype."""
    dist.all_reduce(ones(64, dtype=torch.float64 if rank == 2 else torch.float32))
    dist.barrier()


@hangs(4, "different", [3], "world", operation="broadcast", layout="tp=2,dp=2")
def another_root(rank, _groups):
    """Rank 3 expects the weights from another rank than the others."""
    dist.broadcast(ones(), 1 if rank == 3 else 3)
    dist.barrier()


@hangs(4, "order", [2], "world", layout="tp=2,dp=2")
def another_order(rank, _groups):
    """Rank 2 starts its broadcast before its reduction, the others after it."""
    starts = [lambda: dist.all_reduce(ones(), async_op=True), lambda: dist.broadcast(ones(), 0, async_op=True)]
    works = [start() for start in (reversed(starts) if rank == 2 else starts)]
    for work in works:
        work.wait()
    dist.barrier()


# -- ranks that wait for each other --------------------------------------------------------------------------------


@hangs(4, "crosswise", [0, 1], "tp@dp0")
def two_groups_crosswise(rank):
    """Two groups of the same two ranks, entered in one order by rank 0 and in the other by rank 1."""
    mesh = rm.Mesh(tp=2, dp=2)
    groups = rm.connect(rm.Plan(mesh, [rm.GroupSpec("tp"), rm.GroupSpec("copy", "tp", share=False)]))
    names = ("copy", "tp") if rank == 1 else ("tp", "copy")
    if rank < 2:
        for name in names:
            dist.all_reduce(ones(), group=groups[name].pg)


@hangs(4, "crosswise", [0, 1, 2, 3], "dp@tp0", layout="tp=2,dp=2")
def a_ring_of_groups(rank, groups):
    """Each rank waits in one group for a rank that waits in the other kind: a ring of four."""
    for name in ("dp", "tp") if rank in (0, 3) else ("tp", "dp"):
        dist.all_reduce(ones(), group=groups[name].pg)


@hangs(4, "crosswise", [0, 2], "pp@tp0", operation="recv", layout="tp=2,pp=2")
def both_receive(rank, groups):
    """Two stages that both receive before they send."""
    if rank in (0, 2):
        dist.recv(ones(), groups["pp"].next, group=groups["pp"].pg)
        dist.send(ones(), groups["pp"].next, group=groups["pp"].pg)
    dist.all_reduce(ones(), group=groups["tp"].pg)


@hangs(4, "order", [0, 1, 2, 3], "group of [0, 1]", operation="new_group")
def creates_groups_in_another_order(rank):
    """Ranks 0 and 3 share embeddings: each has one group more than the other rank of its pair when that is created."""
    if rank in (0, 3):
        dist.new_group([0, 3], use_local_synchronization=True)
    pair = [0, 1] if rank < 2 else [2, 3]
    dist.all_reduce(ones(), group=dist.new_group(pair, use_local_synchronization=True))


# -- a network that is gone ----------------------------------------------------------------------------------------


@hangs(4, "stuck", [0, 1, 2, 3], "world", layout="tp=2,dp=2")
def loses_the_network(rank, _groups):
    """All ranks enter a reduction, over a network that is gone: this runs in a network namespace of its own."""
    dist.barrier()
    time.sleep(3)
    if rank == 0:
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    time.sleep(1)
    dist.all_reduce(ones())


# -- groups that others made ---------------------------------------------------------------------------------------


@hangs(8, "late", [6], "tp@pp1,dp1,cp0", spec="megatron:world=8,tp=2,pp=2")
def megatron_core(rank):
    """Eight ranks, megatron-core's own groups: rank 6 never comes to its tensor-parallel reduction."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 2)
    tensor, data = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()
    for step in range(3):
        dist.all_reduce(ones(), group=data)
        if rank == 6 and step == 2:
            time.sleep(100)
        dist.all_reduce(ones(), group=tensor)


@hangs(8, "absent", [7], "dp@ep0,pp1,cp0,tp1", spec="nanotron:world=8,tp=2,pp=2,dp=2")
def nanotron(rank):
    """Eight ranks, groups made as nanotron's ParallelContext makes them: rank 7 skips a reduction."""
    from nanotron.parallel import ParallelContext

    os.environ |= {"WORLD_SIZE": "8", "RANK": str(rank)}
    ParallelContext.set_device = lambda self: None  # it has a GPU for each rank
    context = ParallelContext(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    for step in range(3):
        dist.all_reduce(ones(), group=context.tp_pg)
        if not (rank == 7 and step == 2):
            dist.all_reduce(ones(), group=context.dp_pg)
    dist.barrier()


@hangs(8, "dead", [1], "dp@pp0,tp1", spec="tp=2,dp=2,pp=2")
def device_mesh(rank):
    """Eight ranks, a DeviceMesh: rank 1 dies before its data-parallel reduction."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for step in range(3):
        dist.all_reduce(ones(), group=mesh.get_group("tp"))
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(ones(), group=mesh.get_group("dp"))


_ON_GLOO = (
    "creates_groups_in_another_order",  # NCCL creates a group at its first call
    *("loses_the_network", "misses_a_monitored_barrier", "megatron_core", "nanotron"),
)
# What NCCL's recordings show otherwise: the root of a call is in none, and is in no stack once the call is handed over.
ON_NCCL = {name: hang for name, hang in HANGS.items() if name not in _ON_GLOO} | {
    "another_root": replace(HANGS["another_root"], cause="stuck", ranks=(0, 1, 2, 3))
}
