"""Tensor classes: tensors that have the same shape, dtype and shardings on both sides are planned once.

A model has thousands of names and few classes. The bytes that a class needs are closed form: the shards of source and
target meet in each dimension by themselves, and a pair of shards has in common the product of what it has in each:

```
source ("tp", None) of tp=2            target (None, "tp") of tp=2          pairs (source, target, elements)
shard 0  rows 0..1                     shard 0  columns 0..2                (0, 0, 6)  (0, 1, 6)
shard 1  rows 2..3                     shard 1  columns 3..5                 (1, 0, 6)  (1, 1, 6)
```
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from rankmesh.core.boxes import Box
from rankmesh.core.cuts import Overlaps, overlaps
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding, ShardMap
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlanError

__all__ = ["Copies", "TensorClass", "classes_of", "digest_of"]

# Ranks, ascending, each with further ranks that have a copy of its shard.
Copies = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class TensorClass:
    """The names of tensors with the same shape, dtype and shardings, in order; ``source`` and ``target`` of each.

    ``copies``: the copies of source shards that ranks have beside the shards that the sharding gives them.
    ``holders``, ``receivers``: the ranks of the shards of source and target.
    """

    names: tuple[str, ...]
    source: Sharding
    target: Sharding
    copies: Copies
    holders: ShardMap
    receivers: ShardMap

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.source.itemsize

    @cached_property
    def kept(self) -> dict[int, tuple[int, ...]]:
        """The ranks that have a copy of a source shard beside those that hold it, by shard."""
        found: dict[int, list[int]] = {}
        shards = self.holders.shard_of(np.array([rank for rank, _ in self.copies], dtype=np.int64)).tolist()
        for shard, (_, ranks) in zip(shards, self.copies, strict=True):
            found.setdefault(shard, []).extend(ranks)
        return {
            shard: tuple(sorted(set(ranks).difference(self.holders.ranks[shard].tolist())))
            for shard, ranks in found.items()
            if shard >= 0
        }

    def target_of(self, rank: int) -> int:
        """Return the target shard of a rank, -1 if it has none."""
        return int(self.receivers.shard_of(np.array([rank]))[0])

    def sources(self, rank: int) -> list[int]:
        """Return the source shards that a rank has: its own first, then the shards of which it keeps copies."""
        local = int(self.holders.shard_of(np.array([rank]))[0])
        return [local] * (local >= 0) + [shard for shard, ranks in self.kept.items() if rank in ranks]

    def away(self, source: IntArray, ranks: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each rank (pairs, copies) lacks the source shard of its pair."""
        away = np.asarray(self.holders.shard_of(ranks) != source[:, None])
        if self.copies:
            shards = prod(self.holders.shards)
            kept = [rank * shards + shard for shard, of in self.kept.items() for rank in of]
            away &= ~np.isin(ranks * shards + source[:, None], kept)
        return away

    @cached_property
    def _overlaps(self) -> tuple[Overlaps, ...]:
        return tuple(overlaps(ours, theirs) for ours, theirs in zip(self.source.cuts, self.target.cuts, strict=True))

    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the pairs of shards that have something in common: source shard, target shard, elements."""
        source, target, elements = (np.array([start], dtype=np.int64) for start in (0, 0, 1))
        for shared, ours, theirs in zip(self._overlaps, self.source.cuts, self.target.cuts, strict=True):
            left, right, lengths = shared.pairs
            source = (source[:, None] * ours.shards + left).reshape(-1)
            target = (target[:, None] * theirs.shards + right).reshape(-1)
            elements = (elements[:, None] * lengths).reshape(-1)
        return source, target, elements

    def boxes(self, source: int, target: int) -> list[Box]:
        """Return the boxes of the whole tensor that a pair of shards has in common, in order."""
        sides = []
        for shared, ours, theirs in zip(
            self._overlaps[::-1], self.source.cuts[::-1], self.target.cuts[::-1], strict=True
        ):
            source, left = divmod(source, ours.shards)
            target, right = divmod(target, theirs.shards)
            sides.append(shared.between(left, right))
        return list(product(*sides[::-1]))


def classes_of(
    source: Mapping[str, Sharding], target: Mapping[str, Sharding], copies: Mapping[str, Copies]
) -> tuple[TensorClass, ...]:
    """Return the classes of a transfer, wide elements first, whatever the order of the names."""
    found: dict[tuple[object, ...], list[str]] = {}
    known: dict[tuple[object, ...], tuple[object, ...]] = {}
    for name in sorted(target):
        ours, theirs = source[name], target[name]
        kept = copies.get(name, ())
        how = (id(ours.shard_map), id(ours.cuts), id(theirs.shard_map), id(theirs.cuts), ours.dtype, id(kept))
        if how not in known:
            _check(name, ours, theirs)
            known[how] = (_stated(ours), _stated(theirs), kept)
        found.setdefault(known[how], []).append(name)
    classes = [
        TensorClass(tuple(names), ours, theirs, copies.get(names[0], ()), ours.shard_map, theirs.shard_map)
        for names in found.values()
        for ours, theirs in [(source[names[0]], target[names[0]])]
    ]
    return tuple(sorted(classes, key=lambda one: -one.itemsize))


def _stated(sharding: Sharding) -> tuple[object, ...]:
    """Return a key that is equal for equal shardings."""
    where = sharding.shard_map
    return where.mesh, where.axes, where.at, sharding.cuts, sharding.dtype


def _check(name: str, source: Sharding, target: Sharding) -> None:
    for what in ("shape", "dtype"):
        ours, theirs = getattr(source, what), getattr(target, what)
        if ours != theirs:
            raise PlanError(
                f"{name!r} has {what} {ours} as source and {theirs} as target; a transfer moves elements unchanged; "
                f"give both one {what}: reshape or convert before or after",
                name=name,
                source=ours,
                target=theirs,
            )


def digest_of(classes: tuple[TensorClass, ...], cluster: object, **further: object) -> str:
    """Return 64 hexadecimal digits, equal for equal transfers: of the meshes once, and each class with its names.

    ``further`` values, such as lost ranks, are part of it where they are not empty.
    """
    meshes: dict[Mesh, int] = {}
    stated = [
        {
            "names": one.names,
            "source": [meshes.setdefault(one.source.mesh, len(meshes)), one.source.to_dict()],
            "target": [meshes.setdefault(one.target.mesh, len(meshes)), one.target.to_dict()],
            **({"copies": one.copies} if one.copies else {}),
        }
        for one in classes
    ]
    document = {"kinds": stated, "meshes": [mesh.to_dict() for mesh in meshes], "cluster": cluster}
    document.update({name: value for name, value in further.items() if value})
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
