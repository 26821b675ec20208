"""GPT-NeoX: a YAML of its arguments, whose names have hyphens or underscores.

Ranks are laid out with the model axis adjacent, then data, then pipe. Source: ``megatron/neox_arguments`` and
``PipeModelDataParallelTopology`` of GPT-NeoX and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, settle, whole

__all__ = ["from_document", "matches"]

_SIZES = ("model_parallel_size", "pipe_parallel_size")


def _key(entry: Entry) -> str | None:
    return entry.path[0].replace("-", "_") if len(entry.path) == 1 else None


def _stages(entry: Entry, path: str) -> int:
    """Both 0 and 1 are no pipeline."""
    return 1 if entry.value == 0 else whole(entry, path) or 1


TABLE = Table(
    reads={
        "model_parallel_size": Read("tp"),
        "pipe_parallel_size": Read("pp", _stages),
        "world_size": Read("world_size"),
        "global_num_gpus": Read("world_size"),
    },
    refused={
        "moe_expert_parallel_size": Refused("its expert groups are DeepSpeed's, inside of data parallelism"),
        "context_parallel_size": Refused("its context groups are none of this layout's"),
    },
    mentioned={"sequence_parallel": "uses the tp groups; it makes none"},
    key=_key,
)


def matches(entries: Iterable[Entry]) -> bool:
    """Whether the document has a size of GPT-NeoX at its top, which no other format has there."""
    return any(_key(entry) in _SIZES for entry in entries)


def from_document(entries: list[Entry], path: str) -> Settled:
    """The sizes of a document of this format."""
    return settle(TABLE, entries, path)
