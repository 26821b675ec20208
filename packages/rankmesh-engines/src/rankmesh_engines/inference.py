"""Inference: the boxes that every rank holds of a tensor, as one sharding; without torch.

```
rank 0  rows 0..3     rank 1  rows 4..7     rank 2  rows 0..3     rank 3  rows 4..7
mesh tp=2, dp=2   ->  Sharding(mesh, ("tp", None), (8, 6))        dp holds copies
```

A candidate is built from what varies along which axis, and taken only if it gives each rank exactly its boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from math import prod

from rankmesh.core.boxes import Box
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError

__all__ = ["infer"]

# Along one dimension, the ranges that a rank holds.
Ranges = tuple[tuple[int, int], ...]


def infer(
    mesh: Mesh,
    shape: Sequence[int],
    dtype: str,
    boxes: Mapping[int, Sequence[Box]],
    stored: Mapping[int, Sequence[int]] | None = None,
) -> Sharding:
    """Return the sharding of a tensor whose boxes by rank are these; a rank that is not named holds nothing.

    ``stored`` are the shapes of the ranks' own tensors, padding included, where they are known. Raises
    ``LayoutError`` where no sharding is exact.

    >>> rows = {rank: [((rank % 2 * 4, rank % 2 * 4 + 4), (0, 6))] for rank in range(4)}
    >>> infer(Mesh(tp=2, dp=2), (8, 6), "float32", rows).cut
    ('tp', None)
    """
    owned = {rank: tuple(sorted(found)) for rank, found in boxes.items() if found}
    shapes = {rank: tuple(of) for rank, of in (stored or {}).items()}
    if not owned:
        raise LayoutError("no rank loads it")
    ranges = {rank: _ranges(found) for rank, found in owned.items()}
    for view in (None, *mesh.views):
        for split in _splits(mesh, view):
            for candidate in _candidates(split, view, tuple(shape), dtype, ranges, shapes):
                if _exact(candidate, owned, shapes):
                    return candidate
    first, last = min(owned), max(owned)
    raise LayoutError(
        f"no cut over the axes {', '.join(mesh.axes)} gives its boxes: rank {first} has {_shown(owned[first])}, rank "
        f"{last} has {_shown(owned[last])}"
    )


def _exact(candidate: Sharding, owned: Mapping[int, Sequence[Box]], shapes: Mapping[int, tuple[int, ...]]) -> bool:
    for rank in candidate.mesh.rank_range.ascending:
        shard = candidate.of(rank)
        if tuple(sorted(shard.boxes)) != owned.get(rank, ()) or shard.shape != shapes.get(rank, shard.shape):
            return False
    return True


def _shown(boxes: Sequence[Box]) -> str:
    text = ", ".join(f"[{', '.join(f'{low}:{high}' for low, high in box)}]" for box in boxes[:2])
    return f"{text} and {len(boxes) - 2} more" if len(boxes) > 2 else text


def _ranges(boxes: Sequence[Box]) -> tuple[Ranges, ...]:
    """Return the ranges along each dimension, whose product the boxes are."""
    ranges = tuple(tuple(sorted({box[dim] for box in boxes})) for dim in range(len(boxes[0])))
    if sorted(product(*ranges)) != sorted(boxes):
        raise LayoutError(f"the boxes of a rank, {_shown(boxes)}, are not a product of ranges")
    return ranges


def _splits(mesh: Mesh, view: str | None) -> Iterator[Mesh]:
    """Return the mesh, and the mesh with one axis split, where neighbours along an axis hold copies."""
    yield mesh
    if view is not None:
        return
    for axis, size in mesh.axes.items():
        for inner in range(2, size):
            if size % inner == 0:
                yield mesh.split(axis, view=None, **{f"{axis}_copy": inner, f"{axis}_cut": size // inner})


def _candidates(
    mesh: Mesh,
    view: str | None,
    shape: tuple[int, ...],
    dtype: str,
    ranges: Mapping[int, tuple[Ranges, ...]],
    shapes: Mapping[int, tuple[int, ...]],
) -> Iterator[Sharding]:
    where = {rank: mesh.coordinate(rank, view=view) for rank in ranges}
    axes = {
        axis: size for axis, size in mesh.view(view).axes.items() if size > 1 and axis in next(iter(where.values()))
    }
    places = {axis: tuple(sorted({of[axis] for of in where.values()})) for axis in axes}
    at: dict[str, int | tuple[int, ...]] = {a: p for a, p in places.items() if len(p) < axes[a]}
    if prod(len(p) for p in places.values()) != len(ranges):
        at = {}
    orders, parts = [], {}
    for dim, length in enumerate(shape):
        cut = {rank: of[dim] for rank, of in ranges.items()}
        varying = [axis for axis in axes if axis not in at and _varies(cut, where, axis)]
        orders.append([None] if not varying else ["-".join(order) for order in permutations(varying)])
        count = max(map(len, cut.values()))
        if count > 1:
            parts[dim] = _parts(cut, count, length)
    for cut_axes in product(*orders):
        cutting = [axis for names in cut_axes for axis in (names or "").split("-") if axis]
        if len(set(cutting)) < len(cutting):
            continue
        for padded in _padded(cut_axes, shape, shapes, axes, parts):
            yield Sharding(mesh, cut_axes, shape, dtype, at or None, view, parts or None, padded or None)


def _padded(
    cut: Sequence[str | None],
    shape: Sequence[int],
    shapes: Mapping[int, tuple[int, ...]],
    axes: Mapping[str, int],
    parts: Mapping[int, object],
) -> Iterator[dict[int, int]]:
    """Without padding; and with the padding of some dimensions that shards of the longest stored length make."""
    yield {}
    if shapes:
        longest = [max(of[dim] for of in shapes.values()) for dim in range(len(shape))]
        ways = [prod(axes[axis] for axis in (names or "").split("-") if axis) for names in cut]
        made = {
            d: longest[d] * ways[d]
            for d, length in enumerate(shape)
            if longest[d] * ways[d] > length and d not in parts
        }
        for count in range(1, len(made) + 1):
            yield from map(dict, combinations(made.items(), count))


def _varies(cut: Mapping[int, Ranges], where: Mapping[int, Mapping[str, int]], axis: str) -> bool:
    """Return whether two ranks that differ along this axis only hold different ranges."""
    seen: dict[tuple[int, ...], Ranges] = {}
    for rank, owned in cut.items():
        rest = tuple(place for name, place in where[rank].items() if name != axis)
        if seen.setdefault(rest, owned) != owned:
            return True
    return False


def _parts(cut: Mapping[int, Ranges], count: int, length: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a fused dimension: the k-th begins where the lowest k-th range does."""
    starts = [min(owned[k][0] for owned in cut.values() if len(owned) > k) for k in range(count)]
    starts = sorted({0, *starts[1:]})
    return tuple(high - low for low, high in zip(starts, [*starts[1:], length], strict=True))
