"""axolotl: the sizes of N-D parallelism at the top of a YAML, as its mesh of Accelerate has them.

```
dp_replicate_size  dp_shard_size  context_parallel_size  tensor_parallel_size      shards are inferred
expert_parallel_size      alone: all ranks
```

Source: ``axolotl.utils.distributed`` (``_get_parallel_config_kwargs``) and ``axolotl.integrations.expert_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.errors import PlanError
from rankmesh.readers.reading import Entry, Read, Settled, Table, refused, settle

__all__ = ["from_document", "matches"]

_MODEL = {"base_model", "base_model_config"}
_DATA = {"datasets", "pretraining_dataset", "rl", "micro_batch_size"}


def _key(entry: Entry) -> str | None:
    return entry.path[0] if len(entry.path) == 1 else None


TABLE = Table(
    reads={
        "dp_replicate_size": Read("dp_replicate"),
        "dp_shard_size": Read("dp_shard"),
        "context_parallel_size": Read("cp"),
        "sequence_parallel_degree": Read("cp"),
        "tensor_parallel_size": Read("tp"),
        "expert_parallel_size": Read("ep"),
    },
    key=_key,
)


def matches(entries: Iterable[Entry]) -> bool:
    """Whether the document has a size, and the model and data as only axolotl names them."""
    top = {entry.path[0] for entry in entries}
    sizes = any(_key(entry) in TABLE.reads for entry in entries)
    return sizes and not top.isdisjoint(_MODEL) and not top.isdisjoint(_DATA)


def from_document(entries: list[Entry], path: str) -> Settled:
    """The arguments of a YAML; a size of 1 is that of an axis which the mesh does not have."""
    settled = settle(TABLE, entries, path)
    sizes = {name: size for name, size in settled.arguments.items() if size > 1}
    if not sizes:
        raise PlanError(f"{path}: no parallel size of this axolotl config is more than 1; state one", path=path)
    if "ep" in sizes and len(sizes) > 1:
        entry = next(entry for entry in entries if _key(entry) == "expert_parallel_size")
        raise refused(path, entry, "no recipe has an expert axis beside these sizes", "describe it with axes")
    settled.arguments.clear()
    settled.arguments.update(sizes, recipe="experts" if "ep" in sizes else "axolotl")
    return settled
