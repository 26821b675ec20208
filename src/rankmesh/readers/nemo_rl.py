"""NeMo-RL: the policy of a YAML, by the engine that trains it; teachers, critics and generation are not its layout.

```
policy.megatron_cfg      enabled: the layout of Megatron
policy.dtensor_cfg       enabled: shards of data, then cp, then tp, as torchtitan lays them out
cluster                  num_nodes x gpus_per_node ranks, where training and generation share them
```

Source: ``examples/configs`` and ``nemo_rl.models.policy`` of NVIDIA NeMo-RL.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.errors import PlanError
from rankmesh.readers import megatron
from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, add_world, settle

__all__ = ["from_document", "matches"]

_ENGINES = ("megatron_cfg", "dtensor_cfg")
_CLUSTER = (("cluster", "num_nodes"), ("cluster", "gpus_per_node"))
_DTENSOR = Table(
    reads={
        "tensor_parallel_size": Read("tp"),
        "context_parallel_size": Read("cp"),
        "expert_parallel_size": Read("ep"),
        "dp_replicate_size": Read("dp_replicate"),
    },
    refused={
        "data_parallel_size": Refused("it is what the world leaves", (None,)),
    },
    mentioned={"sequence_parallel": "uses the tp groups; it makes none"},
)


def matches(entries: Iterable[Entry]) -> bool:
    """Whether the document has a policy with one of its engines."""
    return any(entry.path[0] == "policy" and entry.path[1:2] and entry.path[1] in _ENGINES for entry in entries)


def from_document(entries: list[Entry], path: str) -> Settled:
    """The arguments of the policy's engine, and the world of its cluster."""
    engines = [name for name in _ENGINES if _value(entries, "policy", name, "enabled") is True]
    if len(engines) != 1:
        enabled = " and ".join(engines) if engines else "neither megatron_cfg nor dtensor_cfg"
        raise PlanError(f"{path}: {enabled} of policy is enabled; enable one of them", path=path)
    settings = [entry for entry in entries if entry.path[:2] == ("policy", engines[0]) and len(entry.path) == 3]
    settled = settle(megatron.TABLE if engines[0] == "megatron_cfg" else _DTENSOR, settings, path)
    sizes = settled.arguments
    if engines[0] == "dtensor_cfg" and sizes.get("ep", 1) > 1 and max(sizes.get("tp", 1), sizes.get("cp", 1)) > 1:
        raise PlanError(
            f"{path}: expert_parallel_size beside tensor or context parallelism is not read here", path=path
        )
    settled.arguments["recipe"] = "megatron" if engines[0] == "megatron_cfg" else "torchtitan"
    if _value(entries, "policy", "generation", "colocated", "enabled") is not False:
        add_world(settled, entries, _CLUSTER, path)
    return settled


def _value(entries: Iterable[Entry], *path: str) -> object:
    return next((entry.value for entry in entries if entry.path == path), None)
