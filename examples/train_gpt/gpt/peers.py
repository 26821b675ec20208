"""The same groups in the peers' words: each function hands the training loop the value that ``layout.rankmesh`` does.

```
megatron          rankmesh's drop-in for megatron.core.parallel_state
megatron_core     megatron.core.parallel_state itself, where it is installed
nanotron          nanotron's ParallelContext: ep is an axis of its own, of ranks with other data
process_groups    the class that many write by hand: tp, pp and dp
```
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

import rankmesh as rm

from .layout import Groups, Refused, Sizes


@contextmanager
def megatron(sizes: Sizes) -> Iterator[Groups]:
    """The groups of ``parallel_state``, rankmesh's drop-in."""
    from rankmesh.dialects.megatron import parallel_state

    with _parallel_state(parallel_state, sizes) as groups:
        yield groups


@contextmanager
def megatron_core(sizes: Sizes) -> Iterator[Groups]:
    """The groups of megatron-core's own ``parallel_state``."""
    try:
        state = importlib.import_module("megatron.core.parallel_state")
    except ModuleNotFoundError as error:
        raise Refused("received megatron-core, which is not installed; use megatron, or pip install it") from error
    with _parallel_state(state, sizes) as groups:
        yield groups


@contextmanager
def _parallel_state(state: Any, sizes: Sizes) -> Iterator[Groups]:
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        create_gloo_process_groups=False,
    )
    try:
        is_end = state.is_pipeline_first_stage() or state.is_pipeline_last_stage()
        yield Groups(
            tp=state.get_tensor_model_parallel_group(),
            cp=state.get_context_parallel_group(),
            pp=state.get_pipeline_model_parallel_group(),
            ep=state.get_expert_model_parallel_group(),
            ep_tp=state.get_expert_tensor_parallel_group(),
            data=state.get_data_parallel_group(with_context_parallel=True),
            shards=state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            expert_shards=state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            tied=(state.get_embedding_group(),) if is_end else (),
            model=(state.get_model_parallel_group(),),
            expert_model=(state.get_expert_tensor_model_pipeline_parallel_group(),),
            mesh=rm.recipes.megatron(**asdict(sizes)).mesh,
            expert_axes=("ep", "etp"),
            expert_view="expert",
            shard_axes=("dp-cp", "edp"),
            replica=state.get_data_parallel_rank(),
            replicas=state.get_data_parallel_world_size(),
        )
    finally:
        state.destroy_model_parallel()


@contextmanager
def nanotron(sizes: Sizes) -> Iterator[Groups]:
    """The groups of ``ParallelContext``; those of tied weights and of dense ones over ep are made as nanotron does."""
    from rankmesh.dialects.nanotron import ParallelContext

    if sizes.dp % sizes.ep:
        raise Refused(
            f"received dp = {sizes.dp} and ep = {sizes.ep}; nanotron's ep takes ranks of dp: it must divide dp"
        )
    with ParallelContext(
        tensor_parallel_size=sizes.tp,
        pipeline_parallel_size=sizes.pp,
        data_parallel_size=sizes.dp // sizes.ep,
        context_parallel_size=sizes.cp,
        expert_parallel_size=sizes.ep,
        backend=dist.get_backend(),
    ) as context:
        matrix = context.world_rank_matrix  # [ep, pp, dp, cp, tp]
        ep, pp, dp, cp, tp = (range(size) for size in matrix.shape)
        shards = context.create_new_group(matrix[:, p, :, :, t].flatten() for p, t in product(pp, tp))
        ends = sorted({0, sizes.pp - 1})
        tied = context.create_new_group(matrix[e, ends, d, c, t] for e, d, c, t in product(ep, dp, cp, tp))
        here = context.get_local_ranks(dist.get_rank())
        yield Groups(
            tp=context.tp_pg,
            cp=context.cp_pg,
            pp=context.pp_pg,
            ep=context.ep_pg,
            ep_tp=context.tp_pg,
            data=shards,
            shards=shards,
            expert_shards=context.dp_cp_pg,
            tied=(tied,) if here["pp"] in ends else (),
            model=(context.tp_pg, context.pp_pg),
            expert_model=(context.mp_pg,),
            mesh=rm.Mesh(tp=sizes.tp, cp=sizes.cp, dp=len(dp), pp=sizes.pp, ep=sizes.ep),
            expert_axes=("ep", "tp"),
            expert_view=None,
            shard_axes=("ep-dp-cp", "dp-cp"),
            replica=here["ep"] * len(dp) + here["dp"],
            replicas=len(ep) * len(dp),
        )


@contextmanager
def process_groups(sizes: Sizes) -> Iterator[Groups]:
    """The groups of ``ProcessGroups(tp, pp, dp)``; what the class has not is refused where it would be needed."""
    from rankmesh.dialects.process_groups import ProcessGroups

    if sizes.cp > 1 or sizes.ep > 1:
        raise Refused(f"received {sizes}; ProcessGroups has the axes tp, pp and dp; leave cp and ep out")
    if sizes.pp > 2:
        raise Refused(
            f"received pp = {sizes.pp}; ProcessGroups has no group of the first and last stage, which is pp itself "
            "up to pp = 2; use another --groups"
        )
    with ProcessGroups(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp) as groups, _single() as single:
        yield Groups(
            tp=groups.tp_group,
            cp=single,
            pp=groups.pp_group,
            ep=single,
            ep_tp=groups.tp_group,
            data=groups.dp_group,
            shards=groups.dp_group,
            expert_shards=groups.dp_group,
            tied=(groups.pp_group,),
            model=(groups.tp_group, groups.pp_group),
            expert_model=(groups.tp_group, groups.pp_group),
            mesh=rm.Mesh(tp=sizes.tp, dp=sizes.dp, pp=sizes.pp, ep=1),
            expert_axes=("ep", "tp"),
            expert_view=None,
            shard_axes=("dp", "dp"),
            replica=groups.dp_rank,
            replicas=groups.dp_size,
        )


@contextmanager
def _single() -> Iterator[ProcessGroup]:
    """The group of an axis that is not there: this rank and nobody else, which costs nothing."""
    mesh = rm.Mesh(itself=1, others=dist.get_world_size())
    with rm.connect(rm.Plan(mesh, [rm.GroupSpec("itself")], name="one rank")) as groups:
        yield groups["itself"].pg
