"""The arguments of ``initialize_model_parallel``, checked, and their plan.

```
arguments ── Request ── plan(world) ── recipe "megatron" ── groups that the job's world has anyway left out
                                                        ── NCCL configuration, high priority, SHARP over its options
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.core.nccl_config import with_nccl_config
from rankmesh.core.options import NcclValue, Options
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.megatron_core import DEFAULT_ORDER, megatron
from rankmesh.core.spec import GroupSpec
from rankmesh.dialects.megatron.nccl import read_config, section_of, sharp_kind
from rankmesh.dialects.megatron.refusals import Refused, UnknownName, refusals
from rankmesh.errors import quoted

__all__ = ["Request"]

_AXES = ("tp", "cp", "ep", "dp", "pp", "gtp_remat")

Ranks = Callable[..., Sequence[int]]


@dataclass(frozen=True)
class Request:
    """The arguments of ``initialize_model_parallel``, by its names."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: float = 30
    order: str = DEFAULT_ORDER
    get_embedding_ranks: Ranks | None = None
    get_position_embedding_ranks: Ranks | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: Sequence[str] | None = None
    sharp_enabled_group: str | None = None
    create_all_gather_group: bool | None = False
    gtp_remat_size: int = 1
    expert_gtp_remat_size: int = 1
    rank_offset: int = 0
    local_world_size: int | None = None

    @property
    def timeout(self) -> float:
        """The timeout of the groups, in seconds."""
        return self.distributed_timeout_minutes * 60

    def has_cpu_counterpart(self, kind: str) -> bool:
        """Return whether a group may have a CPU counterpart: not where ranks hold pieces of weights, as in Megatron."""
        pieces = self.gtp_remat_size > 1 or ("ep_dp" in kind and self.expert_gtp_remat_size > 1)
        return self.create_gloo_process_groups and not pieces

    def plan(self, world_size: int, *, all_gloo: bool, name: str = "") -> Plan:
        """Return the plan for a world; ``all_gloo``: groups are gloo already, and are their own CPU counterparts.

        Raises ``Refused`` for whatever Megatron-Core refuses, and what ``recipes.megatron`` cannot lay out.
        """
        with refusals():
            self._check()
            plan = self._recipe(world_size, gloo=self.create_gloo_process_groups and not all_gloo)
            self._check_order(plan)
            sharp = self.sharp_enabled_group and sharp_kind(self.sharp_enabled_group)
            specs = [self._optioned(spec, sharp) for spec in (*plan.specs, *self._single(plan)) if self._wanted(spec)]
            # A state over a part of the world is initialised by the ranks of that part only.
            part = plan.mesh.size < world_size
            plan = Plan(plan.mesh, specs, world_size=None if part else world_size, name=name)
            return with_nccl_config(plan, sections) if (sections := self._sections(plan)) else plan

    # -- what is refused ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        stages, backend = self.pipeline_model_parallel_size, self.pipeline_model_parallel_comm_backend
        if self.virtual_pipeline_model_parallel_size is not None and stages < 2:
            raise Refused(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size}, but "
                f"pipeline_model_parallel_size is {stages}; use 2 stages or more, or leave the virtual size out",
                received=stages,
            )
        if backend not in (None, "nccl", "ucc"):
            raise Refused(
                f"unknown pipeline_model_parallel_comm_backend {quoted(backend)}; use 'nccl' or 'ucc', or None for "
                "the world's",
                received=backend,
            )
        for name in self.order.lower().split("-"):
            if name not in _AXES:
                raise UnknownName(
                    f"order {quoted(self.order)} has the unknown axis {quoted(name)}; known are {', '.join(_AXES)}; "
                    "remove it",
                    name=name,
                    known=_AXES,
                )
        self._check_sharp()

    def _check_sharp(self) -> None:
        group = self.sharp_enabled_group
        if group is not None and not self.use_sharp:
            raise Refused(
                f"sharp_enabled_group is {quoted(group)} without use_sharp; set use_sharp=True, or leave it out",
                received=group,
            )
        if group is not None:
            sharp_kind(group)
        if group == "dp_replica" and self.num_distributed_optimizer_instances < 2:
            raise Refused(
                "sharp_enabled_group is 'dp_replica', which is between optimizer instances, but "
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances}; use 'dp', or more "
                "instances",
                received=group,
            )

    def _check_order(self, plan: Plan) -> None:
        """Megatron-Core refuses a pipeline that is not slowest when dense layers and experts differ in dp."""
        dense, expert = plan.mesh.axes, plan.mesh.view("expert").axes
        size = plan.mesh.groups("edp", view="expert").size
        if not self.order.endswith("pp") and dense["pp"] > 1 and dense["dp"] != size:
            raise Refused(
                f"order {self.order!r} does not end with pp, but the data-parallel size is {dense['dp']} for dense "
                f"layers and {size} for experts ({expert}); move pp to the end of the order",
                order=self.order,
            )

    # -- what is made ---------------------------------------------------------------------------------------------

    def _recipe(self, world_size: int, *, gloo: bool) -> Plan:
        size = world_size if self.local_world_size is None else self.local_world_size
        return megatron(
            size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            pp=self.pipeline_model_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            gtp=self.gtp_remat_size,
            egtp=self.expert_gtp_remat_size,
            order=self.order,
            optimizer_instances=self.num_distributed_optimizer_instances,
            hierarchical_cp=self.hierarchical_context_parallel_sizes,
            hybrid_cp=self.hybrid_context_parallel,
            all_gather=bool(self.create_all_gather_group),
            gloo=gloo,
            **self._embeddings(),
            pp_backend=self.pipeline_model_parallel_comm_backend,
            timeout=self.timeout,
            rank_offset=self.rank_offset,
        )

    def _embeddings(self) -> dict[str, Any]:
        asked = {"embedding": self.get_embedding_ranks, "position_embedding": self.get_position_embedding_ranks}
        return {name: _ascending(ranks) for name, ranks in asked.items() if ranks is not None}

    def _wanted(self, spec: GroupSpec) -> bool:
        """With one optimizer instance its groups are the whole groups, and there is none between instances."""
        return self.num_distributed_optimizer_instances > 1 or not spec.name.startswith(
            ("intra_dp", "intra_ep", "inter_")
        )

    def _single(self, plan: Plan) -> Iterator[GroupSpec]:
        """Weights that are not sharded further have groups of one rank to ask."""
        for name in ("gtp_remat", "expt_gtp_remat"):
            if name not in plan.kinds:
                single = (1, self.tensor_model_parallel_size)
                yield GroupSpec(name, "tp", levels=single, level=0, timeout=self.timeout)

    def _optioned(self, spec: GroupSpec, sharp: str | None) -> GroupSpec:
        return spec.with_options(Options(sharp=True).over(spec.options)) if spec.name == sharp else spec

    def _sections(self, plan: Plan) -> dict[str, dict[str, NcclValue]]:
        """Return the NCCL options of each group of the plan, from the file and the list of high-priority groups."""
        path = self.nccl_communicator_config_path
        named = read_config(None if path is None else Path(path), self.high_priority_stream_groups or ())
        found: dict[str, dict[str, NcclValue]] = {}
        for spec in plan.specs:
            section = section_of(spec.name)
            if section in named and not (section == "pp" and spec.options.backend == "ucc"):
                found[spec.name] = dict(named[section])
        return found


def _ascending(ranks: Ranks) -> Callable[[Sequence[int]], Sequence[int]]:
    """Megatron's callables get a list, and may answer in any order: torch sorts the ranks of a group."""
    return lambda positions: sorted(ranks(list(positions)))
