"""DeepSpeed: the JSON that ``deepspeed.initialize`` takes. It states the world only as two factors, if at all.

``sequence_parallel_size`` makes groups only beside ``data_parallel_size``; pipeline stages are code, not configuration.
Source: ``deepspeed.initialize``, ``deepspeed.utils.groups``, ``deepspeed.runtime.tensor_parallel.config``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, refused, settle, unless

__all__ = ["TABLE", "from_document", "matches"]

_SECTIONS = ("tensor_parallel", "zero_optimization", "expert_parallel")
# What no other system's file has at its top: gradient_accumulation_steps, say, is in everybody's. A train_batch_size
# is in files of many, and DeepSpeed's alone or beside one of its own settings.
_MARKS = {"train_micro_batch_size_per_gpu", "zero_optimization"}
_BATCHES = {("train_batch_size",), ("gradient_accumulation_steps",)}
_BESIDE = {
    ("fp16", "enabled"),
    ("bf16", "enabled"),
    ("optimizer", "type"),
    ("scheduler", "type"),
    ("autotuning", "enabled"),
    ("steps_per_print",),
    ("wall_clock_breakdown",),
    ("sequence_parallel_size",),
    ("data_parallel_size",),
}


def _key(entry: Entry) -> str | None:
    section, *names = entry.path
    if not names:
        return section
    if entry.path == ("autotuning", "mp_size"):
        return entry.key
    return ".".join(names) if section in _SECTIONS else entry.key if section == "pipeline" else None


TABLE = Table(
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


def matches(entries: Iterable[Entry]) -> bool:
    """Return whether a document has a micro batch, a section, or a batch beside settings as in DeepSpeed."""
    paths = {entry.path for entry in entries}
    return (
        any(path[0] in _MARKS for path in paths)
        or any(path[0] in _SECTIONS and len(path) > 1 and _is_deepspeed_key(".".join(path[1:])) for path in paths)
        or (("train_batch_size",) in paths and (paths <= _BATCHES or not paths.isdisjoint(_BESIDE)))
    )


def _is_deepspeed_key(name: str) -> bool:
    """Return whether only DeepSpeed's sections have a key of this name; of others some have a tensor_parallel.size."""
    return name in TABLE.reads or name in TABLE.refused or name.startswith("auto")


def from_document(entries: list[Entry], path: str) -> Settled:
    """Return the arguments of the file."""
    settled = settle(TABLE, entries, path)
    arguments = settled.arguments
    if arguments.get("sp", 1) > 1 and "dp" not in arguments:
        entry = next(entry for entry in entries if _key(entry) == "sequence_parallel_size")
        rule = "DeepSpeed makes sequence groups from its configuration only where data_parallel_size stands beside it"
        raise refused(path, entry, rule, "add data_parallel_size")
    if "sp" not in arguments and "dp" in arguments:
        settled.drop("dp", "is read by DeepSpeed only beside sequence_parallel_size")
    enabled = any(entry.path == ("expert_parallel", "enabled") and entry.value is True for entry in entries)
    if "ep" in arguments and not enabled:
        settled.drop("ep", "makes no groups while expert_parallel.enabled is not true")
    return settled
