"""Megatron's parameters as shardings: what their own attributes say, put together from all ranks.

```
tensor_model_parallel, partition_dim, partition_stride      cut over tp, in so many equal parts
allreduce = False                                           of experts: on the view "expert", over etp
```

A rank has the parameters of its stage and of its experts only, and a plan is made of all of them: each rank says what
it has (``described``), and all put it together (``shardings``), once. Names are global where ``rename`` makes them so:
layers counted through the stages, experts through the ranks. Source: ``megatron.core.tensor_parallel.layers``, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError

__all__ = ["described", "gathered", "shardings"]

Said = dict[str, dict[str, Any]]


def described(
    parameters: Iterable[tuple[str, Any]],
    mesh: Mesh,
    rank: int,
    *,
    rename: Callable[[str], str] = str,
    vocabulary: int | None = None,
) -> Said:
    """What one rank has, as plain data by global name: ``parameters`` are ``model.named_parameters()``.

    ``mesh`` is that of `rankmesh.recipes.megatron`. ``vocabulary`` is the size without Megatron's padding, of
    embeddings and heads that are cut by rows.
    """
    said: Said = {}
    for name, parameter in parameters:
        expert = not getattr(parameter, "allreduce", True)
        view = "expert" if expert else None
        own = mesh.coordinate(rank, view=view)
        cut = bool(getattr(parameter, "tensor_model_parallel", False))
        dim = int(getattr(parameter, "partition_dim", 0)) if cut else None
        axis = "etp" if expert else "tp"
        ways = mesh.view(view).axes.get(axis, 1)
        shape = [length * (ways if number == dim else 1) for number, length in enumerate(parameter.shape)]
        said[rename(name)] = {
            "shape": shape,
            "dtype": str(parameter.dtype),
            "dim": dim,
            "stride": int(getattr(parameter, "partition_stride", 1)) if cut else 1,
            "expert": expert,
            "at": {axis: own[axis] for axis in ("pp", *(("ep",) if expert else ())) if axis in own},
            "vocabulary": vocabulary if _is_table(name) and dim == 0 else None,
        }
    return said


def _is_table(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def gathered(own: Said, group: Any = None) -> list[Said]:
    """What every rank of a group has said; each rank of it calls this."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def shardings(every: Sequence[Said], mesh: Mesh) -> dict[str, Sharding]:
    """The shardings of all that any rank has said. Raises ``LayoutError`` where two ranks say different things."""
    found: Said = {}
    for said in every:
        for name, entry in said.items():
            known = found.setdefault(name, {**entry, "at": {axis: set() for axis in entry["at"]}})
            _agree(name, known, entry)
            for axis, place in entry["at"].items():
                known["at"][axis].add(place)
    return {name: _sharding(entry, mesh) for name, entry in found.items()}


def _agree(name: str, known: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    for what in ("shape", "dtype", "dim", "stride", "expert"):
        if known[what] != entry[what]:
            raise LayoutError(
                f"{name!r} has {what} {known[what]} on one rank and {entry[what]} on another, but one name is one "
                "tensor; give global names: rename=",
                name=name,
            )


def _sharding(entry: Mapping[str, Any], mesh: Mesh) -> Sharding:
    shape, dim, view = list(entry["shape"]), entry["dim"], "expert" if entry["expert"] else None
    padded = None
    if entry["vocabulary"] is not None and entry["vocabulary"] < shape[0]:
        padded, shape[0] = {0: shape[0]}, entry["vocabulary"]
    axis = "etp" if entry["expert"] else "tp"
    cut = tuple(axis if number == dim else None for number in range(len(shape)))
    parts = None
    if entry["stride"] > 1:
        parts = {dim: (shape[dim] // entry["stride"],) * entry["stride"]}
    at = {axis: tuple(sorted(places)) for axis, places in entry["at"].items()}
    kept = {axis: places for axis, places in at.items() if len(places) < mesh.view(view).axes[axis]}
    if prod(len(places) for places in kept.values()) > 1 and sum(len(places) > 1 for places in kept.values()) > 1:
        raise LayoutError(f"a parameter at {kept} has copies along more than one axis; give global names: rename=")
    return Sharding(mesh, cut, tuple(shape), entry["dtype"], kept, view, parts, padded)
