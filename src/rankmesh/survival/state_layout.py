"""The layout of an epoch's state: its shardings, and who keeps copies; a value that members exchange as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# Numpy loads this when it looks for distinct values first: now, and not while all ranks wait after a loss.
import numpy.ma  # noqa: F401

from rankmesh.core.mesh import Mesh, MeshData
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, quoted
from rankmesh.survival.redundancy import ReplicaHolders
from rankmesh.transfer import Transfer

__all__ = ["StateLayout", "transfer"]


@dataclass(frozen=True)
class StateLayout:
    """The shardings of an epoch by name, on one mesh; the hosts of its ranks, and how many of them keep copies.

    A model has thousands of names and few shardings: the text has each once.

    >>> mesh = Mesh(tp=2)
    >>> layout = StateLayout(mesh, {name: Sharding(mesh, ("tp",), shape=(8,)) for name in "ab"}, ("node1", "node1"), 0)
    >>> layout.text.count("shape"), StateLayout.read(layout.text) == layout
    (1, True)
    """

    mesh: Mesh
    shardings: Mapping[str, Sharding]
    hosts: tuple[str, ...]
    redundancy: int

    @cached_property
    def text(self) -> str:
        """All of it as JSON."""
        numbers: dict[Sharding, int] = {}
        different: list[object] = []
        numbered = {}
        for name, one in self.shardings.items():
            numbered[name] = numbers.setdefault(one, len(numbers))
            if numbered[name] == len(different):
                different.append(one.to_dict())
        return json.dumps([self.mesh.to_dict(), different, numbered, self.hosts, self.redundancy])

    @cached_property
    def holders(self) -> ReplicaHolders:
        """The ranks that hold copies of each rank's shards."""
        return ReplicaHolders(self.shardings, self.hosts, self.redundancy)

    @classmethod
    def read(cls, text: str) -> StateLayout:
        """Return what a text of another member states."""
        mesh, different, numbered, hosts, redundancy = json.loads(text)
        here = Mesh.from_dict(mesh)
        shardings = [Sharding.from_dict(here, data) for data in different]
        return cls(here, {name: shardings[number] for name, number in numbered.items()}, tuple(hosts), redundancy)

    def on(self, mesh: Mesh) -> dict[str, Sharding]:
        """Return the shardings on this mesh, which has the same axes."""
        moved = {one: replace(one, mesh=mesh) for one in dict.fromkeys(self.shardings.values())}
        return {name: moved[one] for name, one in self.shardings.items()}


def transfer(before: StateLayout, now: StateLayout, positions: Sequence[int], lost: Sequence[int]) -> Transfer:
    """Return the transfer between what two epochs held, from the ranks that the old one's members have now.

    Raises ``PlanError`` for a tensor that the old one did not hold, or in another shape or dtype.
    """
    if names := tuple(sorted(now.shardings.keys() - before.shardings.keys())):
        raise PlanError(
            f"hold() was given {quoted(names[0])}, which no rank held before the change ({len(names)} of "
            f"{len(now.shardings)} names); hold the same names under every plan",
            names=names,
        )
    copies: dict[int, dict[int, list[int]]] = {}
    by_name = before.holders.by_name
    for of in by_name.values():
        if id(of) not in copies:  # many tensors have one
            copies[id(of)] = {positions[rank]: [positions[one] for one in ranks] for rank, ranks in of.items()}
    # The same mesh of other ranks, in no order.
    ranks: MeshData = {"offset": min(positions), "rank_map": list(positions), "consecutive": False}
    moved = before.on(Mesh.from_dict({**before.mesh.to_dict(), **ranks}))
    return Transfer(
        {name: one for name, one in moved.items() if name in now.shardings},
        now.on(now.mesh),
        lost=lost,
        copies={name: copies[id(of)] for name, of in by_name.items()},
        partial=True,
    )
