"""Loaders: a framework's loader run as every rank in turn, and the layout that this gives.

```
checkpoint  q_proj.weight (64, 64)  ── load(rank, tensors without storage) ──>  qkv_proj.weight on each rank
            rows 0..31 of it on rank 0, rows 32..63 on rank 1                   cut ("tp", None) of tp=2
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rankmesh.backend.fake_world import fake_world
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Shard, Sharding
from rankmesh.errors import LayoutError, quoted
from rankmesh.transfer.layouts.layout import HOOK, Layout, Piece, Place
from rankmesh.transfer.layouts.refusals import refusal
from rankmesh.transfer.live.shards import local
from rankmesh_engines.inference import infer
from rankmesh_engines.strided import Fragment, contiguous, union
from rankmesh_engines.trace import Trace

__all__ = ["Side", "Weights"]

# The tensors of a checkpoint: shape and dtype by name.
Weights = Mapping[str, tuple[tuple[int, ...], str]]


class _Loaded(NamedTuple):
    """The part of one tensor that one rank holds."""

    parameter: str
    fragments: list[Fragment]
    shape: tuple[int, ...]
    unshared: bool


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
    hook: str = HOOK

    def read(self) -> Layout:
        """Run the loader as each rank in turn, on tensors without storage, and return how it shards every tensor.

        Raises ``LayoutError`` where the framework cannot construct or load the model, ``ConnectError`` inside a job.
        """
        mesh, weights = self.mesh, self.weights
        loaded: dict[str, dict[int, _Loaded]] = {name: {} for name in weights}
        refused: dict[str, str] = {}
        empty: dict[str, None] = {}
        for rank in mesh.rank_range.ascending.tolist():
            with fake_world(rank, mesh.size), Trace() as trace:
                tensors = {
                    name: trace.source(name, shape, getattr(torch, kind)) for name, (shape, kind) in weights.items()
                }
                try:
                    parameters = self.load(rank, tensors)
                except Exception as error:
                    what = f"{self.name} cannot load this model as rank {rank}"
                    raise refusal(what, self.name, error, rank=rank) from error
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
                        if kernel := self.kernels.get(parameter):
                            refused[name] = f"{parameter} is {kernel}, a form made after loading; {self.hook}"
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
        unfilled = tuple(name for name in empty if name not in filled)
        return Layout(self.name, mesh, shardings, refused, unfilled, places, self.hook)


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
    """Return the one strided view of a parameter that is the shard, or the pieces that make it."""
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
