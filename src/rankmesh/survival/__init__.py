"""A job that loses ranks and goes on, in the same processes, from the last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rankmesh.errors import extra
from rankmesh.survival.members import PlanLike

with extra("torch"):
    from rankmesh.survival.job import Job
    from rankmesh.survival.session import Session
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

    ``redundancy`` is how many other ranks, on other hosts where there are several, keep copies of each shard of which
    no other rank holds a replica. The copies travel while the program goes on after a ``commit``, which every rank then
    calls in each step; two snapshots of such shards take (1 + redundancy) times the memory.

    ``restore(name, box, step)`` loads a box of a tensor that nobody holds any more, (start, stop) by dimension, on each
    rank that needs it: a tensor of the box's shape and of the dtype that is held, as it was at the beginning of
    ``step``. It raises where it has no checkpoint of that step. Where no member is left that held anything, ``step`` is
    that at which the last epoch began, 0 in the first one. Without ``restore``, ``LostState`` on every rank.

    ``join`` is the ``job.address`` of a rank of a job that runs: this process becomes a further spare of it, with the
    same other arguments. Where axis ``shrink`` has lost replicas, it grows back after the next commit, as far as the
    members suffice.

    ``evict`` also leaves out a member whose process responds while the others wait for it in a call, once its calls and
    theirs, which are recorded then, say that it is the cause: after so many seconds, or with True after half of the
    group's timeout. Where ranks wait for each other, nobody is left out. By default 600 over NCCL, whose calls have no
    other limit here, and False else.

    ``guard`` compares every so many commits what ranks must hold alike, as ``Guard`` does. After a difference all ranks
    repeat the steps since the last commit at which they were equal, twice. If both repeats are equal and give the same
    numbers, the ranks that had differed are left out, since their machines are at fault. If the ranks differ again, the
    job ends with ``Diverged``. A third snapshot is kept.
    """
    session = Session(
        layout,
        spares=spares,
        shrink=shrink,
        timeout=timeout,
        redundancy=redundancy,
        restore=restore,
        join=join,
        evict=evict,
        guard=guard,
    )
    try:
        return session.run(train)
    finally:
        session.close()
