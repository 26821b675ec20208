"""nanotron: the section ``parallelism`` of a training YAML.

Source: ``nanotron.config.parallelism_config.ParallelismArgs``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.readers.reading import Entry, Read, Settled, Table, settle

__all__ = ["from_document", "matches"]

_SECTION = "parallelism"
_REST = "does not shape the layout"


def _key(entry: Entry) -> str | None:
    return ".".join(entry.path[1:]) if entry.path[0] == _SECTION and len(entry.path) > 1 else None


TABLE = Table(
    reads={
        "tp": Read("tp"),
        "pp": Read("pp"),
        "dp": Read("dp"),
        "context_parallel_size": Read("cp"),
        "cp": Read("cp"),
        "expert_parallel_size": Read("ep"),
    },
    mentioned={
        "tp_mode": "says what the tp groups are used for; the groups are the same",
        "pp_engine": "is a schedule; the groups are the same",
        "tp_linear_async_communication": _REST,
        "tp_recompute_allgather": _REST,
        "recompute_layer": _REST,
        "moe_layer_recompute": _REST,
    },
    key=_key,
    closed=True,
)


def matches(entries: Iterable[Entry]) -> bool:
    """Whether the document has the three sizes that nanotron's section must have."""
    return {"tp", "pp", "dp"} <= {_key(entry) for entry in entries}


def from_document(entries: list[Entry], path: str) -> Settled:
    """The sizes of a document of this format."""
    return settle(TABLE, entries, path)
