"""``fairscale.nn.model_parallel.initialize``: model, context, pipeline and data parallel groups of this process.

    rank = mp_rank + mp · (cp_rank + cp · (pp_rank + pp · dp_rank))        mp: fairscale's model parallelism, our tp

```python
import rankmesh.dialects.fairscale as fs_init     # instead of fairscale.nn.model_parallel.initialize
fs_init.initialize_model_parallel(2, pipeline_length=2)
```

The functions of this module are the methods of one ``ModelParallel``; another one is another, independent state.

What differs: a model-parallel size above the world is refused, never clamped; every ``get_*`` refuses before
initialisation and after destruction (fairscale's ``get_data_parallel_ranks`` raises ``NameError`` before, and answers
with stale ranks after); ``destroy_model_parallel`` destroys the groups instead of forgetting them; nothing is printed.
Refusals are ``AssertionError`` too, as fairscale asserts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh.groups.handles import LiveGroup
from rankmesh.groups.held import Held, refusing_sizes, world_size
from rankmesh.plan import Options, Plan, recipes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ModelParallel",
    "destroy_model_parallel",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]


class ModelParallel:
    """One state: no groups, or the groups of ``initialize_model_parallel``."""

    def __init__(self) -> None:
        self._held = Held("fairscale", "initialize_model_parallel", "destroy_model_parallel")

    def _group(self, name: str) -> LiveGroup:
        return self._held.groups[name]

    def initialize_model_parallel(
        self,
        model_parallel_size_: int,
        pipeline_length: int = 1,
        context_parallel_size: int = 1,
        *,
        model_parallel_backend: str | None = None,
        pipeline_backend: str | None = None,
        cp_backend: str | None = None,
        ddp_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Make the groups of this rank; what the sizes leave of the world is data parallel.

        A backend or timeout that is None is the world's. ``AlreadyInitialized`` the second time, ``SizesError`` for
        sizes whose product does not divide the world, ``NotInitialized`` without a world; each an ``AssertionError``.
        """
        world = world_size("initialize_model_parallel()")
        self._held.check_free()
        with refusing_sizes():
            plan = recipes.ezpz(world, tp=model_parallel_size_, cp=context_parallel_size, pp=pipeline_length)
        backends = {
            "tp": model_parallel_backend,
            "pp": pipeline_backend,
            "cp": cp_backend,
            "dp": ddp_backend,
        }
        specs = [spec.with_options(Options(backend=backends[spec.name], timeout=timeout)) for spec in plan.specs]
        self._held.open(Plan(plan.mesh, specs, world_size=world))

    def model_parallel_is_initialized(self) -> bool:
        """Whether there are groups."""
        return self._held.held

    def destroy_model_parallel(self) -> None:
        """Destroy the groups; nothing where there are none."""
        self._held.close()

    # -- model ------------------------------------------------------------------------------------

    def get_model_parallel_group(self) -> ProcessGroup:
        """The process group that shares a layer's weights with this rank."""
        return self._group("tp").pg

    def get_model_parallel_world_size(self) -> int:
        """How many ranks share a layer."""
        return self._group("tp").size

    def get_model_parallel_rank(self) -> int:
        """The position of this rank in its model-parallel group."""
        return self._group("tp").rank

    def get_model_parallel_src_rank(self) -> int:
        """The global rank of the first member of the model-parallel group."""
        return self._group("tp").first

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

    # -- pipeline ---------------------------------------------------------------------------------

    def get_pipeline_parallel_group(self) -> ProcessGroup:
        """The process group of the stages that this rank's activations pass."""
        return self._group("pp").pg

    def get_pipeline_parallel_ranks(self) -> list[int]:
        """The global ranks of the pipeline, first stage first."""
        return list(self._group("pp").ranks)


_default = ModelParallel()

initialize_model_parallel = _default.initialize_model_parallel
model_parallel_is_initialized = _default.model_parallel_is_initialized
destroy_model_parallel = _default.destroy_model_parallel
get_model_parallel_group = _default.get_model_parallel_group
get_model_parallel_world_size = _default.get_model_parallel_world_size
get_model_parallel_rank = _default.get_model_parallel_rank
get_model_parallel_src_rank = _default.get_model_parallel_src_rank
get_context_parallel_group = _default.get_context_parallel_group
get_context_parallel_ranks = _default.get_context_parallel_ranks
get_context_parallel_world_size = _default.get_context_parallel_world_size
get_context_parallel_rank = _default.get_context_parallel_rank
get_data_parallel_group = _default.get_data_parallel_group
get_data_parallel_ranks = _default.get_data_parallel_ranks
get_data_parallel_world_size = _default.get_data_parallel_world_size
get_data_parallel_rank = _default.get_data_parallel_rank
get_pipeline_parallel_group = _default.get_pipeline_parallel_group
get_pipeline_parallel_ranks = _default.get_pipeline_parallel_ranks
