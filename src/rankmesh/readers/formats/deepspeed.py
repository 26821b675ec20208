"""DeepSpeed: the JSON that ``deepspeed.initialize`` takes. It states the world only as two factors, if at all.

``sequence_parallel_size`` makes groups only beside ``data_parallel_size``; pipeline stages are code, not configuration.
Source: ``deepspeed.initialize``, ``deepspeed.utils.groups``, ``deepspeed.runtime.tensor_parallel.config``.
"""

from __future__ import annotations

from rankmesh.readers.documents import options_of
from rankmesh.readers.launches import system
from rankmesh.readers.options import Option, Options, refused
from rankmesh.readers.table import Format, Read, Refused, Settled, Table, settle, unless
from rankmesh.readers.tokens import line_of, shown

__all__ = ["DEEPSPEED", "FACTORY", "settled"]

_SECTIONS = ("tensor_parallel", "zero_optimization", "expert_parallel")
# Keys that only DeepSpeed has at the top of a file. A train_batch_size, which many systems have, marks a file of
# DeepSpeed alone, or beside one of its settings.
_MARKS = {"train_micro_batch_size_per_gpu", "zero_optimization"}
_BATCHES = {("train_batch_size",), ("gradient_accumulation_steps",)}
_BESIDE = {
    ("fp16", "enabled"), ("bf16", "enabled"), ("optimizer", "type"), ("scheduler", "type"), ("autotuning", "enabled"),
    ("steps_per_print",), ("wall_clock_breakdown",), ("sequence_parallel_size",), ("data_parallel_size",),
}  # fmt: skip


# Flags of a command that name the file.
_FILE = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")


def _key(option: Option) -> str | None:
    section, *names = option.path
    if not names:
        return section
    if option.path == ("autotuning", "mp_size"):
        return option.key
    return ".".join(names) if section in _SECTIONS else option.key if section == "pipeline" else None


_TABLE = Table(
    reads={
        "autotp_size": Read("tp", unless(0)),
        "sequence_parallel_size": Read("sp"),
        "data_parallel_size": Read("dp"),
        "autoep_size": Read("ep"),
        "zero_hpz_partition_size": Read("hpz"),
        "mics_shard_size": Read("mics", unless(-1)),
    },
    refused={
        "tp.tp_size": Refused("training takes the size from tensor_parallel.autotp_size"),
        "tensor_parallel.tp_size": Refused("training takes the size from tensor_parallel.autotp_size"),
        "expert_tensor_parallel_size": Refused("experts that are cut by an axis of their own"),
        "mics_hierarchical_params_gather": Refused("its groups depend on how many devices a node has"),
        "autotuning.mp_size": Refused("the program then lays out an axis of its own, which is not in this file"),
        "pipeline.stages": Refused("stages of a pipeline are laid out by code, not by this file", (None, 1, "auto")),
    },
    key=_key,
)


def _matches(options: Options) -> bool:
    """Return whether a document has a key or a batch as in DeepSpeed, or whether a command names its file."""
    if options.is_command:
        return _file(options) is not None
    paths = {option.path for option in options.flags}
    return (
        any(path[0] in _MARKS for path in paths)
        or any(path[0] in _SECTIONS and len(path) > 1 and _is_deepspeed_key(".".join(path[1:])) for path in paths)
        or (("train_batch_size",) in paths and (paths <= _BATCHES or not paths.isdisjoint(_BESIDE)))
    )


def _is_deepspeed_key(name: str) -> bool:
    """Return whether only DeepSpeed's sections have a key of this name, which ``tensor_parallel.size`` is not."""
    return name in _TABLE.reads or name in _TABLE.refused or name.startswith("auto")


def _file(options: Options) -> Option | None:
    named = (option.single for option in options.flags if option.key in _FILE)
    return next((option for option in named if str(option.value).endswith(".json")), None)


def settled(options: list[Option], path: str) -> Settled:
    """Return the arguments of DeepSpeed's file, or of its section in another."""
    found = settle(_TABLE, options, path)
    arguments = found.arguments
    if arguments.get("sp", 1) > 1 and "dp" not in arguments:
        option = next(option for option in options if _key(option) == "sequence_parallel_size")
        rule = "DeepSpeed makes sequence groups from its configuration only where data_parallel_size stands beside it"
        raise refused(path, option, rule, "add data_parallel_size")
    if "sp" not in arguments and "dp" in arguments:
        found.drop("dp", "is read by DeepSpeed only beside sequence_parallel_size")
    enabled = any(option.path == ("expert_parallel", "enabled") and option.value is True for option in options)
    if "ep" in arguments and not enabled:
        found.drop("ep", "makes no groups while expert_parallel.enabled is not true")
    return found


def _of(options: Options) -> Settled:
    """Settle a document, or the file that a command names."""
    named = _file(options)
    of_file = options_of(named, options.path) if named else []
    found = settled(of_file if named else list(options.flags), options.path)
    found.of_file = of_file
    return found.add_run(options)


def _factory(options: Options) -> Settled:
    """Settle a run of LLaMA-Factory: its YAML names DeepSpeed's file, else every rank is a replica."""
    path, files = options.path, [word for word in options.command.words if shown(word).endswith((".yaml", ".yml"))]
    stated = [each for word in files[:1] for each in options_of(Option((), shown(word), line_of(word)), path)]
    named = next((option for option in stated if option.path == ("deepspeed",) and option.value), None)
    found = settled(options_of(named, path), path) if named else Settled()
    found.arguments["recipe"] = "deepspeed" if named else "replicas"
    return found.add_run(options)


DEEPSPEED = Format(_matches, _of, "a DeepSpeed config", "a launch script of DeepSpeed")
FACTORY = Format(lambda options: system(options.command) == "llamafactory", _factory, "", "a command of LLaMA-Factory")
