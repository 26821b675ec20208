"""A job that loses ranks and goes on, in the same processes, from the last step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rankmesh.errors import extra
from rankmesh.survival.members import PlanLike

with extra("torch"):
    from rankmesh.survival.job import Job
    from rankmesh.survival.session import Session, transport
    from rankmesh.survival.state import Load

__all__ = ["Job", "survive"]

_Result = TypeVar("_Result")


def survive(
    train: Callable[[Job], _Result],
    layout: PlanLike,
    *,
    spares: int = 0,
    shrink: str | None = None,
    redundancy: int = 0,
    restore: Load | None = None,
    join: str | None = None,
    evict: bool | float | None = None,
    guard: int | None = None,
    timeout: float = 10.0,
) -> _Result | None:
    """Run ``train(job)`` on every rank of the plan, again after each loss of members, until it has returned on all.

    Args:
        train: the program of one rank. It is called with the ``Job`` of each epoch, and its result is returned.
        layout: a SPEC, a mesh or a plan.
        spares: this many of the started processes are kept to replace lost ranks (default 0).
        shrink: the axis that loses the replica of a lost rank when all spares are used. Default None: such a loss ends
            the job.
        redundancy: this many other ranks, on other hosts if possible, keep a copy of each shard without a replica
            (default 0). The copies are sent while the program continues after a ``commit``, which every rank then
            calls in each step. Two snapshots of such shards take (1 + redundancy) times the memory.
        restore: ``restore(name, box, step)`` loads a box, (start, stop) by dimension, of a tensor that no rank holds
            any more. Each rank that needs the box calls it. It returns a tensor of the box's shape and the held dtype,
            with the values at the beginning of ``step``, and raises if there is no checkpoint of that step. If no
            remaining member held anything, ``step`` is the first step of the last epoch, 0 in the first one. Default
            None: every rank raises ``LostState`` instead.
        join: the ``job.address`` of a rank of a running job: this process becomes a further spare of that job. Give the
            other arguments as in that job. If axis ``shrink`` has lost replicas, it grows back after the next commit
            when there are enough members. Default None: this process starts a job.
        evict: seconds that ranks wait in a call for a member whose process responds, before they leave it out; True is
            half of the group's timeout, False never. The recorded calls must show that this member is the cause. If
            ranks wait for each other, none is left out. Default None: 600 over NCCL, whose calls have no other limit
            here, else False.
        guard: commits between two comparisons of tensors that must be equal (see ``Guard``); default None, no
            comparison. After a difference all ranks repeat the steps since the last commit at which they were equal,
            twice. If both repeats are equal and give the same numbers, the ranks that had differed are left out, since
            their machines are at fault. If the ranks differ again, the job ends with ``Diverged``. A third snapshot is
            kept. If a loss leaves one replica of a shard, all ranks repeat the steps since the last equal commit,
            because nothing is left to compare with.
        timeout: seconds after which a member that does not respond is lost (default 10).

    Returns what ``train`` returned on this rank, None on a spare that was not needed.
    """
    session = Session(
        layout,
        spares=spares,
        shrink=shrink,
        timeout=timeout,
        redundancy=redundancy,
        restore=restore,
        evict=evict,
        guard=guard,
        reach=partial(transport, join=join),
    )
    try:
        return session.run(train)
    finally:
        session.close()
