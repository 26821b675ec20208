"""State: what a member holds and has kept of its last steps, and how that comes to where it is needed next.

```
step 6   step 7          two snapshots: the older one is overwritten by the next commit
  A        B
```

After a change every member of the new world calls ``restore``: a transfer from the snapshots of the members that are
left, at the shardings of the epoch in which they were taken, to the tensors and shardings of the new one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.transfer import Transfer

__all__ = ["Held", "Snapshots", "restore"]


class Snapshots:
    """Copies of a member's tensors at the beginning of two steps, the last ones that it has committed."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, Tensor]] = {}

    @property
    def steps(self) -> list[int]:
        """The steps at whose beginning a copy was made."""
        return sorted(self._by_step)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return self._by_step[step]

    @property
    def bytes(self) -> int:
        """Bytes of memory that the copies take."""
        return sum(tensor.nbytes for kept in self._by_step.values() for tensor in kept.values())

    def take(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors as they are now, at the beginning of a step, over the oldest copy."""
        kept = self._by_step.pop(step, None)
        if kept is None and len(self._by_step) > 1:
            kept = self._by_step.pop(min(self._by_step))
        if kept is None or kept.keys() != tensors.keys():
            kept = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                kept[name].copy_(tensor)
        self._by_step[step] = kept


@dataclass
class Held:
    """What a member held in an epoch: its tensors by name, how each is sharded, and the copies."""

    epoch: int
    mesh: Mesh
    tensors: dict[str, Tensor] = field(repr=False)
    shardings: dict[str, Sharding] = field(repr=False)
    snapshots: Snapshots = field(default_factory=Snapshots, repr=False)

    @property
    def text(self) -> str:
        """The mesh and the shardings as JSON, for members that do not have them."""
        return json.dumps([self.mesh.to_dict(), {name: one.to_dict() for name, one in self.shardings.items()}])


class Shares(Protocol):
    """What this needs of the world of an epoch."""

    rank: int
    size: int

    def give(self, key: str, text: str) -> None:
        """Give the other members a text."""

    def taken(self, key: str) -> str:
        """A text that another member gives, or will."""


def restore(
    world: Shares, old: Held | None, step: int, positions: Sequence[int], new: Held | None, seconds: timedelta
) -> Collection[int]:
    """Bring what was held at the beginning of ``step`` to where it is held now; every rank of the world calls it.

    ``positions`` are the ranks of this world that the members of the old epoch have now, in the order of their ranks
    then; of those that are lost they are beyond the world. Rank 0 holds something of the new epoch. Raises
    ``LostState`` on every rank where nobody is left who held a part. The ranks beyond the world.
    """
    size = world.size
    source = min(position for position in positions if position < size)
    if old is not None and world.rank == source:
        world.give("before", old.text)
    if new is not None and world.rank == 0:
        world.give("now", new.text)
    before = json.loads(world.taken("before") if old is None else old.text)
    now = json.loads(world.taken("now") if new is None else new.text)
    lost = [position for position in positions if position >= size]
    moved = {**before[0], "offset": min(positions), "rank_map": list(positions), "consecutive": False}
    old_mesh, new_mesh = Mesh.from_dict(moved), Mesh.from_dict(now[0])
    moves = Transfer(
        {name: Sharding.from_dict(old_mesh, data) for name, data in before[1].items() if name in now[1]},
        {name: Sharding.from_dict(new_mesh, data) for name, data in now[1].items()},
        lost=lost,
    )
    kept = {} if old is None else {name: tensor for name, tensor in old.snapshots[step].items() if name in now[1]}
    moves.run(kept, {} if new is None else new.tensors, timeout=seconds)
    return lost
