"""Kinds: tensors that lie alike on both sides are planned once.

A model has thousands of names and few kinds: shape, dtype and both shardings. What a kind asks for is closed form: the
cells of source and target meet in each dimension by themselves, and a pair of cells shares the product of what they
share in each:

```
source ("tp", None) of tp=2            target (None, "tp") of tp=2          pairs (source cell, target cell, elements)
cell 0  rows 0..1                      cell 0  columns 0..2                 (0, 0, 6)  (0, 1, 6)
cell 1  rows 2..3                      cell 1  columns 3..5                 (1, 0, 6)  (1, 1, 6)
```
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from rankmesh.core.boxes import Box
from rankmesh.core.cells import Overlaps, overlaps
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlanError

__all__ = ["Kind", "digest_of", "kinds_of"]


@dataclass(frozen=True, eq=False)
class Kind:
    """Tensors of one shape and dtype that lie alike, by name in order; ``source`` and ``target`` are of any of them."""

    names: tuple[str, ...]
    source: Sharding
    target: Sharding

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.source.itemsize

    @cached_property
    def _met(self) -> tuple[Overlaps, ...]:
        return tuple(overlaps(ours, theirs) for ours, theirs in zip(self.source.cuts, self.target.cuts, strict=True))

    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """The pairs of cells that share something: source cell, target cell, elements."""
        source, target, elements = (np.array([start], dtype=np.int64) for start in (0, 0, 1))
        for met, ours, theirs in zip(self._met, self.source.cuts, self.target.cuts, strict=True):
            left, right, lengths = met.pairs
            source = (source[:, None] * ours.cells + left).reshape(-1)
            target = (target[:, None] * theirs.cells + right).reshape(-1)
            elements = (elements[:, None] * lengths).reshape(-1)
        return source, target, elements

    def boxes(self, source: int, target: int) -> list[Box]:
        """What a pair of cells shares, as boxes of the whole tensor, in order."""
        sides = []
        for met, ours, theirs in zip(self._met[::-1], self.source.cuts[::-1], self.target.cuts[::-1], strict=True):
            source, left = divmod(source, ours.cells)
            target, right = divmod(target, theirs.cells)
            sides.append(met.between(left, right))
        return list(product(*sides[::-1]))


def kinds_of(source: Mapping[str, Sharding], target: Mapping[str, Sharding]) -> tuple[Kind, ...]:
    """The kinds of a transfer, wide elements first, whatever the order in which the names are given."""
    found: dict[tuple[object, ...], list[str]] = {}
    known: dict[tuple[object, ...], tuple[object, ...]] = {}
    for name in sorted(target):
        ours, theirs = source[name], target[name]
        how = (id(ours.spread), id(ours.cuts), id(theirs.spread), id(theirs.cuts), ours.dtype)
        if how not in known:
            _check(name, ours, theirs)
            known[how] = (_stated(ours), _stated(theirs))
        found.setdefault(known[how], []).append(name)
    kinds = [Kind(tuple(names), source[names[0]], target[names[0]]) for names in found.values()]
    return tuple(sorted(kinds, key=lambda kind: -kind.itemsize))


def _stated(sharding: Sharding) -> tuple[object, ...]:
    """A sharding as a key that is equal where it is equal, however often it was made."""
    spread = sharding.spread
    return spread.mesh, spread.view, spread.axes, spread.at, sharding.cuts, sharding.dtype


def _check(name: str, source: Sharding, target: Sharding) -> None:
    for what in ("shape", "dtype"):
        ours, theirs = getattr(source, what), getattr(target, what)
        if ours != theirs:
            raise PlanError(
                f"received {name!r} of {what} {ours} as source and {theirs} as target; a transfer moves elements as "
                f"they are; give both one {what}: reshape or convert before or after",
                name=name,
                source=ours,
                target=theirs,
            )


def digest_of(kinds: tuple[Kind, ...], cluster: object) -> str:
    """64 hexadecimal digits, equal for equal transfers: the meshes once, and each kind with its names."""
    meshes: dict[Mesh, int] = {}
    stated = [
        {
            "names": kind.names,
            "source": [meshes.setdefault(kind.source.mesh, len(meshes)), kind.source.to_dict()],
            "target": [meshes.setdefault(kind.target.mesh, len(meshes)), kind.target.to_dict()],
        }
        for kind in kinds
    ]
    document = {"kinds": stated, "meshes": [mesh.to_dict() for mesh in meshes], "cluster": cluster}
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
