"""Configs of nanotron, GPT-NeoX, torchtitan, axolotl and NeMo-RL: the keys of each, and what only each has.

```
nanotron     parallelism: {tp, pp, dp, ...}
gpt_neox     model-parallel-size, pipe-parallel-size      hyphens or underscores
picotron     distributed: {tp_size, cp_size, ...}      a JSON
torchtitan   [parallelism], [training], [experimental]    shards of -1 are what is left of the world
axolotl      sizes beside base_model                      Accelerate's mesh, or expert_parallel_size alone; without
                                                          sizes DeepSpeed's layout, shards of FSDP, or replicas
nemo_rl      policy.megatron_cfg, policy.dtensor_cfg      the layout of Megatron, or of torchtitan
```

Sources: ``nanotron.config.parallelism_config``, ``megatron/neox_arguments`` of GPT-NeoX,
``torchtitan.config.job_config``, ``axolotl.utils.distributed``, and ``nemo_rl.models.policy`` of NVIDIA NeMo-RL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rankmesh.errors import PlanError
from rankmesh.readers import deepspeed, megatron
from rankmesh.readers.documents import entries_of
from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, add_world, refused, settle, unless

__all__ = ["AXOLOTL", "GPT_NEOX", "NANOTRON", "NEMO_RL", "PICOTRON", "TORCHTITAN"]


@dataclass(frozen=True)
class _Framework:
    """A format: whether a document is of it, and how its entries become arguments."""

    matches: Callable[[Iterable[Entry]], bool]
    from_document: Callable[[list[Entry], str], Settled]


def _top(entry: Entry) -> str | None:
    return entry.path[0] if len(entry.path) == 1 else None


# -- nanotron -------------------------------------------------------------------------------------------------------


def _in_parallelism(entry: Entry) -> str | None:
    return ".".join(entry.path[1:]) if entry.path[0] == "parallelism" and len(entry.path) > 1 else None


_NANOTRON = Table(
    reads={
        "tp": Read("tp"),
        "pp": Read("pp"),
        "dp": Read("dp"),
        "context_parallel_size": Read("cp"),
        "cp": Read("cp"),
        "expert_parallel_size": Read("ep"),
    },
    key=_in_parallelism,
    closed=True,
)
NANOTRON = _Framework(
    lambda entries: {"tp", "pp", "dp"} <= {_in_parallelism(entry) for entry in entries},
    lambda entries, path: settle(_NANOTRON, entries, path),
)


# -- picotron -------------------------------------------------------------------------------------------------------


def _in_distributed(entry: Entry) -> str | None:
    return entry.path[1] if entry.path[0] == "distributed" and len(entry.path) == 2 else None


_PICOTRON = Table(
    reads={f"{axis}_size": Read(axis) for axis in ("tp", "cp", "pp", "dp")},
    key=_in_distributed,
    closed=True,
)
PICOTRON = _Framework(
    lambda entries: {"tp_size", "dp_size", "pp_engine"} <= {_in_distributed(entry) for entry in entries},
    lambda entries, path: settle(_PICOTRON, entries, path),
)


# -- GPT-NeoX -------------------------------------------------------------------------------------------------------


def _neox_key(entry: Entry) -> str | None:
    name = _top(entry)
    return name and name.replace("-", "_")


_GPT_NEOX = Table(
    reads={
        "model_parallel_size": Read("tp"),
        # Both 0 and 1 mean no pipeline.
        "pipe_parallel_size": Read("pp", unless(0)),
        "world_size": Read("world_size"),
        "global_num_gpus": Read("world_size"),
    },
    refused={
        "moe_expert_parallel_size": Refused("its expert groups are DeepSpeed's, inside of data parallelism"),
        "context_parallel_size": Refused("its context groups are none of this layout's"),
    },
    harmless=("sequence_parallel",),
    key=_neox_key,
)
GPT_NEOX = _Framework(
    lambda entries: any(_neox_key(entry) in ("model_parallel_size", "pipe_parallel_size") for entry in entries),
    lambda entries, path: settle(_GPT_NEOX, entries, path),
)


# -- torchtitan -----------------------------------------------------------------------------------------------------


def _titan_key(entry: Entry) -> str | None:
    if entry.path == ("fault_tolerance", "enable"):
        return entry.key
    section, *names = entry.path
    section = section.removeprefix("--")
    if section not in ("parallelism", "training", "experimental") or len(names) != 1:
        return None
    return names[0] if section == "parallelism" or re.search("parallel", names[0]) else None


_TORCHTITAN = Table(
    reads={
        "data_parallel_replicate_degree": Read("dp_replicate"),
        "data_parallel_shard_degree": Read("dp_shard", unless(-1)),
        "context_parallel_degree": Read("cp"),
        "tensor_parallel_degree": Read("tp"),
        "pipeline_parallel_degree": Read("pp"),
        "expert_parallel_degree": Read("ep"),
        "expert_tensor_parallel_degree": Read("etp"),
    },
    refused={
        "fault_tolerance.enable": Refused("replica groups then come and go, so the world has no fixed layout"),
        "expert_parallel_mode": Refused("modes of expert parallelism lay experts out in their own ways", ("none",)),
    },
    harmless=(
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_microbatch_size",
        "num_pp_microbatches",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
    ),
    key=_titan_key,
    closed=True,
)


def _from_titan(entries: list[Entry], path: str) -> Settled:
    settled = settle(_TORCHTITAN, entries, path)
    for entry in entries:
        if _titan_key(entry) == "data_parallel_shard_degree" and entry.value == -1:
            settled.notes.append((entry.line, f"{entry} is inferred from the world"))
    return settled


TORCHTITAN = _Framework(lambda entries: any(_titan_key(entry) in _TORCHTITAN.reads for entry in entries), _from_titan)


# -- axolotl --------------------------------------------------------------------------------------------------------

_SHARDED = ("fsdp", "fsdp_config", "fsdp_version")

_AXOLOTL = Table(
    reads={
        "dp_replicate_size": Read("dp_replicate"),
        "dp_shard_size": Read("dp_shard"),
        "context_parallel_size": Read("cp"),
        "sequence_parallel_degree": Read("cp"),
        "tensor_parallel_size": Read("tp"),
        "expert_parallel_size": Read("ep"),
    },
    key=_top,
)


def _is_axolotl(entries: Iterable[Entry]) -> bool:
    """Return whether a document has the model and the data as only axolotl names them, or a size instead of data."""
    top = {entry.path[0] for entry in entries}
    sized = not top.isdisjoint(_AXOLOTL.reads) and "micro_batch_size" in top
    data = not top.isdisjoint({"datasets", "pretraining_dataset", "rl"})
    return not top.isdisjoint({"base_model", "base_model_config"}) and (sized or data)


def _from_axolotl(entries: list[Entry], path: str) -> Settled:
    """Settle the sizes above 1: the mesh has no axis for a size of 1. Without one, all ranks are data parallel."""
    settled = settle(_AXOLOTL, entries, path)
    sizes = {name: size for name, size in settled.arguments.items() if size > 1}
    if not sizes:
        return _without_sizes(settled, entries, path)
    if "ep" in sizes and len(sizes) > 1:
        entry = next(entry for entry in entries if _top(entry) == "expert_parallel_size")
        raise refused(path, entry, "no recipe has an expert axis beside these sizes", "describe it with axes")
    settled.arguments.clear()
    settled.arguments.update(sizes, recipe="experts" if "ep" in sizes else "axolotl")
    return settled


def _without_sizes(settled: Settled, entries: list[Entry], path: str) -> Settled:
    """Settle the layout of DeepSpeed's file or section, FSDP's shards over all ranks, or replicas."""
    named = [entry for entry in entries if entry.path[0] == "deepspeed" and entry.value]
    if named:
        of_file = [entry for entry in named if len(entry.path) == 1]
        section = [replace(entry, path=entry.path[1:]) for entry in named if len(entry.path) > 1]
        found = deepspeed.from_document(entries_of(of_file[0], path) if of_file else section, path)
        found.arguments["recipe"] = "deepspeed"
    else:
        named = [entry for entry in entries if entry.path[0] in _SHARDED and entry.value]
        found = Settled(settled.arguments, settled.readings, settled.notes, settled.table)
        found.arguments.clear()
        strategy = next((entry for entry in named if entry.name.endswith("sharding_strategy")), None)
        if strategy is not None and str(strategy.value).startswith("HYBRID"):
            rule = "a hybrid strategy shards inside a machine, and the file does not say how many ranks one has"
            raise refused(path, strategy, rule, "add dp_shard_size")
        whole = named and (strategy is None or strategy.value != "NO_SHARD")
        found.arguments["recipe"] = "axolotl" if whole else "replicas"
    line = named[0].line if named else 0
    what = f"{named[0].path[0]}, and no size above 1" if named else "neither DeepSpeed, FSDP nor a size above 1"
    found.notes.append((line, f"{what}: all ranks are data parallel"))
    return found


AXOLOTL = _Framework(_is_axolotl, _from_axolotl)


# -- NeMo-RL --------------------------------------------------------------------------------------------------------

_ENGINES = ("megatron_cfg", "dtensor_cfg")
_CLUSTER = (("cluster", "num_nodes"), ("cluster", "gpus_per_node"))
_DTENSOR = Table(
    reads={
        "tensor_parallel_size": Read("tp"),
        "context_parallel_size": Read("cp"),
        "expert_parallel_size": Read("ep"),
        "dp_replicate_size": Read("dp_replicate"),
    },
    refused={"data_parallel_size": Refused("it is what the world leaves", (None,))},
    harmless=("sequence_parallel",),
)


def _from_nemo_rl(entries: list[Entry], path: str) -> Settled:
    """Settle the arguments of the policy's engine, and the world of its cluster."""

    def value(*keys: str) -> object:
        return next((entry.value for entry in entries if entry.path == keys), None)

    engines = [name for name in _ENGINES if value("policy", name, "enabled") is True]
    if len(engines) != 1:
        enabled = " and ".join(engines) if engines else "neither megatron_cfg nor dtensor_cfg"
        raise PlanError(f"{path}: {enabled} of policy is enabled; enable one of them", path=path)
    is_megatron = engines == ["megatron_cfg"]
    settings = [entry for entry in entries if entry.path[:2] == ("policy", engines[0]) and len(entry.path) == 3]
    settled = settle(megatron.TABLE if is_megatron else _DTENSOR, settings, path)
    sizes = settled.arguments
    if not is_megatron and sizes.get("ep", 1) > 1 and max(sizes.get("tp", 1), sizes.get("cp", 1)) > 1:
        raise PlanError(
            f"{path}: expert_parallel_size beside tensor or context parallelism is not read here", path=path
        )
    sizes["recipe"] = "megatron" if is_megatron else "torchtitan"
    if value("policy", "generation", "colocated", "enabled") is not False:
        add_world(settled, entries, _CLUSTER, path)
    return settled


NEMO_RL = _Framework(
    lambda entries: any(entry.path[:2] in [("policy", name) for name in _ENGINES] for entry in entries),
    _from_nemo_rl,
)
