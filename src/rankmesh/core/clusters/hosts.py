"""Hosts: one by one as they are named, or a range of equal ones, which takes no memory for each of them.

>>> hosts = HostRange(size=12, devices=4, levels=(("leaf", 2), ("spine", 4)))
>>> len(hosts), hosts[2]
(3, Host(name='node2', devices=4, places=('leaf1', 'spine0'), inside=()))
>>> hosts == tuple(hosts)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

__all__ = ["Host", "HostRange"]


@dataclass(frozen=True)
class Host:
    """One host: its name, how many devices it has, and its unit at each level around it, innermost first.

    ``inside``  of each level inside the host, innermost first, the number of the unit of each device
    """

    name: str
    devices: int
    places: tuple[str, ...] = ()
    inside: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class HostRange(Sequence[Host]):
    """Hosts node0, node1 and so on, of ``devices`` each, but for what is left of ``size`` devices in the last.

    ``levels``  the name of each level around them, and of how many hosts a unit of it is; 0: all are in one unit,
                which has the level's name
    ``inside``  see `Host`
    """

    size: int
    devices: int
    levels: tuple[tuple[str, int], ...] = ()
    inside: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return -(-self.size // self.devices)

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Host, ...]: ...
    def __getitem__(self, index: int | slice) -> Host | tuple[Host, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        places = tuple(f"{name}{number // step}" if step else name for name, step in self.levels)
        return Host(f"node{number}", min(self.devices, self.size - number * self.devices), places, self.inside)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HostRange):
            return self._key == other._key
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def _key(self) -> tuple[object, ...]:
        return self.size, min(self.devices, self.size), self.levels, self.inside

    @property
    def sizes(self) -> set[int]:
        """The different numbers of devices of a host."""
        return {self[0].devices, self[-1].devices}

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of devices in a unit of each level: inside the hosts, of the host, around it."""
        inside = (units.count(0) for units in self.inside)
        return (*inside, self.devices, *(self.devices * (step or len(self)) for _, step in self.levels))
