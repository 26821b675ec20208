"""Search: sizes and orders of a layout for a world, a cluster and a model, by the predicted time of a step.

```
step = compute · (1 + bubble) + communication          compute = 6 · active parameters · tokens / (devices · speed)
bubble = (pp − 1) / (chunks · microbatches)            communication: the placement that costs least, nothing overlaps

memory of a device, at most
weights, gradients, optimizer   p (parameter + gradient) + 12 p / replicas     all-reduce: 12 p; fsdp: p / replicas
activations                     T · hidden · (10 + 24 / tp) · L · microbatches in flight      sequence parallel: 34 / tp
logits, on the last stage       3 · T · vocabulary / tp · scalar
```

Activations are those of Korthikanti et al. 2022 with attention that is not kept. A prediction ranks layouts; it is no
measurement, and the bound on memory knows neither fragmentation nor libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankmesh.core import recipes
from rankmesh.core.plan import Plan
from rankmesh.errors import PlacementError
from rankmesh.placement.cluster import Cluster
from rankmesh.placement.model import Training, Transformer
from rankmesh.placement.place import place
from rankmesh.placement.steps import Roles, parameters, step_traffic

__all__ = ["Found", "memory", "search"]

# FLOP/s that a device does in training, and its memory: an H100 at 40 % of its dense bfloat16.
SPEED, MEMORY = 400e12, 80e9


@dataclass(frozen=True)
class Found:
    """One layout: its sizes and order, seconds of a step and of its parts, bytes of memory at most."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    order: str
    step: float
    compute: float
    bubble: float
    communication: float
    memory: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def search(
    world_size: int,
    cluster: Cluster,
    model: Transformer,
    training: Training,
    *,
    top: int = 20,
    speed: float = SPEED,
    capacity: float = MEMORY,
    backend: str = "nccl",
) -> tuple[Found, ...]:
    """The ``top`` best layouts that fit into ``capacity`` bytes a device, quickest first, predicted and not measured.

    ``tp`` stays inside hosts. Raises ``PlacementError`` where none fits, with the least memory that one needs.
    """
    tight, found = [], []
    for plan in _plans(world_size, cluster, model, training):
        need = memory(plan, model, training)
        if need > capacity:
            tight.append(need)
            continue
        found.append(_found(plan, cluster, model, training, speed, need, backend))
    if not found:
        raise _none(world_size, model, training, tight, capacity)
    return tuple(sorted(found, key=lambda each: each.step)[:top])


def _none(
    world_size: int, model: Transformer, training: Training, tight: list[float], capacity: float
) -> PlacementError:
    """Why there is no layout: none fits into the memory, or no sizes divide what they cut."""
    if not tight:
        return PlacementError(
            f"no sizes fit {world_size} ranks: tp divides {model.heads} heads and a host, pp {model.layers} layers, cp "
            f"the sequence {training.sequence}, and dp microbatches of {training.microbatch} the batch "
            f"{training.batch}; change the batch to a multiple of {world_size}, or the number of ranks",
            world_size=world_size,
            least=None,
        )
    return PlacementError(
        f"no layout of the model on {world_size} ranks fits into {capacity / 1e9:.0f} GB a device; the least that one "
        f"needs is {min(tight) / 1e9:.0f} GB a device; take more ranks, a smaller batch, or devices with more memory",
        world_size=world_size,
        least=min(tight),
    )


def _plans(world: int, cluster: Cluster, model: Transformer, training: Training) -> Iterator[Plan]:
    """Every layout whose sizes divide what they cut."""
    widest = max(host.devices for host in cluster.hosts)
    for tp in _divisors(model.heads, widest):
        for pp in _divisors(model.layers, world):
            for cp in _divisors(training.sequence, min(world, 64)):
                if world % (tp * pp * cp):
                    continue
                dp = world // (tp * pp * cp)
                if training.batch % (dp * training.microbatch) or training.batch // (dp * training.microbatch) < 1:
                    continue
                for ep in _divisors(model.experts, dp * cp) if model.experts else (1,):
                    if ep == 1 or tp * dp * cp % ep == 0:
                        etp = 1 if ep > 1 else None
                        yield recipes.megatron(world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def memory(plan: Plan, model: Transformer, training: Training) -> float:
    """Bytes that a device of the fullest stage holds at most; see the table above."""
    roles = Roles.of(plan)
    stages = roles.sizes["pp"]
    return max(_stage_memory(roles, model, training, stage) for stage in {0, stages // 2, stages - 1})


def _stage_memory(roles: Roles, model: Transformer, training: Training, stage: int) -> float:
    dense, experts = parameters(model, roles, stage)
    sharded = 1 if training.data == "all-reduce" else 0
    kept = 0.0
    for count, role in ((dense, "shards"), (experts, "expert_shards")):
        ranks = 1 if sharded else roles.sizes[role]
        whole = count * (training.parameter + training.gradient) / (ranks if training.data == "fsdp" else 1)
        kept += whole + 12 * count / ranks
    stages = roles.sizes["pp"]
    flying = min(training.microbatches(roles.replicas), stages - stage)
    tokens = training.microbatch * training.sequence / roles.sizes["cp"]
    tp = roles.sizes["tp"]
    layer = tokens * model.hidden * (34 / tp if training.sequence_parallel else 10 + 24 / tp)
    logits = 3 * tokens * model.vocabulary / tp * training.scalar if stage == stages - 1 else 0.0
    return kept + layer * model.layers / stages * max(1.0, flying) + logits


def _found(
    plan: Plan, cluster: Cluster, model: Transformer, training: Training, speed: float, need: float, backend: str
) -> Found:
    roles, sizes = Roles.of(plan), plan.mesh.axes
    training = replace(training, sequence_parallel=training.sequence_parallel and sizes["tp"] > 1)
    placed = place(plan, cluster, traffic=step_traffic(plan, model, training), backend=backend, exact=False)
    compute = 6 * model.active * training.batch * training.sequence / (plan.mesh.size * speed)
    bubble = compute * (sizes["pp"] - 1) / (training.chunks * training.microbatches(roles.replicas))
    return Found(
        tp=sizes["tp"],
        cp=sizes["cp"],
        pp=sizes["pp"],
        dp=sizes["dp"],
        ep=roles.sizes["ep"],
        order=placed.order,
        step=compute + bubble + placed.cost,
        compute=compute,
        bubble=bubble,
        communication=placed.cost,
        memory=need,
    )
