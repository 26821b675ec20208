"""What an optimizer, or DistributedDataParallel, needs of process groups: a collection's, or the parallel state's.

```
given             dp, dp_cp, expt_dp, ... of a collection; dp_cp is dp without context parallelism
not given         the getters of the default parallel state, each of which must have its group
one instance      intra_dp_cp is dp_cp, intra_expt_dp is expt_dp, and there is nothing between instances
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rankmesh.backend.single_rank import single_rank_group
from rankmesh.dialects.megatron.releases import Release, followed
from rankmesh.errors import PlanError

__all__ = ["for_ddp", "for_optimizer", "in_pieces", "of_state"]

logger = logging.getLogger(__name__)

_WITH_CP = {"with_context_parallel": True}
_REPLICAS = {"with_gtp_remat": False}

# Field, getter of the parallel state, its flags. Getters that check are called without: what is absent is None.
_GETTERS: Mapping[str, tuple[str, dict[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "mp": ("get_model_parallel_group", {}),
    "embd": ("get_embedding_group", {}),
    "pos_embd": ("get_position_embedding_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "hcp": ("get_hierarchical_context_parallel_groups", {}),
    "ep": ("get_expert_model_parallel_group", {}),
    "expt_tp": ("get_expert_tensor_parallel_group", {}),
    "tp_ep": ("get_expert_tensor_and_model_parallel_group", {}),
    "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", _WITH_CP),
    "dp": ("get_data_parallel_group", _REPLICAS),
    "dp_cp": ("get_data_parallel_group", {**_WITH_CP, **_REPLICAS}),
    "expt_dp": ("get_expert_data_parallel_group", _REPLICAS),
    "intra_dp_cp": ("get_data_parallel_group", {**_WITH_CP, **_REPLICAS, "partial_data_parallel": True}),
    "intra_expt_dp": ("get_expert_data_parallel_group", {**_REPLICAS, "partial_expert_data_parallel": True}),
    "inter_dist_opt": ("get_inter_distributed_optimizer_instance_group", {}),
    "intra_dist_opt": ("get_intra_distributed_optimizer_instance_group", {}),
    "gtp_remat": ("get_gtp_weight_remat_group", {}),
    "expt_gtp_remat": ("get_expert_gtp_weight_remat_group", {}),
    "dp_cp_gtp_remat": ("get_data_parallel_group", _WITH_CP),
    "expt_dp_gtp_remat": ("get_expert_data_parallel_group", {}),
    "tp_ep_pp_with_egtp_remat": ("get_expert_tensor_model_pipeline_parallel_group", {"with_egtp_remat": True}),
}


# What gradients are reduced over, with and without one optimizer instance.
_DATA = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
# Which release brought the fields of weights in pieces.
_PIECES = (0, 19)


def of_state(state: ModuleType, name: str, release: Release | None = None) -> Any:
    """One field of a collection from a parallel state; None where it has no such group."""
    if name == "dp_cp_ag" and release is None:
        return vars(state)["_DATA_PARALLEL_GROUP_WITH_CP_AG"]
    if name not in _GETTERS:
        return None
    getter, flags = _GETTERS[name]
    checks = {} if getter == "get_data_parallel_group" else {"check_initialized": False}
    return getattr(state, getter)(**checks, **flags)


def in_pieces(groups: Mapping[str, Any]) -> bool:
    """Whether several ranks hold the pieces of a weight, dense or expert, by the names of an optimizer's parameters."""
    pieces = (groups.get("gtp_remat_group"), groups.get("expt_gtp_remat_group"))
    return any(group is not None and group.size() > 1 for group in pieces)


def for_optimizer(
    pg_collection: Any, model_chunks: list[Any], use_gloo_process_groups: bool, release: Release | None = None
) -> dict[str, Any]:
    """The groups of an optimizer by its parameter names, those that a release has."""
    settings = getattr(model_chunks[0], "ddp_config", None)
    instances = 1 if settings is None else settings.num_distributed_optimizer_instances
    if pg_collection is None:
        groups = _strict(instances, every=("mp", "tp_ep_pp", "intra_dist_opt"))
    else:
        groups = _given_for_optimizer(pg_collection, model_chunks[0], settings, instances)
        if use_gloo_process_groups:
            raise PlanError("a pg_collection has no gloo process groups for use_gloo_process_groups; leave it False")
    found = {f"{name}_group": groups[name] for name in (*_DATA, "mp", "inter_dist_opt", "intra_dist_opt")}
    found |= {"expt_tp_pp_group": groups["tp_ep_pp"], **_pieces(pg_collection, release)}
    if release is not None and release >= _PIECES:
        found["expt_tp_pp_with_egtp_remat_group"] = _with_pieces(pg_collection, groups["tp_ep_pp"])
    gloo = {"intra_dp_cp_group_gloo": None, "intra_expt_dp_group_gloo": None}
    if pg_collection is None and use_gloo_process_groups and not in_pieces(found):
        data = {"with_context_parallel": True, "partial_data_parallel": True}
        experts = {"partial_expert_data_parallel": True}
        gloo["intra_dp_cp_group_gloo"] = followed.state.get_data_parallel_group_gloo(**data)
        gloo["intra_expt_dp_group_gloo"] = followed.state.get_expert_data_parallel_group_gloo(**experts)
    return found | gloo


