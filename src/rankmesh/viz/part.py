"""The part of a large mesh that a picture shows: what repeats is drawn once.

```
tp=8, pp=16, dp=128      16,384 ranks      dp=0 of 128                128 ranks: one replica
tp=2, dp=1024             2,048 ranks      dp=0 to 31 of 1024          64 ranks
```

The largest axis is cut first, to one position where the rest is enough to see.

>>> from rankmesh.core import Mesh
>>> shown = part_of(Mesh(tp=8, pp=16, dp=128), 512)
>>> shown.sizes, shown.left_out, len(shown.ranks)
({'tp': 8, 'pp': 16, 'dp': 1}, 'dp=0 of 128', 128)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rankmesh.core.mesh import Mesh
from rankmesh.core.strided import IntArray, Strided

__all__ = ["Part", "part_of"]

# So many ranks are enough to see how groups lie.
_ENOUGH = 64


@dataclass(frozen=True)
class Part:
    """The first positions along each axis, the ranks there in order, and words for what is left out (none: empty)."""

    sizes: dict[str, int]
    ranks: IntArray
    left_out: str


def part_of(mesh: Mesh, most: int) -> Part:
    """Return the mesh itself up to ``most`` ranks; of a larger one the first positions along its largest axes."""
    sizes = dict(mesh.axes)
    while prod(sizes.values()) > most:
        name = max(sizes, key=lambda axis: (sizes[axis], mesh.strides[axis]))
        rest = prod(sizes.values()) // sizes[name]
        sizes[name] = max(1, min(sizes[name] - 1, _ENOUGH // rest))
    pattern = Strided(tuple((size, mesh.strides[name]) for name, size in sizes.items()))
    last = {name: f" to {sizes[name] - 1}" if sizes[name] > 1 else "" for name in sizes}
    cut = [f"{name}=0{last[name]} of {size}" for name, size in mesh.axes.items() if sizes[name] < size]
    return Part(sizes, mesh.rank_range.ranks(pattern.values()), ", ".join(cut))
