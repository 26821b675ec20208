"""The life of a parallel state: initialise, change timeouts, destroy. ``names`` are the state's globals.

```
initialize    Request ── plan ── connect ── globals
destroy       close, last made first ── globals as they were before
```
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.backend import torch_private
from rankmesh.dialects.megatron.answers import refresh
from rankmesh.dialects.megatron.buffers import GlobalMemoryBuffer
from rankmesh.dialects.megatron.filling import filled
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import in_a_world
from rankmesh.dialects.megatron.ucc import prepare_environment
from rankmesh.runtime.connect import DEFAULT_TIMEOUT, connect
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World

__all__ = ["destroy", "initialize", "set_timeouts"]


def initialize(names: dict[str, Any], request: Request) -> None:
    """Make the groups that are asked for, and fill the globals; nothing is left of a refused request."""
    state = names["rankmesh_state"]
    if not in_a_world():
        raise NotInitialized(
            "received no initialised torch.distributed world; groups are made inside one; call "
            "torch.distributed.init_process_group() first"
        )
    if state.live is not None or names["_DATA_PARALLEL_GROUP"] is not None:
        raise Refused(
            "received a second initialisation of a parallel state; a state is initialised once; call "
            "destroy_model_parallel() first, or make another ParallelState"
        )
    world = torch_private.default_group()
    all_gloo = world.backend == "gloo" or world.dry
    plan = request.plan(world.size, all_gloo=all_gloo, name=state.plan_name)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        prepare_environment()
    if plan.fixed_world or world.rank in plan.mesh:
        state.live = connect(plan, timeout=min(DEFAULT_TIMEOUT, request.timeout))
    else:  # outside the part of the world that the state is for
        state.live = LiveGroups(plan, World.current(), 0, {})
    state.sharded, state.experts_sharded = request.gtp_remat_size > 1, request.expert_gtp_remat_size > 1
    names.update(filled(state.live, request, all_gloo=all_gloo))
    names["_GLOBAL_MEMORY_BUFFER"] = GlobalMemoryBuffer()
    refresh(names)


def destroy(names: dict[str, Any]) -> None:
    """Destroy the groups of a state, and give its globals the values that they had at first."""
    state = names["rankmesh_state"]
    owned = [*state.added[::-1], *([state.live] if state.live is not None else [])]
    state.live, state.added, state.sharded, state.experts_sharded = None, [], False, False
    names.update({name: _fresh(value) for name, value in state.initial.items() if name in names})
    refresh(names)
    for live in owned:
        live.close()
    _end_symmetric_memory()


def _fresh(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value


def _end_symmetric_memory() -> None:
    """Megatron-Core since 0.17 keeps symmetric memory of its groups elsewhere, and ends it with them."""
    module = sys.modules.get("megatron.core.inference.symmetric_memory")
    manager = getattr(module, "SymmetricMemoryManager", None)
    if manager is not None:
        manager.destroy()


def set_timeouts(timeout: timedelta, groups: Sequence[Any], *, meet_in: Any) -> None:
    """Meet in a group (None: the world), then set the timeout of every group given; None stands for the world."""
    dist.barrier(meet_in)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in groups:
        torch_private.set_timeout(group, timeout)
