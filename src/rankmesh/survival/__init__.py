"""A job that loses ranks and goes on, in the same processes, from the last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rankmesh.errors import extra
from rankmesh.survival.members import PlanLike

with extra("torch"):
    from rankmesh.survival.job import Job
    from rankmesh.survival.session import Session

__all__ = ["Job", "survive"]

_Result = TypeVar("_Result")


def survive(
    train: Callable[[Job], _Result],
    layout: PlanLike,
    *,
    spares: int = 0,
    shrink: str | None = None,
    timeout: float = 10.0,
) -> _Result | None:
    """Run ``train(job)`` on every rank of the plan, again after each loss of members, until it has returned on all."""
    session = Session(layout, spares=spares, shrink=shrink, timeout=timeout)
    try:
        return session.run(train)
    finally:
        session.close()
