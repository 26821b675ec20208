"""nanotron's ``ParallelContext``: of its sources (``ParallelContext``), and of its release 0.4 (``ParallelContext04``).

    rank = tp + TP · (cp + CP · (dp + DP · (pp + PP · ep)))        world_rank_matrix[ep, pp, dp, cp, tp] = rank

```
                      axes                parameters after data_parallel_size                    matrix
ParallelContext       ep pp dp cp tp      context_parallel_size, expert_parallel_size, backend   5 dimensions
ParallelContext04     ep pp dp tp         expert_parallel_size, backend                          4 dimensions
```

```
attribute       varies inside a group
tp_pg cp_pg dp_pg pp_pg ep_pg      its own axis
mp_pg           tp, pp, ep         one model, for given data and context
dp_cp_pg        dp, cp             gradients
tp_and_ep_pg    tp, ep             one expert layer
local_pg        the ranks of one host
world_pg        everything
```
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rankmesh.backend.default import DefaultGroup, default_group
from rankmesh.backend.members import destroy
from rankmesh.backend.single_rank import single_rank_group
from rankmesh.core import Options, recipes
from rankmesh.core.strided import IntArray
from rankmesh.errors import ConnectError, NotInitialized, SizesError, quoted
from rankmesh.launch.started import started_by
from rankmesh.launch.table import NO_LAUNCHER
from rankmesh.runtime.devices import pick
from rankmesh.runtime.init import LiveRank, enter
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.registry import Registry, refusing_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ParallelContext", "ParallelContext04"]

_ORDER = ("ep", "pp", "dp", "cp", "tp")
# Ranks of one host where the launcher does not say; a smaller world is one host.
_USUAL_HOST = 8


class ParallelContext(AbstractContextManager["ParallelContext"]):
    """The process groups of this rank; the five sizes multiply to the world.

    Where no world is initialised, one of ``backend`` is, from the launcher's variables, and ``destroy`` ends it. In a
    world that exists, its backend is used; a ``backend`` other than the default that it does not run is refused.

    Unlike nanotron's: expert parallelism works (its check left the size out); ``LOCAL_WORLD_SIZE`` counts in every
    world (ignored up to 8 ranks there); the world is the one that exists, not what ``WORLD_SIZE`` says; ``destroy``
    leaves a world that it did not start. Sizes that do not fit are ``SizesError``, an ``AssertionError`` too.
    """

    # How long operations of its groups, and of a world that it starts, may take: as in nanotron.
    _timeout = timedelta(minutes=20)

    def __init__(
        self,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        data_parallel_size: int,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        backend: str = "nccl",
    ) -> None:
        self._registry = Registry("nanotron", "ParallelContext", "destroy")
        self._world = _start_world(backend, self._timeout)
        try:
            self.world_size = dist.get_world_size()
            self.local_world_size = _local_world_size(self.world_size)
            with refusing_sizes():
                plan = recipes.nanotron(
                    self.world_size,
                    tp=tensor_parallel_size,
                    pp=pipeline_parallel_size,
                    dp=data_parallel_size,
                    cp=context_parallel_size,
                    ep=expert_parallel_size,
                    local_world_size=self.local_world_size,
                    options=Options(timeout=self._timeout),
                )
            self.set_device()
            self._adopt(self._registry.open(plan))
            _check_local_rank(self.groups["local"].rank)
        except BaseException:
            self._abandon()
            raise
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.data_parallel_size = data_parallel_size
        self.context_parallel_size = context_parallel_size
        self.expert_parallel_size = expert_parallel_size

    def _adopt(self, groups: LiveGroups) -> None:
        self.world_pg: ProcessGroup = groups["world"].pg
        self.local_pg: ProcessGroup = groups["local"].pg
        self.tp_pg: ProcessGroup = groups["tp"].pg
        self.cp_pg: ProcessGroup = groups["cp"].pg
        self.dp_pg: ProcessGroup = groups["dp"].pg
        self.pp_pg: ProcessGroup = groups["pp"].pg
        self.ep_pg: ProcessGroup = groups["ep"].pg
        self.mp_pg: ProcessGroup = groups["mp"].pg
        self.dp_cp_pg: ProcessGroup = groups["dp_cp"].pg
        self.tp_and_ep_pg: ProcessGroup = groups["tp_ep"].pg
        self.parallel_order = list(_ORDER)
        self.world_rank_matrix = self._matrix
        self._groups: dict[str, object] = {}  # nanotron has it, empty

    @property
    def groups(self) -> LiveGroups:
        """The live groups by name; ``NotInitialized`` after ``destroy``."""
        return self._registry.groups

    # -- every group of the world, for code that shares them by their ranks -------------------------------------

    @cached_property
    def world_ranks_to_pg(self) -> dict[tuple[int, ...], Any]:
        """The process group of each group of the world, by its ranks in ascending order; callers may add theirs.

        It has the same keys on every rank, so that ranks decide alike whether a group is still to be made. The value
        of a group that this rank is not in is ``GroupMember.NON_GROUP_MEMBER``, as ``new_group`` returns it. Listed at
        the first use, since it holds the whole world.
        """
        outside = dist.GroupMember.NON_GROUP_MEMBER
        known: dict[tuple[int, ...], Any] = {}
        for name, local in self.groups.items():
            for ranks in self.groups.plan.groups(name).tolist():
                known.setdefault(tuple(ranks), outside)
            if known[local.ranks] is outside:
                known[local.ranks] = local.pg
        return known

    def create_new_group(self, all_groups_ranks: Iterable[Iterable[int]]) -> Any:
        """Make the groups of these rank lists that do not exist yet; the one that this rank is in.

        Every rank of the world calls this with the same lists, whether it is in one of them or not. The groups are
        added to ``world_ranks_to_pg`` and go with ``destroy``. A rank that is in several lists gets the group of the
        last, one in none gets ``GroupMember.NON_GROUP_MEMBER`` (nanotron: None, which collectives take for the world).
        """
        mine: Any = dist.GroupMember.NON_GROUP_MEMBER
        for ranks in all_groups_ranks:
            members = tuple(sorted(int(rank) for rank in ranks))
            if members not in self.world_ranks_to_pg:
                self.world_ranks_to_pg[members] = self._new_group(members)
            if dist.get_rank() in members:
                mine = self.world_ranks_to_pg[members]
        return mine

    def _new_group(self, members: tuple[int, ...]) -> Any:
        if len(members) > 1:
            return dist.new_group(list(members), timeout=self._timeout)
        if members != (dist.get_rank(),):
            return dist.GroupMember.NON_GROUP_MEMBER
        backend = default_group().backend
        return single_rank_group(rank=members[0], name=f"nanotron/{id(self)}", desc="create_new_group", backend=backend)

    # -- places -------------------------------------------------------------------------------------------------

    def set_device(self) -> None:
        """Make the device of this rank's number on its host the current one, where there are CUDA devices."""
        if torch.cuda.is_available():
            torch.cuda.set_device(pick(torch.cuda.device_count(), started_by().local_rank)[0] or 0)

    def get_local_ranks(self, world_rank: int) -> dict[str, int]:
        """Return the position of a global rank along each axis, in ``parallel_order``."""
        place = self.groups.plan.mesh.coordinate(world_rank)
        return {axis: place[axis] for axis in self.parallel_order}

    def get_global_rank(
        self,
        ep_rank: int | slice | Sequence[int],
        pp_rank: int | slice | Sequence[int],
        dp_rank: int | slice | Sequence[int],
        cp_rank: int | slice | Sequence[int],
        tp_rank: int | slice | Sequence[int],
    ) -> np.int64 | IntArray:
        """Return the global rank at a position, ``numpy.int64``; an array of ranks where slices or lists are given.

        They index ``world_rank_matrix`` as in numpy. ``LayoutError`` for a position outside (nanotron counts negative
        ones back).
        """
        place = {"ep": ep_rank, "pp": pp_rank, "dp": dp_rank, "cp": cp_rank, "tp": tp_rank}
        single = {axis: int(at) for axis, at in place.items() if isinstance(at, int | np.integer)}
        rank = self.groups.plan.mesh.rank(view=None, **{axis: single.get(axis, 0) for axis in place})
        ranks: IntArray = self._matrix[tuple(place.values())]
        return np.int64(rank) if len(single) == len(place) else ranks

    @property
    def _matrix(self) -> IntArray:
        axes = self.groups.plan.mesh.axes
        return np.arange(self.world_size).reshape([axes[name] for name in _ORDER])

    # -- the end ------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy the groups, those that callers added, and the world if this started it; again is nothing.

        Waits for all ranks first, as nanotron does: a group must not end while another member still connects to it.
        """
        self._destroy(meet=True)

    def _destroy(self, *, meet: bool) -> None:
        if not self._registry.is_open:
            return
        listed = self.__dict__.pop("world_ranks_to_pg", {}).values()
        if meet and dist.is_initialized():
            dist.barrier()
        self._registry.close()
        for pg in listed:
            if isinstance(pg, dist.ProcessGroup) and pg is not dist.group.WORLD:
                destroy(pg)
        self._abandon()

    def _abandon(self) -> None:
        self._registry.close()
        if self._world is not None:
            self._world.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that failed does not wait for ranks that know nothing of it.
        self._destroy(meet=kind is None)


class ParallelContext04(ParallelContext):
    """The process groups of this rank, with the names and parameters of nanotron 0.4.

    ``expert_pg`` is ``ep_pg``; ``world_rank_matrix`` has no dimension of context. ``ParallelContext``
    lists what differs from nanotron's; here ``backend`` may be gloo too, and groups wait 10 minutes, not 20.
    """

    _timeout = timedelta(minutes=10)

    def __init__(
        self,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        data_parallel_size: int,
        expert_parallel_size: int = 1,
        backend: str = "nccl",
    ) -> None:
        super().__init__(
            tensor_parallel_size,
            pipeline_parallel_size,
            data_parallel_size,
            expert_parallel_size=expert_parallel_size,
            backend=backend,
        )
        self.expert_pg: ProcessGroup = self.ep_pg
        self.world_rank_matrix = self.world_rank_matrix[:, :, :, 0, :]

    def get_3d_ranks(self, world_rank: int) -> tuple[int, int, int]:
        """Return the positions of a global rank along pp, dp and tp."""
        place = self.get_local_ranks(world_rank)
        return place["pp"], place["dp"], place["tp"]


def _start_world(backend: str, timeout: timedelta) -> LiveRank | None:
    """Join the launcher's world unless there is one already; return the rank that leaves it again."""
    if dist.is_initialized():
        _check_backend(backend, default_group())
        return None
    launch = started_by()
    if launch.launcher == NO_LAUNCHER:
        raise NotInitialized(
            "ParallelContext() has no world, and no variables RANK and WORLD_SIZE of a launcher to make one; "
            "start the program with torchrun, or call torch.distributed.init_process_group() first"
        )
    return enter(launch, backend, timeout)


