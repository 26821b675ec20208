"""Megatron's parameters as shardings: what their attributes state, gathered from all ranks.

```
tensor_model_parallel, partition_dim, partition_stride      cut over tp, in so many equal parts
allreduce = False                                           of experts: on the view "expert", over etp
```

A rank has the parameters of its stage and of its experts only, and a plan is made of all of them: each rank describes
its parameters (``described``), all ranks gather the descriptions (``gathered``) and combine them (``shardings``), once.
Names are global where ``rename`` makes them so: layers counted through the stages, experts through the ranks. Source:
``megatron.core.tensor_parallel.layers``, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["described", "gathered", "shardings"]


class Described(TypedDict):
    """What one rank states of a parameter; ``at`` are its positions, ``vocabulary`` the rows without padding."""

    shape: list[int]
    dtype: str
    dim: int | None
    stride: int
    expert: bool
    at: dict[str, int]
    vocabulary: int | None


_Compared = Literal["shape", "dtype", "dim", "stride", "expert"]
# What all ranks must agree on, of one parameter.
_COMPARED: tuple[_Compared, ...] = get_args(_Compared)
# The parameters of one rank by global name.
RankParameters = dict[str, Described]


def described(
    parameters: Iterable[tuple[str, Any]],
    mesh: Mesh,
    rank: int,
    *,
    rename: Callable[[str], str] = str,
    vocabulary: int | None = None,
) -> RankParameters:
    """The parameters of one rank, as plain data by global name: ``parameters`` are ``model.named_parameters()``.

    ``mesh`` is that of `rankmesh.recipes.megatron`. ``vocabulary`` is the size without Megatron's padding, of
    embeddings and heads that are cut by rows.
    """
    found: RankParameters = {}
    for name, parameter in parameters:
        expert = not getattr(parameter, "allreduce", True)
        view = "expert" if expert else None
        coordinate = mesh.coordinate(rank, view=view)
        cut = bool(getattr(parameter, "tensor_model_parallel", False))
        dim = int(getattr(parameter, "partition_dim", 0)) if cut else None
        axis = "etp" if expert else "tp"
        ways = mesh.view(view).axes.get(axis, 1)
        shape = [length * (ways if number == dim else 1) for number, length in enumerate(parameter.shape)]
        found[rename(name)] = {
            "shape": shape,
            "dtype": str(parameter.dtype),
            "dim": dim,
            "stride": int(getattr(parameter, "partition_stride", 1)) if cut else 1,
            "expert": expert,
            "at": {axis: coordinate[axis] for axis in ("pp", *(("ep",) if expert else ())) if axis in coordinate},
            "vocabulary": vocabulary if _is_table(name) and dim == 0 else None,
        }
    return found


def _is_table(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def gathered(local: RankParameters, group: ProcessGroup | None = None) -> list[RankParameters]:
    """The parameters of every rank of a group; each rank of it calls this."""
    import torch.distributed as dist

    every: list[RankParameters] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, local, group=group)
    return every


def shardings(every: Sequence[RankParameters], mesh: Mesh) -> dict[str, Sharding]:
    """The shardings of the parameters of all ranks. Raises ``LayoutError`` where two ranks describe one differently."""
    found: RankParameters = {}
    places: dict[str, dict[str, set[int]]] = {}
    for parameters in every:
        for name, entry in parameters.items():
            _check_same(name, found.setdefault(name, entry), entry)
            for axis, place in entry["at"].items():
                places.setdefault(name, {}).setdefault(axis, set()).add(place)
    return {name: _sharding(entry, places.get(name, {}), mesh) for name, entry in found.items()}


def _check_same(name: str, known: Described, entry: Described) -> None:
    for what in _COMPARED:
        if known[what] != entry[what]:
            raise LayoutError(
                f"{name!r} has {what} {known[what]} on one rank and {entry[what]} on another, but one name is one "
                "tensor; give global names: rename=",
                name=name,
            )


def _sharding(entry: Described, places: Mapping[str, set[int]], mesh: Mesh) -> Sharding:
    shape, dim, view = list(entry["shape"]), entry["dim"], "expert" if entry["expert"] else None
    padded = None
    if entry["vocabulary"] is not None and entry["vocabulary"] < shape[0]:
        padded, shape[0] = {0: shape[0]}, entry["vocabulary"]
    axis = "etp" if entry["expert"] else "tp"
    cut = tuple(axis if number == dim else None for number in range(len(shape)))
    parts = None
    if dim is not None and entry["stride"] > 1:
        parts = {dim: (shape[dim] // entry["stride"],) * entry["stride"]}
    at = {axis: tuple(sorted(of_axis)) for axis, of_axis in places.items()}
    kept: dict[str, int | tuple[int, ...]] = {
        axis: of_axis for axis, of_axis in at.items() if len(of_axis) < mesh.view(view).axes[axis]
    }
    if sum(len(at[axis]) > 1 for axis in kept) > 1:
        raise LayoutError(f"a parameter at {kept} has copies along more than one axis; give global names: rename=")
    return Sharding(mesh, cut, tuple(shape), entry["dtype"], kept, view, parts, padded)
