"""Jobs of 8 ranks whose calls run out of time: each rank catches the error, and torch writes what its recorder kept.

That is how most recordings of gloo come about: without a watch, after the fact. Gloo marks a call that failed as over,
like one that came through. ``TIMED_OUT`` says what is to be found.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial

import torch.distributed as dist
from tests.hangs.programs import Hang, hangs, ones, steps

import rankmesh as rm

SPEC = "tp=2,dp=2,pp=2"
TIMED_OUT: dict[str, Hang] = {}
runs_out = partial(hangs, 8, layout=SPEC, among=TIMED_OUT)


@runs_out("absent", [5], "dp@pp1,tp1")
def skips_one_of_many(rank, groups):
    """Rank 5 leaves out one reduction of its data-parallel group, and takes the next step for it."""
    dist.all_reduce(ones(), group=groups["tp"].pg)
    if rank != 5:
        dist.all_reduce(ones(), group=groups["dp"].pg)
    dist.all_reduce(ones(), group=groups["pp"].pg)
    steps(groups)
    dist.barrier()


@runs_out("late", [3], "dp@pp0,tp1")
def never_enters(rank, groups):
    """Rank 3 waits for data that do not come; the others run out of time meanwhile."""
    dist.all_reduce(ones(), group=groups["tp"].pg)
    if rank == 3:
        time.sleep(14)
        raise RuntimeError("no data")
    dist.all_reduce(ones(), group=groups["dp"].pg)
    steps(groups)


@runs_out("late", [3], "world")
def enters_too_late(rank, groups):
    """Rank 3 comes to the reduction of all when the others have given up."""
    if rank == 3:
        time.sleep(14)
    dist.all_reduce(ones())
    steps(groups)


@runs_out("dead", [6], "tp@pp1,dp1")
def is_killed(rank, groups):
    """Rank 6 is killed before a reduction along tp."""
    if rank == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(groups)


@runs_out("different", [2], "dp@pp0,tp0")
def has_another_size(rank, groups):
    """Rank 2 has a larger tensor than its peer."""
    dist.all_reduce(ones(4096 if rank == 2 else 16), group=groups["dp"].pg)
    steps(groups)


@runs_out("different", [4], "world")
def swaps_two_calls(rank, groups):
    """Rank 4 broadcasts before it reduces, all others after it; nobody gets to the second call."""
    calls = [lambda: dist.all_reduce(ones(8)), lambda: dist.broadcast(ones(8), 0)]
    for call in reversed(calls) if rank == 4 else calls:
        call()
    steps(groups)


@runs_out("absent", [4], "tp@pp1,dp0")
def swaps_two_groups(rank, groups):
    """Rank 4 reduces over all ranks before it reduces along tp, all others after it."""
    for group in (None, groups["tp"].pg) if rank == 4 else (groups["tp"].pg, None):
        dist.all_reduce(ones(), group=group)
    steps(groups)


@runs_out("absent", [4], "tp@pp1,dp0")
def swaps_two_groups_and_goes_on(rank, groups):
    """Rank 4 reduces over all ranks before it reduces along tp; every rank catches the error of each call."""
    for group in (None, groups["tp"].pg) if rank == 4 else (groups["tp"].pg, None):
        with suppress(RuntimeError):
            dist.all_reduce(ones(), group=group)
    with suppress(RuntimeError):
        dist.barrier()


@runs_out("different", [5], "world", layout="")
def skips_among_equals(rank):
    """Rank 5 leaves out the third gradient of many equal calls: only the barrier at the end differs."""
    for step in range(5):
        if not (rank == 5 and step == 2):
            dist.all_reduce(ones())
        dist.all_reduce(ones())
    dist.barrier()
    dist.all_reduce(ones())


@runs_out("absent", [7], "dp@pp1,tp1", spec=SPEC, layout="")
def skips_in_plain_groups(rank):
    """The groups are those of torch's ``new_group``: rank 7 leaves out a reduction along dp."""
    groups = {}
    mesh = rm.Mesh.parse(SPEC)
    for axis in mesh.axes:
        for members in mesh.groups(axis):
            group = dist.new_group(list(members))
            if rank in members:
                groups[axis] = group
    for step in range(4):
        for axis, group in groups.items():
            if not (rank == 7 and step == 2 and axis == "dp"):
                dist.all_reduce(ones(), group=group)
    dist.barrier()


@runs_out("late", [1], "world")
def raises_and_cleans_up(rank, groups):
    """Rank 1 fails in its own code after some steps, and its recording is written as it ends."""
    if rank == 1:
        raise ValueError("a batch without labels")
    dist.all_reduce(ones())
    steps(groups)