def _check_backend(asked: str, world: DefaultGroup) -> None:
    if asked != "nccl" and asked not in world.backend and not world.dry:
        raise ConnectError(
            f"backend {quoted(asked)} is not the backend {world.backend!r} of the world, which the groups use; "
            "leave backend out, or initialise the world with it",
            backend=asked,
            world_backend=world.backend,
        )


def _local_world_size(world_size: int) -> int:
    """Return the ranks of each host: by ``LOCAL_WORLD_SIZE``, by the launcher, else all ranks up to 8 a host."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        launch = started_by()
        here = launch.local_world_size if launch.world_size == world_size else None
        return here or min(world_size, _USUAL_HOST)
    if not text.isdecimal():
        raise SizesError(
            f"LOCAL_WORLD_SIZE={quoted(text)} in the environment is not a number of ranks of each host; "
            "start the ranks with torchrun, or unset it",
            received=text,
        )
    return int(text)


def _check_local_rank(position: int) -> None:
    text = os.environ.get("LOCAL_RANK")
    if text is not None and text != str(position):
        raise SizesError(
            f"LOCAL_RANK={quoted(text)}, but this rank is at position {position} of its host; ranks are numbered host "
            "by host, and every host has LOCAL_WORLD_SIZE of them; start the ranks with torchrun, or correct the two",
            received=text,
            position=position,
        )
