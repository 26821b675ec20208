"""Connect: from plans to live groups, in a world that torch.distributed has initialised.

```
plans  ->  check the world  ->  agree  ->  make own groups, in one order  ->  complete  ->  LiveGroups
           (and the options)    (all hold the same)                           (all have their groups)
```
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

from rankmesh.core.mesh import Mesh
from rankmesh.core.options import time_limit
from rankmesh.core.plan import Plan
from rankmesh.core.source import read_plan
from rankmesh.errors import ConnectError, LayoutError, PlanError, RankmeshError, UnknownAxis, at_caller, quoted
from rankmesh.launch.started import started_by
from rankmesh.launch.table import NO_LAUNCHER
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World

__all__ = ["DEFAULT_TIMEOUT", "LiveJob", "connect"]

DEFAULT_TIMEOUT = 300.0

PlanLike = Plan | Mesh | str


class LiveJob(Mapping[str, LiveGroups], AbstractContextManager["LiveJob"]):
    """The live groups of every plan of a job by its key, in one order; a context manager that destroys them all."""

    def __init__(self, live: Mapping[str, LiveGroups]) -> None:
        self._live = dict(live)

    def __getitem__(self, key: str) -> LiveGroups:
        try:
            return self._live[key]
        except KeyError:
            raise UnknownAxis(key, self._live, what="plan") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def close(self) -> None:
        """Destroy the groups of every plan, last made first; each is tried, whatever happens to another."""
        with ExitStack() as stack:
            for live in self._live.values():
                stack.callback(live.close)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LiveJob({', '.join(f'{key}: {live!r}' for key, live in self._live.items())})"


@overload
def connect(plan: PlanLike, *, timeout: float | timedelta = DEFAULT_TIMEOUT) -> LiveGroups: ...
@overload
def connect(plan: Mapping[str, PlanLike], *, timeout: float | timedelta = DEFAULT_TIMEOUT) -> LiveJob: ...
@at_caller
def connect(
    plan: PlanLike | Mapping[str, PlanLike], *, timeout: float | timedelta = DEFAULT_TIMEOUT
) -> LiveGroups | LiveJob:
    """Return the live groups of this rank: a mapping by name and a context manager.

    ``plan`` is a ``Plan``; a SPEC or a ``Mesh``, which get a group for each axis (``*`` is inferred from the world);
    or, for a job, a mapping of those, whose result has the live groups of each plan under its key.

    Called in a world that ``init_process_group`` made, by every rank of it: ranks outside a mesh agree too, and have
    no groups. Only a plan without a ``world_size`` may cover a part of the world; then only the ranks of its mesh call
    it. The ranks first agree on the plans; then each makes the groups that it is in, and waits until
    all have done so. Each of these steps may take ``timeout`` (seconds, or a timedelta). A world of ``backend="fake"``
    is a dry run, where no other rank can agree.

    Raises ``PlanError`` for what is not a plan or a time limit; ``ConnectError`` for a world that cannot serve the
    plans, and on every rank when one could not make its groups; ``AgreementError`` on every rank when the ranks hold
    different plans or one never arrives. A failed connect leaves nothing behind.
    """
    limit = time_limit(timeout)
    # Plans first: whether something is a Mapping takes Python half a millisecond, once for each new class.
    if isinstance(plan, PlanLike) or not isinstance(plan, Mapping):
        return _connected({"": plan}, limit)[""]
    _check_keys(plan)
    return LiveJob(_connected(plan, limit))


def _check_keys(given: Mapping[Any, object]) -> None:
    if not given or not all(isinstance(key, str) and key for key in given):
        raise PlanError(
            f"the plans of a job have the keys {quoted(list(given))}; give one plan or more, each under a name, such "
            "as connect({'encoder': plan, 'llm': other})",
            received=tuple(given),
        )


def _connected(given: Mapping[str, PlanLike], limit: timedelta) -> dict[str, LiveGroups]:
    for one in given.values():
        _check_form(one)
    world = World.current()
    if world.default.size == 1 and not world.default.dry and started_by().launcher == NO_LAUNCHER:
        _check_started(given.values())
    try:
        size = world.default.size
        plans = {key: read_plan(one, world_size=size if isinstance(one, str) else None) for key, one in given.items()}
    except RankmeshError as error:
        world.refuse(error, limit)
        raise
    with world.diagnosed("connect"):
        return world.connect(plans, limit)


def _check_started(given: Iterable[PlanLike]) -> None:
    """Refuse plans of several ranks in a process that no launcher started."""
    needed = max(map(_ranks, given))
    if needed > 1:
        per_node = 8 if needed % 8 == 0 else needed
        nodes = f"--nnodes {needed // per_node} " if needed > per_node else ""
        script = Path(sys.argv[0]).name or "job.py"
        raise ConnectError(
            f"this process was started alone, but the plan has {needed} ranks; start them all: "
            f"torchrun {nodes}--nproc-per-node {per_node} {script}",
            world_size=1,
            plan_world_size=needed,
        )


def _ranks(given: PlanLike) -> int:
    """Return the number of ranks that a plan needs; for a SPEC with ``*`` the product of the other sizes."""
    if not isinstance(given, str):
        plan = read_plan(given)
        return max(plan.world_size, plan.mesh.rank_range.stop)
    try:
        return read_plan(given).world_size
    except (PlanError, LayoutError):
        pass
    try:
        return read_plan(given, world_size=1).world_size
    except (PlanError, LayoutError) as error:
        product = error.values.get("product")
        return product if isinstance(product, int) else 1


def _check_form(given: object) -> None:
    if not isinstance(given, Plan | Mesh | str):
        raise PlanError(
            f"cannot connect {quoted(given)}, which is not a plan, a SPEC or a mesh; "
            "use Plan(mesh, [GroupSpec('tp'), ...]), one of rankmesh.recipes, or 'tp=2,dp=*'",
            received=given,
        )
