"""What an optimizer, or DistributedDataParallel, needs of process groups: a collection's, or the parallel state's.

```
given             dp, dp_cp, expt_dp, ... of a collection; dp_cp is dp without context parallelism
not given         those of the followed parallel state, each of which must be there
one instance      intra_dp_cp is dp_cp, intra_expt_dp is expt_dp, and there is nothing between instances
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rankmesh.backend.single_rank import single_rank_group
from rankmesh.dialects.megatron.releases import followed_state
from rankmesh.dialects.megatron.table import BY_KIND
from rankmesh.errors import PlanError

__all__ = ["for_ddp", "for_optimizer", "in_pieces", "of_state"]

logger = logging.getLogger(__name__)

# The kinds of a parallel state whose names differ from those of the fields.
_KINDS = {
    "expt_tp": "ep_tp",
    "tp_ep": "tp_ep_mp",
    "expt_dp": "ep_dp",
    "intra_expt_dp": "intra_ep_dp",
    "inter_dist_opt": "inter_ep_dp",
    "intra_dist_opt": "intra_dist_opt_instance",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp_gtp",
    "dp_cp_gtp_remat": "dp_cp",
    "expt_dp_gtp_remat": "ep_dp",
}
# Fields with the ranks that hold other pieces of each weight; those of groups that every state has.
_WHOLE = ("dp_cp_gtp_remat", "expt_dp_gtp_remat")
_ALWAYS = ("dp", "dp_cp", "intra_dp_cp", "dp_cp_gtp_remat")


@dataclass(frozen=True)
class _Groups:
    """The groups by a collection's names: those of a collection, or without one those of the parallel state."""

    collection: Any

    def has(self, name: str) -> bool:
        """Return whether there is a group to ask for; None counts where a collection was given it."""
        given = self.collection
        return given is None or name in vars(given) or getattr(given, name, None) is not None

    def __getitem__(self, name: str) -> Any:
        """Return a group, which must be there."""
        if self.collection is None:
            return of_state(followed_state(), name, check=True)
        if not self.has(name):
            raise _missing(f"the pg_collection has no {name} process group", f"{name} or to None if it is not needed")
        return getattr(self.collection, name)

    def get(self, name: str) -> Any:
        """Return a group, None where there is none."""
        return of_state(followed_state(), name) if self.collection is None else getattr(self.collection, name, None)

    def over_data(
        self, instances: int, config: Callable[[], Any], experts: Any, also: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the groups over which gradients are reduced, and between optimizer instances.

        Without context parallelism dp is dp_cp, and one instance is the whole: a collection may leave these out.
        """
        dp = self["dp"]
        if not self.has("dp_cp") and getattr(config(), "context_parallel_size", 1) > 1:
            raise _missing("the pg_collection has no dp_cp process group, and context_parallel_size > 1", "dp_cp")
        dp_cp = self["dp_cp"] if self.has("dp_cp") else dp
        found = {"dp": dp, "dp_cp": dp_cp, "expt_dp": experts, "inter_dist_opt": None}
        if instances == 1 and self.collection is not None:
            return found | {"intra_dp_cp": dp_cp, "intra_expt_dp": experts}
        needed = ("intra_dp_cp", "intra_expt_dp", *(("inter_dist_opt",) if instances > 1 else ()))
        if not all(map(self.has, (*needed, *also))):
            named = ", ".join((*needed, *also))
            raise _missing(f"{instances} optimizer instances need all of the process groups {named}", named)
        return found | {name: self[name] for name in needed}

    def in_pieces(self) -> dict[str, Any]:
        """Return the ranks that hold the pieces of a weight, where the followed release has these parameters."""
        if not followed_state().rankmesh_state.has_pieces:
            return {}
        return {f"{name}_group": self.get(name) for name in ("gtp_remat", "expt_gtp_remat")}


def of_state(state: ModuleType, name: str, check: bool = False) -> Any:
    """Return one field of a collection from a parallel state; None where it has no such group, unless checked."""
    kind = _KINDS.get(name, name)
    if kind not in BY_KIND:
        return None
    return state.rankmesh_state.given(kind, check or name in _ALWAYS, whole=name in _WHOLE)


def in_pieces(groups: Mapping[str, Any]) -> bool:
    """Return whether several ranks hold the pieces of a weight, dense or expert, by an optimizer's parameter names."""
    pieces = (groups.get("gtp_remat_group"), groups.get("expt_gtp_remat_group"))
    return any(group is not None and group.size() > 1 for group in pieces)


def for_optimizer(pg_collection: Any, model_chunks: list[Any], use_gloo_process_groups: bool) -> dict[str, Any]:
    """Return the groups of an optimizer by its parameter names, those that the followed release has."""
    settings, state = getattr(model_chunks[0], "ddp_config", None), followed_state().rankmesh_state
    instances = 1 if settings is None else settings.num_distributed_optimizer_instances
    sharded = settings is not None and settings.use_distributed_optimizer
    if pg_collection is not None and use_gloo_process_groups:
        raise PlanError("a pg_collection has no gloo process groups for use_gloo_process_groups; leave it False")
    groups = _Groups(pg_collection)
    named = groups.over_data(instances, lambda: _config_of(model_chunks[0]), groups["expt_dp"], ("intra_dist_opt",))
    named["intra_dist_opt"] = groups["intra_dist_opt"] if sharded or pg_collection is None else None
    named |= {"mp": groups["mp"], "expt_tp_pp": groups["tp_ep_pp"]}
    found = {f"{name}_group": group for name, group in named.items()} | groups.in_pieces()
    if state.has_pieces:
        whole = "tp_ep_pp_with_egtp_remat"
        found["expt_tp_pp_with_egtp_remat_group"] = groups[whole if groups.has(whole) else "tp_ep_pp"]
    gloo = {"intra_dp_cp_group_gloo": None, "intra_expt_dp_group_gloo": None}
    if pg_collection is None and use_gloo_process_groups and not in_pieces(found):
        gloo["intra_dp_cp_group_gloo"] = state.given("intra_dp_cp_gloo")
        gloo["intra_expt_dp_group_gloo"] = state.given("intra_ep_dp_gloo")
    return found | gloo


def for_ddp(pg_collection: Any, config: Any, ddp_config: Any) -> dict[str, Any]:
    """Return the groups of DistributedDataParallel by its parameter names, those that the followed release has."""
    groups, instances = _Groups(pg_collection), ddp_config.num_distributed_optimizer_instances
    experts = groups["expt_dp"] if groups.has("expt_dp") else None
    named = groups.over_data(instances, lambda: config, _only_this_rank() if experts is None else experts, ())
    named |= {name: groups[name] for name in ("tp", "pp", "ep")}
    if pg_collection is None:
        named["intra_dist_opt"] = groups["intra_dist_opt"] if ddp_config.use_distributed_optimizer else None
    return {f"{name}_group": group for name, group in named.items()} | groups.in_pieces()


def _missing(problem: str, remedy: str) -> PlanError:
    return PlanError(f"{problem}; every group that is used is required; set {remedy}")


def _config_of(model: Any) -> Any:
    """Return the configuration of a model under its wrappers."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", None)


def _only_this_rank() -> ProcessGroup:
    if dist.get_rank() == 0:
        logger.warning("pg_collection has no expt_dp group: expert data parallelism has one rank")
    name = f"expt_dp/single/{uuid4()}"
    return single_rank_group(rank=dist.get_rank(), name=name, desc="expt_dp of one rank", backend=dist.get_backend())
