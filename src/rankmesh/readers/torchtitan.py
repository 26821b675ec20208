"""torchtitan: the table ``[parallelism]`` of a training TOML.

Older configs have the same keys in ``[training]`` and ``[experimental]``. ``data_parallel_shard_degree`` is what is
left of the world when it is -1 or absent. Source: ``torchtitan.config.job_config`` and ``distributed.parallel_dims``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankmesh.readers.reading import Entry, Read, Refused, Settled, Table, settle, unless

__all__ = ["TABLE", "from_document", "matches"]

_SECTIONS = ("parallelism", "training", "experimental")
_LEFT = -1


def _key(entry: Entry) -> str | None:
    if entry.path == ("fault_tolerance", "enable"):
        return entry.key
    section, *names = entry.path
    if section not in _SECTIONS or len(names) != 1:
        return None
    return names[0] if section == "parallelism" or re.search("parallel", names[0]) else None


TABLE = Table(
    reads={
        "data_parallel_replicate_degree": Read("dp_replicate"),
        "data_parallel_shard_degree": Read("dp_shard", unless(_LEFT)),
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
    mentioned={
        "pipeline_parallel_microbatch_size": "is a schedule; the groups are the same",
        "pipeline_parallel_layers_per_stage": "splits the stages of a rank; the groups are the same",
        "pipeline_parallel_first_stage_less_layers": "is a schedule; the groups are the same",
        "pipeline_parallel_last_stage_less_layers": "is a schedule; the groups are the same",
        "pipeline_parallel_schedule": "is a schedule; the groups are the same",
    },
    key=_key,
    closed=True,
)


def matches(entries: Iterable[Entry]) -> bool:
    """Whether the document has one of torchtitan's degrees in its tables."""
    return any(_key(entry) in TABLE.reads for entry in entries)


def from_document(entries: list[Entry], path: str) -> Settled:
    """The arguments of the tables."""
    settled = settle(TABLE, entries, path)
    for entry in entries:
        if _key(entry) == "data_parallel_shard_degree" and entry.value == _LEFT:
            settled.notes.append((entry.line, f"{entry} is inferred from the world"))
    return settled
