"""Both layouts of a sync as one transfer: an engine's ranks are numbered after the trainer's.

```
trainer  ranks 0..15                       trainer  ranks 0..15
engine   ranks 0..7, of another job   ──>  engine   ranks 16..23
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding, at_of
from rankmesh.transfer.planning.transfer import Transfer

__all__ = ["Layouts", "ranks_of", "single"]


class Layouts:
    """The shardings of a trainer and of its engines, by name; of the trainer's, those that engines have."""

    def __init__(self, trainer: Mapping[str, Sharding], engine: Mapping[str, Sharding]) -> None:
        unmoved = Transfer(trainer, engine)  # checks names, shapes and dtypes
        self.trainer, self.engine = unmoved.source, unmoved.target
        self.trainer_ranks, self.engine_ranks = ranks_of(self.trainer), ranks_of(self.engine)
        self.shift = self.trainer_ranks[-1] + 1 if self.trainer_ranks else 0
        meshes: dict[Mesh, Mesh] = {}
        self.moved = {
            name: replace(s, mesh=meshes.setdefault(s.mesh, s.mesh.replace(offset=s.mesh.offset + self.shift)))
            for name, s in self.engine.items()
        }

    @cached_property
    def direct(self) -> Transfer:
        """Each rank of an engine receives from whichever trainer rank the plan chooses."""
        return Transfer(self.trainer, self.moved)

    @cached_property
    def stored(self) -> Transfer:
        """The transfer in which one rank alone sends each element: the replicas of different tensors take turns."""
        unique = {name: single(s, number) for number, (name, s) in enumerate(self.trainer.items())}
        return Transfer(unique, self.moved)


def ranks_of(shardings: Mapping[str, Sharding]) -> tuple[int, ...]:
    """Return the ranks of all meshes, ascending."""
    meshes = {s.mesh for s in shardings.values()}
    return tuple(sorted({rank for mesh in meshes for rank in mesh.rank_range.members}))


def single(sharding: Sharding, turn: int) -> Sharding:
    """Return the sharding of one replica alone, the ``turn``-th, counted round.

    >>> up = Sharding(Mesh(tp=2, dp=2), ("tp",), shape=(8,))
    >>> [[rank for rank in range(4) if single(up, turn).holds(rank)] for turn in (0, 1, 2)]
    [[0, 1], [2, 3], [0, 1]]
    """
    view = sharding.mesh.view(sharding.view)
    at: dict[str, int | tuple[int, ...]] = {}
    for axis, places in at_of(sharding.at):
        turn, place = divmod(turn, len(places))
        at[axis] = places[place]
    used = {axis for axes in sharding.shard_map.axes for axis in axes}
    used.update(axis for axis, _ in sharding.shard_map.at)
    for axis, size in view.axes.items():
        if size > 1 and not used.intersection(view.axis_pairs(axis).values()):
            turn, at[axis] = divmod(turn, size)
    return replace(sharding, at=at)