def for_ddp(pg_collection: Any, config: Any, ddp_config: Any, release: Release | None = None) -> dict[str, Any]:
    """The groups of DistributedDataParallel by its parameter names, those that a release has."""
    instances = ddp_config.num_distributed_optimizer_instances
    if pg_collection is None:
        every = ("tp", "pp", "ep", *(("intra_dist_opt",) if ddp_config.use_distributed_optimizer else ()))
        groups = {"intra_dist_opt": None, **_strict(instances, every=every)}
        names = (*_DATA, "tp", "pp", "ep", "inter_dist_opt", "intra_dist_opt")
        named = {f"{name}_group": groups[name] for name in names}
        return named | _pieces(None, release)
    groups = _data_groups(pg_collection, lambda: config)
    expert = getattr(pg_collection, "expt_dp", None)
    groups["expt_dp"] = _only_this_rank() if expert is None else expert
    groups.update(_instance_groups(pg_collection, groups, instances, ()))
    groups.update({name: _required(pg_collection, name, None) for name in ("tp", "pp", "ep")})
    return {f"{name}_group": group for name, group in groups.items()} | _pieces(pg_collection, release)


def _pieces(given: Any, release: Release | None) -> dict[str, Any]:
    """The ranks that hold the pieces of a weight, where a release asks for them: a collection's, or the state's."""
    if release is None or release < _PIECES:
        return {}
    asked = {"gtp_remat_group": "gtp_remat", "expt_gtp_remat_group": "expt_gtp_remat"}
    if given is not None:
        return {parameter: getattr(given, name, None) for parameter, name in asked.items()}
    return {parameter: of_state(followed.state, name) for parameter, name in asked.items()}


def _with_pieces(given: Any, without: Any) -> Any:
    """One model's experts with the ranks that hold other pieces of their weights; a collection may do without."""
    name = "tp_ep_pp_with_egtp_remat"
    if given is not None:
        return getattr(given, name) if _has(given, name) else without
    return _asked(name)


def _has(given: Any, name: str) -> bool:
    """Whether a collection carries a group; None counts where it was set."""
    return name in vars(given) or getattr(given, name, None) is not None


# -- what the parallel state has ------------------------------------------------------------------------------------


def _strict(instances: int, every: Iterable[str]) -> dict[str, Any]:
    """Groups of the default parallel state, each of which must be there."""
    groups = {name: _asked(name) for name in (*_DATA, *every)}
    return groups | {"inter_dist_opt": _asked("inter_dist_opt") if instances > 1 else None}


def _asked(name: str) -> Any:
    getter, flags = _GETTERS[name]
    return getattr(followed.state, getter)(**flags)


# -- what a collection has ------------------------------------------------------------------------------------------


def _given_for_optimizer(given: Any, model: Any, settings: Any, instances: int) -> dict[str, Any]:
    groups = _data_groups(given, lambda: _config_of(model))
    groups["expt_dp"] = _required(given, "expt_dp")
    groups.update(_instance_groups(given, groups, instances, ("intra_dist_opt",)))
    sharded = settings is not None and settings.use_distributed_optimizer
    groups["intra_dist_opt"] = _required(given, "intra_dist_opt") if sharded else None
    return groups | {name: _required(given, name) for name in ("mp", "tp_ep_pp")}


def _data_groups(given: Any, config: Callable[[], Any]) -> dict[str, Any]:
    """dp, and dp_cp, which is dp without context parallelism."""
    dp = _required(given, "dp", None)
    if _has(given, "dp_cp"):
        return {"dp": dp, "dp_cp": given.dp_cp}
    if getattr(config(), "context_parallel_size", 1) > 1:
        raise _missing("the pg_collection has no dp_cp process group, and context_parallel_size > 1", "dp_cp")
    return {"dp": dp, "dp_cp": dp}


def _instance_groups(given: Any, groups: Mapping[str, Any], instances: int, also: tuple[str, ...]) -> dict[str, Any]:
    """The groups inside and between optimizer instances; with one instance they are the whole groups, and none."""
    if instances == 1:
        return {"intra_dp_cp": groups["dp_cp"], "intra_expt_dp": groups["expt_dp"], "inter_dist_opt": None}
    wanted = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt")
    if not all(_has(given, name) for name in (*wanted, *also)):
        named = ", ".join((*wanted, *also))
        raise _missing(f"{instances} optimizer instances need all of the process groups {named}", named)
    return {name: getattr(given, name) for name in wanted}


def _required(given: Any, name: str, remedy: str | None = "or to None if it is not needed") -> Any:
    if not _has(given, name):
        raise _missing(f"the pg_collection has no {name} process group", f"{name} {remedy or ''}".strip())
    return getattr(given, name)


def _missing(problem: str, remedy: str) -> PlanError:
    return PlanError(f"{problem}; every group that is used is required; set {remedy}")


def _config_of(model: Any) -> Any:
    """The configuration of a model under its wrappers."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", None)


def _only_this_rank() -> ProcessGroup:
    if dist.get_rank() == 0:
        logger.warning("pg_collection has no expt_dp group: expert data parallelism has one rank")
    name = f"expt_dp/single/{uuid4()}"
    return single_rank_group(rank=dist.get_rank(), name=name, desc="expt_dp of one rank", backend=dist.get_backend())
