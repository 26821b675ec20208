"""The job of one member: what its program sees of the groups and the steps, and gives to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankmesh.core.axes import integer
from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError
from rankmesh.runtime.live import LiveGroups
from rankmesh.survival.members import PlanLike
from rankmesh.transfer.live.shards import local, problem_of, shards_of

if TYPE_CHECKING:
    from rankmesh.survival.session import Session

__all__ = ["Job"]


@dataclass(eq=False)
class Job:
    """What ``train`` gets.

    ``plan`` and ``groups`` are those of the epoch; ``step`` is the step to do next; ``device`` is where this rank's
    tensors live. ``seconds`` says what the last change took: free (until the program had left the old groups), agree,
    connect, transfer.
    """

    plan: Plan
    groups: LiveGroups
    epoch: int
    step: int
    device: torch.device
    seconds: Mapping[str, float]
    _session: Session = field(repr=False)

    @property
    def address(self) -> str:
        """Where a process that is started later reaches this one: what ``rm.survive(..., join=)`` takes there."""
        return self._session.address

    @property
    def key(self) -> str:
        """The key of the job, a secret: a process that joins has it in its variable ``RANKMESH_JOB_KEY``."""
        return self._session.key

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

        With ``model`` these are its parameters and persistent buffers, and what ``optimizer`` keeps, beside the tensors
        that are given. DTensors say how they are sharded; plain tensors are replicated over all axes, or over those of
        ``replicated`` (``"dp-cp"``), and along the others each is a tensor of its own. Copies must be equal.

        Every rank calls it, once an epoch and before the first ``commit``. ``shardings`` has every tensor of the job,
        alike on all ranks; ``tensors`` those of which this rank has a shard. After a change they are overwritten with
        what they were at the beginning of ``step``. Raises ``PlanError`` for a shard or a sharding that is missing, for
        a shard that has not its sharding's shape and dtype, and for shardings that differ between ranks; ``LostState``
        on every rank where no member is left that held a part.
        """
        tensors, shardings = dict(tensors or {}), dict(shardings or {})
        if model is not None:
            of_model = self._session.described(self, model, optimizer, replicated)
            tensors, shardings = {**of_model[0], **tensors}, {**of_model[1], **shardings}
        shards = shards_of(shardings, self.rank)
        for names, what in (
            (shards.keys() - tensors.keys(), "tensor"),
            (tensors.keys() - shardings.keys(), "sharding"),
        ):
            if names:
                raise PlanError(
                    f"rank {self.rank}: hold() was given no {what} for {min(names)!r}; give both, by the same names",
                    names=tuple(sorted(names)),
                )
        given: dict[str, Any] = {name: tensors[name] for name in sorted(shards)}
        shapes = {name: local(one) if isinstance(one, Tensor) else one for name, one in given.items()}
        if problem := problem_of(shapes, shardings, shards, "tensor"):
            raise PlanError(f"rank {self.rank}: hold() was given a wrong shard: {problem}")
        self._session.hold(self, given, dict(sorted(shardings.items())))

    def commit(self, step: int) -> None:
        """Keep a copy of what is held as it is now: this rank has done all before ``step``.

        Every rank commits the same steps in the same order. ``PlanError`` where another rank commits another step: at
        the first commit of an epoch, with ``redundancy`` at the next one. Without, the job ends with it at a change.
        A change of the members ends ``train`` here, or in a collective that it interrupts.
        """
        self._session.commit(self, integer(step, "step", least=0))

    def relayout(self, layout: PlanLike, *, budget: int | None = None) -> None:
        """Go on in another layout: ``train`` is called again, and ``hold`` sets its tensors to what is held now.

        Every rank calls it after the same ``commit``, with the same SPEC, mesh or plan. That may have other sizes,
        another order and other axes, and more or fewer ranks: spares take new ranks, and ranks that it lacks become
        spares. A size of ``*`` keeps the number of ranks. Tensors keep their names and global shapes. ``budget`` is the
        memory in bytes that a rank takes to move them, 256 MiB by default.

        Raises ``PlanError`` on every rank, and changes nothing, where ranks ask for different layouts, where a layout
        does not fit the members, lacks axis ``shrink``, or has another size of an axis along which the plain tensors of
        a held ``model`` are not cut: nobody holds those of further ranks. Returns if the job has this plan already. A
        rank that is lost meanwhile is replaced as always; if too few are left for the new plan, the job goes on under
        the old one. A tensor that nobody held is found by ``hold`` under the new plan: the job ends on every rank.

        Call it at the beginning of a step: if a rank is lost before all have asked, the step begins and asks again.
        """
        self._session.relayout(self, layout, budget)

    def regroup(self) -> None:
        """Go on in the next epoch without leaving ``train``: ``groups``, ``step`` and the rest are those of it.

        For a program that catches the error of a collective itself, after ``groups.abort()`` or a change. Everything
        made of the old groups has to be made anew, and ``hold`` called again. No rank is left out for the error that
        its program handles: all ranks take the step again, and if it fails again without a loss, the job ends with that
        error on every rank.
        """
        self._session.regroup(self)
