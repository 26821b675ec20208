"""The job of one member: its groups, its step, and the tensors that survive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankmesh.core.axes import integer
from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, quoted
from rankmesh.guard.model_state import CurrentTensors, later_state
from rankmesh.runtime.live import LiveGroups
from rankmesh.survival.members import PlanLike
from rankmesh.transfer.live.shards import problem_of, shards_of

if TYPE_CHECKING:
    from rankmesh.survival.session import Session

__all__ = ["Job"]


@dataclass(eq=False)
class Job:
    """The argument of ``train``: the groups and the step of this epoch.

    ``plan`` and ``groups`` belong to the epoch; ``step`` is the next step; ``device`` holds this rank's tensors.
    ``seconds`` has the duration of each phase of the last change: free (until the program had left the old groups),
    agree, connect, transfer.
    """

    plan: Plan
    groups: LiveGroups
    epoch: int
    step: int
    device: torch.device
    seconds: Mapping[str, float]
    _session: Session = field(repr=False)
    _later_state: Callable[[], list[str]] = field(default=list, repr=False)

    @property
    def address(self) -> str:
        """The address of this process, which a process that is started later gives to ``rm.survive(..., join=)``."""
        return self._session.driver.address

    @property
    def key(self) -> str:
        """The key of the job, a secret: a process that joins has it in its variable ``RANKMESH_JOB_KEY``."""
        return self._session.driver.peers.key

    @property
    def rank(self) -> int:
        """The rank of this process in the plan, in this epoch."""
        return self.groups.rank

    def hold(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        shardings: Mapping[str, Sharding] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        replicated: str | None = None,
    ) -> None:
        """Name what must survive: this rank's shards by name, and how each tensor is sharded on ``plan.mesh``.

        With ``model``, its parameters, its persistent buffers and the state of ``optimizer`` are held, too. A DTensor
        has its sharding. Plain tensors are replicated over all axes, or over the axes ``replicated`` (``"dp-cp"``);
        along every other axis each rank has a different tensor. Replicas must be equal.

        Every rank calls it, once an epoch and before the first ``commit``. ``shardings`` has every tensor of the job
        and is equal on all ranks; ``tensors`` has the shards of this rank. After a change the tensors are set to their
        values at the beginning of ``step``. Raises ``PlanError`` if a shard or a sharding is missing, if a shard does
        not have its sharding's shape and dtype, or if shardings differ between ranks. Raises ``LostState`` on every
        rank if no remaining member holds a part.
        """
        tensors, shardings = dict(tensors or {}), dict(shardings or {})
        sources: dict[str, Mapping[str, Tensor]] = dict.fromkeys(tensors, tensors)
        local: Collection[str] = ()
        if model is not None:
            of_model, described = self._session.state.described(self, model, optimizer, replicated)
            sources, shardings = dict.fromkeys(of_model, of_model) | sources, described | shardings
            local, self._later_state = of_model.local, later_state(model, optimizer)
        shards = shards_of(shardings, self.rank)
        for names, what in (
            (shards.keys() - sources.keys(), "tensor"),
            (sources.keys() - shardings.keys(), "sharding"),
        ):
            if names:
                raise PlanError(
                    f"rank {self.rank}: hold() was given no {what} for {min(names)!r}; give both, by the same names",
                    names=tuple(sorted(names)),
                )
        given = CurrentTensors({name: partial(sources[name].__getitem__, name) for name in sorted(shards)}, local)
        if problem := problem_of(given, shardings, shards, "tensor"):
            raise PlanError(f"rank {self.rank}: hold() was given a wrong shard: {problem}")
        self._session.state.hold(self, given, dict(sorted(shardings.items())))

    def commit(self, step: int) -> None:
        """Copy the held tensors: this rank has completed every step before ``step``.

        Every rank commits the same steps in the same order. Raises ``PlanError`` if a parameter of a held ``model`` was
        frozen at ``hold`` and has optimizer state now, and if another rank commits another step: at the first commit of
        an epoch, and with ``redundancy`` at each next one. Without ``redundancy`` a later difference ends the job at
        the next change. A change of the members ends ``train`` in this call, or in a collective.
        """
        if names := self._later_state():
            raise PlanError(
                f"rank {self.rank}: the optimizer has state of {quoted(names[0])} that is not held: the parameter "
                "was frozen at hold(); freeze it after hold()",
                name=names[0],
            )
        self._session.state.commit(self, integer(step, "step", least=0))

    def relayout(self, layout: PlanLike, *, budget: int | None = None) -> None:
        """Change the layout: ``train`` is called again, and ``hold`` sets its tensors to their committed values.

        Every rank calls it after the same ``commit``, with the same SPEC, mesh or plan. The new layout may have other
        sizes, another order, other axes, and more or fewer ranks: spares join, and surplus ranks become spares. A size
        of ``*`` keeps the number of ranks. Tensors keep their names and global shapes. ``budget`` limits the message
        buffers of a rank, in bytes, 256 MiB by default.

        Returns if the job has this plan already. Raises ``PlanError`` on every rank, and changes nothing, if ranks
        request different layouts, or if the layout does not fit the members, lacks axis ``shrink``, or changes the size
        of an axis over which plain tensors of a held ``model`` are not replicated. A rank that is lost during the
        change is replaced; if too few are left for the new plan, the job continues under the old one. If the program
        raises an exception under the new plan before every rank has committed a step, all ranks return to the old plan
        and the state before the change, and the job refuses this plan from then on.

        Call it at the beginning of a step: if a rank is lost before all have called it, the step starts again.
        """
        self._session.relayout(self, layout, budget)

    def regroup(self) -> None:
        """Enter the next epoch without leaving ``train``; this sets ``groups``, ``step`` and the other attributes.

        For a program that catches the error of a collective itself, after ``groups.abort()`` or a change. The program
        creates everything that used the old groups again, and calls ``hold``. An error that the program catches leaves
        no rank out: all ranks repeat the step. If it fails again without a loss, the job ends with this error on every
        rank.
        """
        self._session.regroup(self)
