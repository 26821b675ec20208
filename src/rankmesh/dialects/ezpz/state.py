"""The state behind ``ezpz.tp``: no groups yet, or the four kinds of group of this rank."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankmesh.groups.handles import LiveGroup
from rankmesh.groups.held import Held, refusing_sizes, world_size
from rankmesh.plan import Options, Plan, recipes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TensorParallel", "default"]


class TensorParallel:
    """One state; the functions of ``rankmesh.dialects.ezpz`` are the methods of one, any other is independent of it.

    Without groups the tensor-parallel size is 1 and the rank 0, so that a model can be built without parallelism;
    everything else raises ``NotInitialized``, which is an ``AssertionError`` too.
    """

    def __init__(self) -> None:
        self._held = Held("ezpz", "initialize_tensor_parallel", "destroy_tensor_parallel")

    def _group(self, axis: str) -> LiveGroup:
        return self._held.groups[axis]

    def initialize_tensor_parallel(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        tensor_parallel_backend: str | None = None,
        pipeline_parallel_backend: str | None = None,
        context_parallel_backend: str | None = None,
        data_parallel_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Make the groups of this rank; what the sizes leave of the world is data parallel.

        A backend or timeout that is None is the world's. ``AlreadyInitialized`` the second time, ``SizesError`` for
        sizes whose product does not divide the world, ``NotInitialized`` without a world; each an ``AssertionError``.
        """
        world = world_size("initialize_tensor_parallel()")
        self._held.check_free()
        with refusing_sizes():
            plan = recipes.ezpz(world, tp=tensor_parallel_size, cp=context_parallel_size, pp=pipeline_parallel_size)
        backends = {
            "tp": tensor_parallel_backend,
            "pp": pipeline_parallel_backend,
            "cp": context_parallel_backend,
            "dp": data_parallel_backend,
        }
        specs = [spec.with_options(Options(backend=backends[spec.name], timeout=timeout)) for spec in plan.specs]
        self._held.open(Plan(plan.mesh, specs, world_size=world))

    def tensor_parallel_is_initialized(self) -> bool:
        """Whether there are groups."""
        return self._held.held

    def destroy_tensor_parallel(self) -> None:
        """Destroy the groups; nothing where there are none."""
        self._held.close()

    # -- tensor -----------------------------------------------------------------------------------

    def get_tensor_parallel_group(self) -> ProcessGroup:
        """The process group that shares a layer's weights with this rank."""
        return self._group("tp").pg

    def get_tensor_parallel_ranks(self) -> list[int]:
        """The global ranks of the tensor-parallel group."""
        return list(self._group("tp").ranks)

    def get_tensor_parallel_world_size(self) -> int:
        """How many ranks share a layer; 1 without groups."""
        return self._group("tp").size if self._held.held else 1

    def get_tensor_parallel_rank(self) -> int:
        """The position of this rank in its tensor-parallel group; 0 without groups."""
        return self._group("tp").rank if self._held.held else 0

    def get_tensor_parallel_src_rank(self) -> int:
        """The global rank of the first member of the tensor-parallel group; this rank without groups."""
        if self._held.held:
            return self._group("tp").first
        return dist.get_rank() if dist.is_initialized() else 0

    # -- context ----------------------------------------------------------------------------------

    def get_context_parallel_group(self) -> ProcessGroup:
        """The process group that shares a sequence with this rank."""
        return self._group("cp").pg

    def get_context_parallel_ranks(self) -> list[int]:
        """The global ranks of the context-parallel group."""
        return list(self._group("cp").ranks)

    def get_context_parallel_world_size(self) -> int:
        """How many ranks share a sequence."""
        return self._group("cp").size

    def get_context_parallel_rank(self) -> int:
        """The position of this rank in its context-parallel group."""
        return self._group("cp").rank

    # -- pipeline ---------------------------------------------------------------------------------

    def get_pipeline_parallel_group(self) -> ProcessGroup:
        """The process group of the stages that this rank's activations pass."""
        return self._group("pp").pg

    def get_pipeline_parallel_ranks(self) -> list[int]:
        """The global ranks of the pipeline, first stage first."""
        return list(self._group("pp").ranks)

    def get_pipeline_parallel_world_size(self) -> int:
        """How many stages there are."""
        return self._group("pp").size

    def get_pipeline_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self._group("pp").rank

    # -- data -------------------------------------------------------------------------------------

    def get_data_parallel_group(self) -> ProcessGroup:
        """The process group that holds the same weights as this rank."""
        return self._group("dp").pg

    def get_data_parallel_ranks(self) -> list[int]:
        """The global ranks of the data-parallel group."""
        return list(self._group("dp").ranks)

    def get_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights."""
        return self._group("dp").size

    def get_data_parallel_rank(self) -> int:
        """The position of this rank in its data-parallel group."""
        return self._group("dp").rank

    # -- a state belongs to its process -----------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> TensorParallel:
        """The same state: a copied model talks to the same ranks."""
        return self


default = TensorParallel()
