"""Jobs: several meshes in one world.

```
world        0 ........ 15 16 ........................ 47
encoder      [ tp 2, dp 8 ]
llm                         [ tp 4, dp 4, pp 2         ]        disjoint
```

Two meshes of a job are disjoint, or colocated (exactly the same ranks). Anything between is refused, because a rank
would then wait in one mesh for a rank that is busy in another. A job covers its world unless it has ``partial=True``.
The ranks of a mesh may have gaps, such as in a slice of another mesh.

>>> from rankmesh.core.mesh import Mesh
>>> job = Job(world_size=48, encoder=Mesh(tp=2, dp=8), llm=Mesh(tp=4, dp=4, pp=2, offset=16))
>>> job.of(20)
('llm',)
>>> job["llm"].coordinate(20)
{'tp': 0, 'dp': 1, 'pp': 0}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rankmesh.core.axes import axis_name, find, integer
from rankmesh.core.mesh import Mesh
from rankmesh.errors import LayoutError, quoted

__all__ = ["Job"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Job(Mapping[str, Mesh]):
    """Named meshes over one world of ``world_size`` ranks, a mapping from name to mesh.

    ``partial``   whether some ranks of the world may be in no mesh
    """

    world_size: int
    partial: bool
    _meshes: dict[str, Mesh]

    def __init__(self, /, *, world_size: int, partial: bool = False, **meshes: Mesh) -> None:
        vars(self).update(
            world_size=integer(world_size, "world_size", least=1),
            partial=bool(partial),
            _meshes={axis_name(name): mesh for name, mesh in meshes.items()},
        )
        if not meshes:
            raise LayoutError("the job has no meshes; give at least one, such as Job(world_size=8, llm=Mesh(dp=8))")
        for name, mesh in self._meshes.items():
            if not isinstance(mesh, Mesh):
                raise LayoutError(
                    f"mesh {name!r} is {quoted(mesh)}; give a Mesh, such as Mesh(dp=8)", name=name, received=mesh
                )
            _inside(name, mesh, self.world_size)
        for one, other in combinations(self._meshes, 2):
            _disjoint_or_colocated(one, self._meshes[one], other, self._meshes[other])
        if not partial:
            _covers(self._meshes, self.world_size)

    def of(self, rank: int) -> tuple[str, ...]:
        """Return the names of the meshes that a rank is in; several when they are colocated."""
        number = integer(rank, "rank", least=0)
        if number >= self.world_size:
            raise LayoutError(
                f"rank {number} is outside the world of ranks 0 to {self.world_size - 1}; ask for a rank inside",
                rank=number,
                world_size=self.world_size,
            )
        return tuple(name for name, mesh in self._meshes.items() if number in mesh.rank_range)

    def __getitem__(self, name: str) -> Mesh:
        return self._meshes[find(name, self._meshes, "mesh")]

    def __iter__(self) -> Iterator[str]:
        return iter(self._meshes)

    def __len__(self) -> int:
        return len(self._meshes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Job):
            return NotImplemented
        return (self.world_size, self._meshes) == (other.world_size, other._meshes)

    def __hash__(self) -> int:
        return hash((self.world_size, frozenset(self._meshes.items())))

    def __repr__(self) -> str:
        meshes = ", ".join(f"{name}={mesh!r}" for name, mesh in self._meshes.items())
        return f"Job(world_size={self.world_size}, {'partial=True, ' if self.partial else ''}{meshes})"


def _inside(name: str, mesh: Mesh, world_size: int) -> None:
    if mesh.rank_range.stop > world_size:
        raise LayoutError(
            f"mesh {name!r} covers {mesh.rank_range}, but the last rank of a world of {world_size} is "
            f"{world_size - 1}; lower its offset or a size, or raise world_size to {mesh.rank_range.stop}",
            name=name,
            last=mesh.rank_range.stop - 1,
            world_size=world_size,
        )


def _disjoint_or_colocated(one: str, left: Mesh, other: str, right: Mesh) -> None:
    shared = int((left.rank_range.positions(right.rank_range.ascending) >= 0).sum())
    if shared and not shared == left.size == right.size:
        raise LayoutError(
            f"meshes {one!r} over {left.rank_range} and {other!r} over {right.rank_range} overlap on {shared} of their "
            "ranks; two meshes share all ranks or none; move one with offset=, or lay both over the same ranks",
            meshes=(one, other),
        )


def _covers(meshes: Mapping[str, Mesh], world_size: int) -> None:
    idle = np.ones(world_size + 2, dtype=np.int8)
    idle[[0, -1]] = 0
    for mesh in meshes.values():
        idle[mesh.rank_range.ascending + 1] = 0
    edges = np.flatnonzero(np.diff(idle))
    if len(edges):
        free = tuple((int(low), int(high) - 1) for low, high in edges.reshape(-1, 2).tolist())
        shown = ", ".join(f"{low} to {high}" for low, high in free[:8]) + (" ..." if len(free) > 8 else "")
        raise LayoutError(
            f"the meshes of the job leave out ranks {shown} of {world_size}; enlarge a mesh, or say partial=True if "
            "these ranks are meant to be idle",
            free=free,
            world_size=world_size,
        )
