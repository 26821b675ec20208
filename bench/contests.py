"""Contests: the same groups made twice, by rankmesh and by a peer, from the same sizes.

```
all Megatron groups            20 kinds     megatron-core, without its gloo counterparts
5 axes and their data axis      6 kinds     DeviceMesh: pp, dp_replicate, dp_shard, cp, tp, and the flattened data axes
```

Both sides start at the sizes: what rankmesh spends on its plan is in its time. Of the Megatron groups, megatron-core
holds one kind fewer: without several optimizer instances it has no inter_ep_dp, which is a group of one rank then.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bench.processes import Outcome
from bench.results import Comparison, alternate
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.megatron_core import megatron
from rankmesh.core.spec import GroupSpec

__all__ = ["CONTESTS", "MEGATRON", "Contest", "Make", "Sizes", "contested", "load", "megatron_plan", "missing"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a world's axes; what is left is data parallel."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def dp(self) -> int:
        """The data-parallel size."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def replicas(self) -> int:
        """How many replicas a hybrid of sharding and replication has: two where the data axis is even."""
        return 2 if self.dp % 2 == 0 else 1


Make = Callable[[Sizes], list[Any]]


@dataclass(frozen=True)
class Contest:
    """Two ways to the same kinds of group; each gives the process groups of this rank, in one order on all ranks."""

    what: str
    peer: str
    module: str
    plan: Callable[[Sizes], Plan]
    theirs: Make

    def ours(self, sizes: Sizes) -> list[Any]:
        """Return the process groups of the plan, connected."""
        from rankmesh.runtime import connect

        return [group.pg for group in connect(self.plan(sizes)).values()]


def missing(contest: Contest) -> str | None:
    """Return why the peer cannot take part, None if it can."""
    if find_spec(contest.module.split(".")[0]) is None:
        return "not installed"
    try:
        load(contest.module)
    except ImportError as error:
        return f"not importable: {error}"
    return None


def load(module: str) -> Any:
    """Import a peer, whose warnings about what else could be installed are none of our reader's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def contested(
    section: str,
    contest: Contest,
    ranks: int,
    rounds: int,
    run: Callable[[Make], Outcome],
    *,
    note: str = "",
    absent: Callable[[Contest], str | None] = missing,
) -> Comparison:
    """Compare both sides of a contest; ``run`` makes the groups of one of them once."""
    runs = {"ours": lambda: run(contest.ours), "theirs": lambda: run(contest.theirs)}
    return alternate(section, contest.what + note, ranks, contest.peer, runs, rounds, absent(contest))


# -- Megatron -----------------------------------------------------------------------------------------------


def megatron_plan(sizes: Sizes) -> Plan:
    """Return the plan of all Megatron groups."""
    return megatron(sizes.world, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp)


def _their_megatron(sizes: Sizes) -> list[Any]:
    import torch.distributed as dist

    state = load(MEGATRON.module)
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    # They are globals, None or a mark where this rank is not a member.
    return [value for value in vars(state).values() if isinstance(value, dist.ProcessGroup)]


# -- DeviceMesh ---------------------------------------------------------------------------------------------

_DATA = ("dp_replicate", "dp_shard", "cp")


def _device_mesh_plan(sizes: Sizes) -> Plan:
    shards = sizes.dp // sizes.replicas
    mesh = Mesh(tp=sizes.tp, cp=sizes.cp, dp_shard=shards, dp_replicate=sizes.replicas, pp=sizes.pp)
    specs = [GroupSpec(axis) for axis in reversed(mesh.axes)]
    return Plan(mesh, [*specs, GroupSpec("dp_cp", "-".join(reversed(_DATA)))])


def _their_device_mesh(sizes: Sizes) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (sizes.pp, sizes.replicas, sizes.dp // sizes.replicas, sizes.cp, sizes.tp)
    names = ("pp", *_DATA, "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    # Private by its name, and what torchtitan and accelerate call.
    flat = mesh[_DATA]._flatten("dp_cp")
    return [*(mesh.get_group(name) for name in names), flat.get_group()]


# What is made, by whom else, in which module.
MEGATRON = Contest(
    "all Megatron groups", "megatron-core", "megatron.core.parallel_state", megatron_plan, _their_megatron
)
DEVICE_MESH = Contest(
    "5 axes, 1 flattened", "DeviceMesh", "torch.distributed.device_mesh", _device_mesh_plan, _their_device_mesh
)
CONTESTS = (MEGATRON, DEVICE_MESH)
