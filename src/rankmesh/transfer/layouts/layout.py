"""Layouts of one side: how each weight of a model is sharded, by its checkpoint name, and where it is in parameters.

```
checkpoint name              sharding                          where, on rank 1
...q_proj.weight (64, 64)    cut ("tp", None) of tp=2          rows 0..31 of ...qkv_proj.weight
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import DTYPES, Shard, Sharding
from rankmesh.errors import LayoutError, quoted
from rankmesh.transfer.layouts.inference import infer
from rankmesh.transfer.layouts.refusals import refusal
from rankmesh.transfer.layouts.strided import Fragment, contiguous, union

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Layout", "Piece", "Place", "Side", "Weights", "read"]

# The tensors of a checkpoint: shape and dtype by name.
Weights = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Side:
    """A framework with the sizes of its parallelism and a model.

    ``load(rank, tensors)`` constructs the model of one rank, loads these tensors of a checkpoint into it, and returns
    its parameters by name. It is called in a world of ``mesh.size`` ranks of torch's fake backend, and gives parameters
    without storage where the tensors have none.

    ``kernels`` names parameters whose form is made after loading, with the format: quantised ones, as
    ``quantization_config`` asks; `load` may add to it. ``hook`` says how such a parameter is filled.
    """

    name: str
    mesh: Mesh
    weights: Weights
    load: Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
    kernels: Mapping[str, str] = field(default_factory=dict)
    hook: str = "fill the parameters as the loader left them"


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
        """Whether one strided view of the parameter is the whole shard."""
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
    hook: str = Side.hook

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
            fix = self.hook if remade else "give those of the side's model: dict(model.named_parameters())"
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
        """The layout as plain data: meshes, its own first, shardings, each ``on`` one of these, refusals."""
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
    """The format of a parameter that stands for other numbers than its elements: quantised, or a tensor of its own."""
    import torch

    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(parameter).__name__}"
    quantised = parameter.element_size() == 1 or not (parameter.is_floating_point() or parameter.is_complex())
    other = str(parameter.dtype).removeprefix("torch.")
    plain = DTYPES[sharding.dtype] == 1 or not getattr(torch, sharding.dtype).is_floating_point
    return None if plain or not quantised else other


class _Loaded(NamedTuple):
    """The part of one tensor that one rank holds."""

    parameter: str
    fragments: list[Fragment]
    shape: tuple[int, ...]
    unshared: bool


def read(side: Side) -> Layout:
    """Run a side's loader as each rank in turn, on tensors without storage, and say how it shards every tensor.

    Raises ``LayoutError`` where the side itself cannot construct or load the model, ``ConnectError`` inside a job.
    """
    import torch

    from rankmesh.backend.fake_world import fake_world
    from rankmesh.transfer.layouts.trace import Trace
    from rankmesh.transfer.live.shards import local

    mesh, weights = side.mesh, side.weights
    loaded: dict[str, dict[int, _Loaded]] = {name: {} for name in weights}
    refused: dict[str, str] = {}
    empty: dict[str, None] = {}
    for rank in mesh.rank_range.ascending.tolist():
        with fake_world(rank, mesh.size), Trace() as trace:
            tensors = {name: trace.source(name, shape, getattr(torch, kind)) for name, (shape, kind) in weights.items()}
            try:
                parameters = side.load(rank, tensors)
            except Exception as error:
                what = f"{side.name} cannot load this model as rank {rank}"
                raise refusal(what, side.name, error, rank=rank) from error
            for parameter, tensor in parameters.items():
                try:
                    found = trace.fragments(tensor)
                except LayoutError as error:
                    for name in error.sources:  # type: ignore[attr-defined]
                        refused.setdefault(name, f"{parameter}: {error}")
                    continue
                if not found and isinstance(tensor, torch.nn.Parameter):
                    empty[parameter] = None
                stored = tuple(local(tensor).shape) if found else ()
                for name, fragments in found.items():
                    if kernel := side.kernels.get(parameter):
                        refused[name] = f"{parameter} is {kernel}, a form made after loading; {side.hook}"
                        continue
                    known = loaded[name].get(rank)
                    if known is not None:
                        refused[name] = f"rank {rank} has it in {known.parameter} and in {parameter}"
                    loaded[name][rank] = _Loaded(parameter, fragments, stored, len(found) == 1)
    shardings: dict[str, Sharding] = {}
    places: dict[int, dict[str, Place]] = {}
    known_layouts: dict[object, Sharding | str] = {}
    for name, (shape, dtype) in weights.items():
        if name in refused:
            continue
        try:
            sharding = _sharding(mesh, shape, dtype, loaded[name], known_layouts)
            found_places = {rank: _place(sharding.of(rank), of) for rank, of in loaded[name].items()}
        except LayoutError as error:
            refused[name] = str(error)
            continue
        shardings[name] = sharding
        for rank, place in found_places.items():
            places.setdefault(rank, {})[name] = place
    filled = {place.parameter for found in places.values() for place in found.values()}
    return Layout(side.name, mesh, shardings, refused, tuple(name for name in empty if name not in filled), places,
                  side.hook)  # fmt: skip


def _sharding(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, loaded: Mapping[int, _Loaded], known: dict[object, Sharding | str]
) -> Sharding:
    """Layers that are alike are inferred once."""
    boxes = {rank: [fragment.box for fragment in of.fragments] for rank, of in loaded.items()}
    stored = {rank: of.shape for rank, of in loaded.items() if of.unshared and _plain(of, len(shape))}
    key = (shape, dtype, str(sorted(boxes.items())), str(sorted(stored.items())))
    if key not in known:
        joined = {rank: union(found) for rank, found in boxes.items()}
        try:
            known[key] = infer(mesh, shape, dtype, boxes, stored)
        except LayoutError as error:
            known[key] = str(error)
            if joined != boxes:  # pieces apart in the parameter can be neighbours in the tensor
                with suppress(LayoutError):
                    known[key] = infer(mesh, shape, dtype, joined, stored)
    found = known[key]
    if isinstance(found, str):
        raise LayoutError(found)
    return found


def _plain(loaded: _Loaded, dimensions: int) -> bool:
    """Return whether a parameter has the dimensions of the one tensor that it holds, in their order."""
    steps = contiguous(loaded.shape)
    return len(steps) == dimensions and all(
        step in (0, of) for fragment in loaded.fragments for step, of in zip(fragment.strides, steps, strict=True)
    )


def _place(shard: Shard, loaded: _Loaded) -> Place:
    """The one strided view of a parameter that is the shard, or the pieces that make it."""
    if not loaded.fragments:
        raise LayoutError(f"{loaded.parameter} holds none of it")
    one = _regular(shard, loaded)
    pieces = (one,) if one else tuple(_piece(shard, fragment) for fragment in loaded.fragments)
    return Place(loaded.parameter, loaded.shape, shard.shape, pieces)


def _piece(shard: Shard, fragment: Fragment) -> Piece:
    for box, place in zip(shard.boxes, shard.places, strict=True):
        if all(low <= begin and end <= high for (low, high), (begin, end) in zip(box, fragment.box, strict=True)):
            begin = tuple(at + of[0] - low for at, of, (low, _) in zip(place, fragment.box, box, strict=True))
            return Piece(begin, tuple(high - low for low, high in fragment.box), fragment.offset, fragment.strides)
    raise LayoutError(f"the shard has no box around {quoted(fragment.box)}")


def _regular(shard: Shard, loaded: _Loaded) -> Piece | None:
    by_box = {fragment.box: fragment for fragment in loaded.fragments}
    if any(box not in by_box for box in shard.boxes):
        return None
    strides = [max(fragment.strides[dim] for fragment in loaded.fragments) for dim in range(len(shard.shape))]
    first, begin = by_box[shard.boxes[0]], shard.places[0]
    for dim, length in enumerate(shard.shape):
        if length > 1 and not strides[dim]:  # pieces of one element: the step is how far apart they are
            for box, place in zip(shard.boxes, shard.places, strict=True):
                if sum(a != b for a, b in zip(place, begin, strict=True)) == 1 and place[dim] != begin[dim]:
                    strides[dim] = (by_box[box].offset - first.offset) // (place[dim] - begin[dim])
    offset = first.offset - sum(place * step for place, step in zip(begin, strides, strict=True))
    for box, place in zip(shard.boxes, shard.places, strict=True):
        fragment = by_box[box]
        there = offset + sum(a * step for a, step in zip(place, strides, strict=True))
        steps = zip(fragment.strides, strides, box, strict=True)
        if fragment.offset != there or any(a != b and high - low > 1 for a, b, (low, high) in steps):
            return None
    last = offset + sum((size - 1) * step for size, step in zip(shard.shape, strides, strict=True))
    if not 0 <= last < max(prod(loaded.shape), 1):
        return None
    return Piece((0,) * len(shard.shape), shard.shape, offset, tuple(strides))
