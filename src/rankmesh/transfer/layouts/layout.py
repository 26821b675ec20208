"""Layouts of one side: how each weight of a model is sharded, by its checkpoint name, and where it is in parameters.

```
checkpoint name              sharding                          where, on rank 1
...q_proj.weight (64, 64)    cut ("tp", None) of tp=2          rows 0..31 of ...qkv_proj.weight
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import DTYPES, Sharding
from rankmesh.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HOOK", "Layout", "Piece", "Place"]

# How parameters are filled where a framework changes the form of none.
HOOK = "fill the parameters as the loader left them"


class Piece(NamedTuple):
    """A part of a shard: where it begins in the shard, and where it is in the parameter, with which strides."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Place(NamedTuple):
    """The place of a rank's shard of this ``shape``: a parameter of shape ``whole``, and the pieces in it."""

    parameter: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_view(self) -> bool:
        """Return whether one strided view of the parameter is the whole shard."""
        return len(self.pieces) == 1 and self.pieces[0].shape == self.shape


@dataclass(frozen=True)
class Layout:
    """The layout of a model under one side.

    ``shardings``   by checkpoint name
    ``refused``     checkpoint names that have no sharding, with the reason
    ``unfilled``    parameters that the loader fills from no tensor of the checkpoint
    ``places``      by rank and checkpoint name, where the shard is in the side's own parameters
    ``hook``        how parameters are filled whose form the side changes after loading
    """

    side: str
    mesh: Mesh
    shardings: Mapping[str, Sharding]
    refused: Mapping[str, str] = field(default_factory=dict)
    unfilled: tuple[str, ...] = ()
    places: Mapping[int, Mapping[str, Place]] = field(default_factory=dict, repr=False)
    hook: str = HOOK

    def views(self, parameters: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return a rank's shards by checkpoint name, as views of the side's own parameters, for a transfer.

        ``parameters`` are ``dict(model.named_parameters())`` of that rank, after loading and before any change of
        their form. Raises ``LayoutError`` for a parameter that is missing or has another shape, and where a shard is
        in several pieces of a parameter, as Megatron's queries are: those take `shards` and `fill`.
        """
        made = {}
        for name, place in self._places(rank):
            if not place.is_view:
                raise LayoutError(
                    f"{name!r} is in {len(place.pieces)} pieces of {place.parameter!r}, and no view of it; use "
                    "shards() before the transfer, and fill() after it",
                    name=name,
                )
            made[name] = self._view(parameters, name, place, place.pieces[0])
        return made

    def shards(self, parameters: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return a rank's shards by checkpoint name: views of parameters, or copies where a shard is in several pieces.

        A parameter of another dtype than the checkpoint, such as a float32 bias, is copied, too. Call `fill`
        after a transfer has written into them. Raises ``LayoutError`` as `views` does.
        """
        import torch

        made: dict[str, Tensor] = {}
        for name, place in self._places(rank):
            pieces = [(piece, self._view(parameters, name, place, piece)) for piece in place.pieces]
            dtype = getattr(torch, self.shardings[name].dtype)
            if place.is_view and pieces[0][1].dtype is dtype:
                made[name] = pieces[0][1]
                continue
            made[name] = pieces[0][1].new_zeros(place.shape, dtype=dtype)
            for piece, there in pieces:
                _part(made[name], piece).copy_(there)
        return made

    def fill(self, parameters: Mapping[str, Tensor], rank: int, shards: Mapping[str, Tensor]) -> None:
        """Write a rank's shards, by checkpoint name, into the side's own parameters; its views stay as they are."""
        from rankmesh.transfer.live.shards import same_place

        for name, place in self._places(rank):
            for piece in place.pieces if name in shards else ():
                there, given = self._view(parameters, name, place, piece), _part(shards[name], piece)
                if not same_place(there, given):
                    there.copy_(given)

    def _places(self, rank: int) -> list[tuple[str, Place]]:
        return [(name, place) for name, place in self.places.get(rank, {}).items() if name in self.shardings]

    def _view(self, parameters: Mapping[str, Tensor], name: str, place: Place, piece: Piece) -> Tensor:
        from rankmesh.transfer.live.shards import local

        holder = f"{place.parameter!r}, which holds {name!r},"
        if place.parameter not in parameters:
            module = place.parameter.rpartition(".")[0] + "."
            beside = [one.removeprefix(module) for one in parameters if one.rpartition(".")[0] + "." == module]
            remade = f" ({module[:-1]} has {', '.join(beside[:4])} instead)" if beside and module != "." else ""
            fix = self.hook if remade else "give the parameters of the side's model: dict(model.named_parameters())"
            raise LayoutError(f"{holder} is not among the parameters{remade}; {fix}", name=name)
        whole = local(parameters[place.parameter])
        if kernel := _kernel(whole, self.shardings[name]):
            raise LayoutError(f"parameter {holder} is {kernel}, a form made after loading; {self.hook}", name=name)
        if tuple(whole.shape) != place.whole or not whole.is_contiguous():
            raise LayoutError(
                f"parameter {holder} has shape {tuple(whole.shape)} and strides {tuple(whole.stride())}, but this side "
                f"makes {place.whole}; {self.hook}, in a model of the same sizes",
                name=name,
            )
        view: Tensor = whole.as_strided(piece.shape, piece.strides, whole.storage_offset() + piece.offset)
        return view

    def to_dict(self) -> dict[str, object]:
        """Return the layout as plain data: meshes, its own first, shardings, each ``on`` one of these, refusals."""
        meshes: dict[int, tuple[int, Mesh]] = {id(self.mesh): (0, self.mesh)}
        for sharding in self.shardings.values():
            meshes.setdefault(id(sharding.mesh), (len(meshes), sharding.mesh))
        return {
            "side": self.side,
            "mesh": dict(self.mesh.axes),
            "meshes": [mesh.to_dict() for _, mesh in meshes.values()],
            "tensors": {
                name: {**one.to_dict(), "mesh": dict(one.mesh.axes), "on": meshes[id(one.mesh)][0]}
                for name, one in self.shardings.items()
            },
            "refused": dict(self.refused),
            "unfilled": list(self.unfilled),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Return the layout that ``to_dict`` gave as plain data, also after JSON; without places, so without views.

        >>> one = Layout("toy", Mesh(tp=2), {"up": Sharding(Mesh(tp=2), ("tp",), shape=(8,))})
        >>> Layout.from_dict(one.to_dict()) == one
        True
        """
        meshes = [Mesh.from_dict(mesh) for mesh in data["meshes"]]
        shardings = {name: Sharding.from_dict(meshes[one["on"]], one) for name, one in data["tensors"].items()}
        return cls(data["side"], meshes[0], shardings, dict(data["refused"]), tuple(data["unfilled"]))


def _part(shard: Tensor, piece: Piece) -> Tensor:
    return shard[tuple(slice(low, low + length) for low, length in zip(piece.begin, piece.shape, strict=True))]


def _kernel(parameter: Tensor, sharding: Sharding) -> str | None:
    """Return the format of a parameter whose elements are not its numbers: quantised, or of a class of its own."""
    import torch

    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(parameter).__name__}"
    quantised = parameter.element_size() == 1 or not (parameter.is_floating_point() or parameter.is_complex())
    other = str(parameter.dtype).removeprefix("torch.")
    plain = DTYPES[sharding.dtype] == 1 or not getattr(torch, sharding.dtype).is_floating_point
    return None if plain or not quantised else other
