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

    ``spares`` is the number of started processes that wait, and replace lost ranks. Without a spare, axis ``shrink``
    loses the replica of a lost rank; without both, a loss ends the job. A member that does not respond within
    ``timeout`` seconds is lost.

    ``redundancy`` is the number of other ranks, on other hosts if possible, that keep a copy of each shard without a
    replica. The copies are sent while the program continues after a ``commit``, which every rank then calls in each
    step. Two snapshots of such shards take (1 + redundancy) times the memory.

    ``restore(name, box, step)`` loads a box, (start, stop) by dimension, of a tensor that no rank holds any more. Each
    rank that needs the box calls it. It returns a tensor of the box's shape and the held dtype, with the values at the
    beginning of ``step``, and raises if there is no checkpoint of that step. If no remaining member held anything,
    ``step`` is the first step of the last epoch, 0 in the first one. Without ``restore``, every rank raises
    ``LostState``.

    ``join`` is the ``job.address`` of a rank of a running job: this process becomes a further spare of that job. Give
    the other arguments as in that job. If axis ``shrink`` has lost replicas, it grows back after the next commit when
    there are enough members.

    ``evict`` is the number of seconds that ranks wait in a call for a member whose process responds, before they leave
    it out; True is half of the group's timeout. The recorded calls must show that this member is the cause. If ranks
    wait for each other, none is left out. The default is 600 over NCCL, whose calls have no other limit here, else
    False.

    ``guard`` is the number of commits between two comparisons of tensors that must be equal (see ``Guard``). After a
    difference all ranks repeat the steps since the last commit at which they were equal, twice. If both repeats are
    equal and give the same numbers, the ranks that had differed are left out, since their machines are at fault. If the
    ranks differ again, the job ends with ``Diverged``. A third snapshot is kept. If a loss leaves one replica of a
    shard, all ranks repeat the steps since the last equal commit, because nothing is left to compare with.
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
