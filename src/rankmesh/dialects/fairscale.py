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

from rankmesh.core import Options, recipes
from rankmesh.runtime.getters import SharedGetters, first_of, group_of, rank_in, size_of
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.registry import Registry, refusing_sizes, world_size

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


class ModelParallel(SharedGetters):
    """One state: no groups, or the groups of ``initialize_model_parallel``."""

    def __init__(self) -> None:
        self._registry = Registry("fairscale", "initialize_model_parallel", "destroy_model_parallel")

    def _group(self, name: str) -> LiveGroup:
        return self._registry.groups[name]

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
        """Make the groups of this rank; the rest of the world is data parallel.

        A backend or timeout that is None is the world's. ``AlreadyInitialized`` the second time, ``SizesError`` for
        sizes whose product does not divide the world, ``NotInitialized`` without a world; each an ``AssertionError``.
        """
        world = world_size("initialize_model_parallel()")
        self._registry.check_free()
        with refusing_sizes():
            plan = recipes.ezpz(world, tp=model_parallel_size_, cp=context_parallel_size, pp=pipeline_length)
        backends = {
            "tp": model_parallel_backend,
            "pp": pipeline_backend,
            "cp": cp_backend,
            "dp": ddp_backend,
        }
        specs = [spec.with_options(Options(backend=backends[spec.name], timeout=timeout)) for spec in plan.specs]
        self._registry.open(plan.replace(specs=specs))

    def model_parallel_is_initialized(self) -> bool:
        """Return whether there are groups."""
        return self._registry.is_open

    def destroy_model_parallel(self) -> None:
        """Destroy the groups; nothing where there are none."""
        self._registry.close()

    get_model_parallel_group = group_of("tp")
    get_model_parallel_world_size = size_of("tp")
    get_model_parallel_rank = rank_in("tp")
    get_model_parallel_src_rank = first_of("tp")


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
