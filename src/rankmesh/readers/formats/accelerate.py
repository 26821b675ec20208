"""Accelerate: the YAML (or JSON) that ``accelerate config`` writes and ``accelerate launch`` reads.

```
distributed_type   NO                      one process, num_processes does not count
                   MULTI_GPU and its kin   every rank a replica, or the sizes of parallelism_config
                   FSDP                    every rank a shard; a hybrid strategy shards inside a machine
                   MEGATRON_LM             the layout of Megatron
                   DEEPSPEED               the layout of DeepSpeed
```

Source: ``accelerate.parallelism_config``, ``accelerate.commands.launch``, ``accelerate.commands.config``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from rankmesh.errors import PlanError
from rankmesh.readers.documents import found_file, options_of, over
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.launches import typed
from rankmesh.readers.options import Option, Options, refused
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, settle

__all__ = ["ACCELERATE"]

_SIZES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_DEVICES = ("GPU", "CPU", "XPU", "NPU", "MLU", "HPU", "MUSA", "SDAA")
_REPLICAS = tuple(f"MULTI_{device}" for device in _DEVICES)
_REPLICATED = ("NO_SHARD", 3, "3")
_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 4, 5, "4", "5")
# Keys that only Accelerate has at the top of a file: fsdp_config, for example, is in files of Transformers, too.
_MARKS = {"compute_environment", "distributed_type", "megatron_lm_config"}
_PARALLELISM, _MEGATRON = "parallelism_config", "megatron_lm_config"
_LAUNCH = re.compile(r"[\s/]accelerate\s+launch\s")
# Flags of the launcher that name an engine, and its name in a file.
_ENGINES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}


def _word(option: Option, path: str) -> object:
    return option.value


def _key(option: Option) -> str | None:
    sections = (_PARALLELISM, _MEGATRON, "fsdp_config", "deepspeed_config")
    return option.path[-1] if len(option.path) == 1 or option.path[0] in sections else None


_TABLE = Table(
    reads={
        "num_processes": Read("world_size"),
        "num_machines": Read("machines"),
        "distributed_type": Read("engine", _word),
        **{f"parallelism_config_{size}_size": Read(size) for size in _SIZES},
        "megatron_lm_tp_degree": Read("megatron_tp"),
        "megatron_lm_pp_degree": Read("megatron_pp"),
        "fsdp_sharding_strategy": Read("strategy", _word),
        "sharding_strategy": Read("strategy", _word),
        "fsdp_version": Read("fsdp"),
        "parallelism_config_sp_backend": Read("sp_backend", _word),
    },
    refused={"deepspeed_config_file": Refused("the sizes are in that file; give its path", (None, "none"))},
    key=_key,
)


def _launched(options: Options) -> list[Option]:
    """Return the flags of ``accelerate launch`` as the keys of its YAML."""
    flags = [replace(typed(option), path=(option.name,)) for option in options.counts]
    known = [option for option in flags if option.key in _TABLE.reads or option.key == "config_file"]
    engines = [option for option in flags if option.key in _ENGINES]
    return [*known, *(replace(each, path=("distributed_type",), value=_ENGINES[each.key]) for each in engines)]


def _matches(options: Options) -> bool:
    """Return whether a document has a key of ``accelerate config`` at its top, or a size named as in Accelerate.

    Of a command: whether ``accelerate launch`` is given a size or a file of its settings.
    """
    if not options.is_command:
        found = (option.path for option in options.flags)
        return any(path[0] in _MARKS or path[-1].startswith(f"{_PARALLELISM}_") for path in found)
    if _LAUNCH.search(f" {options.command}") is None or not FLAGS.isdisjoint(option.key for option in options.flags):
        return False
    return any(
        found_file(options.path, option.value) if option.key == "config_file" else option.key.startswith(_PARALLELISM)
        for option in _launched(options)
    )


def _settled(options: Options) -> Settled:
    """Settle a document, or a command over its file; ``engine`` decides for which recipe the arguments are."""
    path, flags = options.path, list(options.flags)
    if options.is_command:
        flags = _launched(options)
        named = next((option for option in flags if option.key == "config_file"), None)
        flags = over(flags, options_of(named, path) if named else [])
    settled = settle(_TABLE, flags, path)
    found = settled.arguments
    engine = str(found.pop("engine", "NO")).upper()
    machines, strategy = found.pop("machines", None), found.pop("strategy", None)
    version = found.pop("fsdp", None)
    megatron = {"tp": found.pop("megatron_tp", 1), "pp": found.pop("megatron_pp", 1)}
    backend = found.pop("sp_backend", "deepspeed")
    sizes = {size: found.pop(size) for size in _SIZES if size in found}
    by_deepspeed = engine == "DEEPSPEED" and sizes.get("sp", 1) > 1 and backend == "deepspeed"
    if by_deepspeed:
        # Its groups are of adjacent ranks; Accelerate does not check the sizes beside them.
        for name in [name for name in sizes if name != "sp"]:
            settled.drop(name, "is not used beside sp_backend deepspeed" if sizes.pop(name) > 1 else "")
    _one_engine(settled, engine, {} if by_deepspeed else sizes, megatron, path)
    if by_deepspeed:
        found.update(recipe="sequences", **sizes)
    elif engine == "MEGATRON_LM":
        found.update(megatron, recipe="megatron")
    elif engine == "DEEPSPEED":
        found["recipe"] = "deepspeed"
    elif engine == "NO" and settled.reading("engine") is not None:
        _one_process(settled, sizes, path)
    elif prod(sizes.values()) > 1:
        found.update({"dp_shard": 1, **sizes})
    elif engine == "FSDP" and not sizes and strategy not in _REPLICATED:
        found.update(_shards(settled, machines, strategy, version, path))
    elif engine == "FSDP" or engine in _REPLICAS:
        found["recipe"] = "replicas"
    elif engine == "NO":
        rule = "neither distributed_type nor a size of parallelism_config says how ranks share the work"
        raise PlanError(f"{path}: {rule}; add distributed_type", path=path)
    else:
        raise refused(path, _entry(settled, "engine"), "no recipe has the layout of this type", "describe it with axes")
    used = {"engine", *found, *(_SIZES if sizes else ()), *(_used_by(engine, strategy))}
    settled.readings[:] = [reading for reading in settled.readings if reading.argument in used]
    return settled


def _one_process(settled: Settled, sizes: dict[str, int], path: str) -> None:
    """Settle ``distributed_type: NO``: one process; a larger count is noted, a size is refused."""
    if wrong := [each for each in settled.readings if sizes.get(each.argument, 1) > 1]:
        rule = "distributed_type NO starts one process"
        raise refused(path, wrong[0], rule, "set distributed_type to MULTI_GPU or FSDP, or remove the size")
    if settled.arguments.get("world_size", 1) > 1:
        settled.drop("world_size", "is not used: accelerate starts one process for distributed_type NO")
    settled.arguments.update(recipe="replicas", world_size=1)


def _used_by(engine: str, strategy: object) -> tuple[str, ...]:
    if engine == "MEGATRON_LM":
        return ("megatron_tp", "megatron_pp")
    return ("strategy", *(("machines",) if strategy in _HYBRID else ())) if engine == "FSDP" else ()


def _one_engine(settled: Settled, engine: str, sizes: dict[str, int], megatron: dict[str, int], path: str) -> None:
    """Refuse sizes of an engine that the file does not choose."""
    if prod(megatron.values()) > 1 and engine != "MEGATRON_LM":
        wrong = [each for each in settled.readings if each.argument.startswith("megatron_") and each.value != 1]
    elif prod(sizes.values()) > 1 and engine in ("MEGATRON_LM", "DEEPSPEED"):
        wrong = [each for each in settled.readings if sizes.get(each.argument, 1) > 1]
    else:
        return
    rule = f"distributed_type {engine} lays its ranks out without it"
    raise refused(path, wrong[0], rule, "remove it, or change the type")


def _shards(settled: Settled, machines: int | None, strategy: object, version: int | None, path: str) -> dict[str, int]:
    """Return the sizes of FSDP where the file has none: one shard group of all ranks, or one in each machine."""
    if strategy not in _HYBRID:
        return {}
    if version == 2:
        rule = "FSDP 2 has no strategies, and shards in groups only by the sizes of parallelism_config"
        raise refused(path, _entry(settled, "strategy"), rule, "state dp_replicate and dp_shard there")
    if machines is None:
        rule = "a hybrid strategy shards inside a machine, and the file does not say how many machines there are"
        raise refused(path, _entry(settled, "strategy"), rule, "add num_machines")
    return {"dp_replicate": machines}


def _entry(settled: Settled, argument: str) -> Option:
    return next(reading for reading in settled.readings if reading.argument == argument)


ACCELERATE = Format(_matches, _settled, "an Accelerate config", "a command of Accelerate")
