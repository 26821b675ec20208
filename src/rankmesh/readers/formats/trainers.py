"""Configs of nanotron, picotron, GPT-NeoX, axolotl and NeMo-RL: the keys of each, and what only each has.

```
nanotron     parallelism: {tp, pp, dp, ...}
gpt_neox     model-parallel-size, pipe-parallel-size      hyphens or underscores
picotron     distributed: {tp_size, cp_size, ...}      a JSON
axolotl      sizes beside base_model                      Accelerate's mesh, or expert_parallel_size alone; without
                                                          sizes DeepSpeed's layout, shards of FSDP, or replicas
nemo_rl      policy.megatron_cfg, policy.dtensor_cfg      the layout of Megatron, or of torchtitan
```

Sources: ``nanotron.config.parallelism_config``, ``megatron/neox_arguments`` of GPT-NeoX,
``axolotl.utils.distributed``, and ``nemo_rl.models.policy`` of NVIDIA NeMo-RL.
"""

from __future__ import annotations

from dataclasses import replace

from rankmesh.errors import PlanError
from rankmesh.readers.documents import options_of
from rankmesh.readers.formats import deepspeed, megatron
from rankmesh.readers.options import Option, Options, refused
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, add_world, settle, unless

__all__ = ["AXOLOTL", "GPT_NEOX", "NANOTRON", "NEMO_RL", "PICOTRON"]


def _top(option: Option) -> str | None:
    return option.path[0] if len(option.path) == 1 else None


def _closed(title: str, marks: set[str], table: Table) -> Format:
    """Return a format that has one section with these keys."""
    return Format(
        lambda options: marks <= {table.key(option) for option in options.flags},
        lambda options: settle(table, options.flags, options.path),
        title,
    )


NANOTRON = _closed(
    "a nanotron config",
    {"tp", "pp", "dp"},
    Table(
        {axis: Read(axis) for axis in ("tp", "pp", "dp")}
        | {"context_parallel_size": Read("cp"), "cp": Read("cp"), "expert_parallel_size": Read("ep")},
        key=lambda option: (".".join(option.path[1:]) or None) if option.path[0] == "parallelism" else None,
        closed=True,
    ),
)
PICOTRON = _closed(
    "a picotron config",
    {"tp_size", "dp_size", "pp_engine"},
    Table(
        {f"{axis}_size": Read(axis) for axis in ("tp", "cp", "pp", "dp")},
        key=lambda option: option.path[1] if option.path[0] == "distributed" and len(option.path) == 2 else None,
        closed=True,
    ),
)


# -- GPT-NeoX -------------------------------------------------------------------------------------------------------


def _neox_key(option: Option) -> str | None:
    name = _top(option)
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
GPT_NEOX = Format(
    lambda options: any(_neox_key(each) in ("model_parallel_size", "pipe_parallel_size") for each in options.flags),
    lambda options: settle(_GPT_NEOX, options.flags, options.path),
    "a GPT-NeoX config",
)


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


def _is_axolotl(options: Options) -> bool:
    """Return whether a document has the model and the data as only axolotl names them, or a size instead of data."""
    top = {option.path[0] for option in options.flags}
    sized = not top.isdisjoint(_AXOLOTL.reads) and "micro_batch_size" in top
    data = not top.isdisjoint({"datasets", "pretraining_dataset", "rl"})
    return not top.isdisjoint({"base_model", "base_model_config"}) and (sized or data)


def _from_axolotl(options: Options) -> Settled:
    """Settle the sizes above 1: the mesh has no axis for a size of 1. Without one, all ranks are data parallel."""
    settled = settle(_AXOLOTL, options.flags, options.path)
    sizes = {name: size for name, size in settled.arguments.items() if size > 1}
    if not sizes:
        return _without_sizes(settled, options)
    if "ep" in sizes and len(sizes) > 1:
        option = next(option for option in options.flags if _top(option) == "expert_parallel_size")
        raise refused(options.path, option, "no recipe has an expert axis beside these sizes", "describe it with axes")
    settled.arguments.clear()
    settled.arguments.update(sizes, recipe="experts" if "ep" in sizes else "axolotl")
    return settled


def _without_sizes(settled: Settled, options: Options) -> Settled:
    """Settle the layout of DeepSpeed's file or section, FSDP's shards over all ranks, or replicas."""
    named = [option for option in options.flags if option.path[0] == "deepspeed" and option.value]
    if named:
        of_file = [option for option in named if len(option.path) == 1]
        section = [replace(option, path=option.path[1:]) for option in named if len(option.path) > 1]
        found = deepspeed.settled(options_of(of_file[0], options.path) if of_file else section, options.path)
        found.arguments["recipe"] = "deepspeed"
    else:
        named = [option for option in options.flags if option.path[0] in _SHARDED and option.value]
        found = Settled(settled.arguments, settled.readings, settled.notes, settled.table)
        found.arguments.clear()
        strategy = next((option for option in named if option.name.endswith("sharding_strategy")), None)
        if strategy is not None and str(strategy.value).startswith("HYBRID"):
            rule = "a hybrid strategy shards inside a machine, and the file does not say how many ranks one has"
            raise refused(options.path, strategy, rule, "add dp_shard_size")
        whole = named and (strategy is None or strategy.value != "NO_SHARD")
        found.arguments["recipe"] = "axolotl" if whole else "replicas"
    line = named[0].line if named else 0
    what = f"{named[0].path[0]}, and no size above 1" if named else "neither DeepSpeed, FSDP nor a size above 1"
    found.notes.append((line, f"{what}: all ranks are data parallel"))
    return found


AXOLOTL = Format(_is_axolotl, _from_axolotl, "an axolotl config")


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


def _from_nemo_rl(options: Options) -> Settled:
    """Settle the arguments of the policy's engine, and the world of its cluster."""
    path = options.path

    def value(*keys: str) -> object:
        return next((option.value for option in options.flags if option.path == keys), None)

    engines = [name for name in _ENGINES if value("policy", name, "enabled") is True]
    if len(engines) != 1:
        enabled = " and ".join(engines) if engines else "neither megatron_cfg nor dtensor_cfg"
        raise PlanError(f"{path}: {enabled} of policy is enabled; enable one of them", path=path)
    is_megatron = engines == ["megatron_cfg"]
    settings = [
        option for option in options.flags if option.path[:2] == ("policy", engines[0]) and len(option.path) == 3
    ]
    settled = settle(megatron.TABLE if is_megatron else _DTENSOR, settings, path)
    sizes = settled.arguments
    if not is_megatron and sizes.get("ep", 1) > 1 and max(sizes.get("tp", 1), sizes.get("cp", 1)) > 1:
        raise PlanError(
            f"{path}: expert_parallel_size beside tensor or context parallelism is not read here", path=path
        )
    sizes["recipe"] = "megatron" if is_megatron else "torchtitan"
    if value("policy", "generation", "colocated", "enabled") is not False:
        add_world(settled, options.flags, _CLUSTER, path)
    return settled


NEMO_RL = Format(
    lambda options: any(option.path[:2] in [("policy", name) for name in _ENGINES] for option in options.flags),
    _from_nemo_rl,
    "a NeMo-RL config",
)
