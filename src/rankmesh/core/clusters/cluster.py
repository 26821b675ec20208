"""Clusters: the machine as nested levels, the hosts in natural order, and the device of each rank.

```
Cluster.parse("host=2,leaf=2,spine=2")       8 devices

spine  │        spine0                 level of two ranks: the innermost that both are in
leaf   │  leaf0    │  leaf1            0 1   host      (both on node0)
host   │ node0 node1 node2 node3       0 3   leaf
rank   │ 0 1 │ 2 3 │ 4 5 │ 6 7         0 4   spine
```

Hosts are in natural order (node2 before node10). Ranks fill them as they are listed: a launcher that takes node10 first
has its first ranks there, which ``rank_map`` records.

Levels may lie inside hosts, as sockets and PCIe switches do: the level named host (or node) is the host.

>>> str(Cluster.parse("pix=2,numa=2,host=2,leaf=4:25GB"))
'32 devices, 4 hosts of 8, levels pix numa host leaf'
>>> cluster = Cluster.parse("host=8,nvlink=9,leaf=4")
>>> cluster.host_of(8).name, cluster.level_of(np.array([0, 0, 0]), np.array([7, 8, 72])).tolist()
('node1', [0, 1, 2])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from math import prod
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh.core.axes import fill, integer, parse_axes
from rankmesh.core.clusters.hosts import Host, HostRange
from rankmesh.core.clusters.levels import OTHER_WORDS, Level, host_level, is_word, rate
from rankmesh.core.host_names import host_list, natural
from rankmesh.core.strided import IntArray
from rankmesh.errors import ClusterError, LayoutError, cut, quoted

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cluster", "Host", "Level"]

SCHEMA = 1

# More than any cluster has: a slip of the finger, which would take all memory.
_DEVICES = 2**21
_FORM = "a cluster has levels, each with a name, and hosts, each with a name and devices"
# The levels that join what a description leaves apart.
_JOINING = ("network", "cluster", "everything")


@dataclass(frozen=True, repr=False)
class Cluster:
    """Devices in hosts, hosts in the units of levels; frozen, hashable, equal when equivalent.

    ``levels``    innermost first: those inside hosts, the host itself, those around it. Units that nothing joins get
                  a level around them
    ``hosts``     given in the order in which ranks fill them, kept in natural order
    ``rank_map``  the rank at each device in natural order, None when they ascend
    ``notes``     what a person should know of how this was found; no part of the value

    Raises ``ClusterError`` for hosts with one name, and for units that lie in two others.
    """

    levels: tuple[Level, ...]
    hosts: Sequence[Host]
    rank_map: tuple[int, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        levels = tuple(self.levels)
        if isinstance(self.hosts, HostRange) and self.rank_map is None:
            _check_hosts(levels, self.hosts[:1])
            _check_total(self.hosts.size, self.hosts[0])
            levels, joined = _joined_range(levels, self.hosts)
            vars(self).update(levels=levels, hosts=joined)
            return
        hosts = tuple(self.hosts)
        _check_hosts(levels, hosts)
        _check_nesting(levels[len(hosts[0].inside) :], hosts)
        levels, hosts = _joined(levels, hosts)
        ranks = self._given(hosts)
        order = sorted(range(len(hosts)), key=lambda number: natural(hosts[number].name))
        parts = np.split(ranks, np.cumsum([host.devices for host in hosts])[:-1])
        listed = np.concatenate([parts[number] for number in order])
        rank_map = None if np.array_equal(listed, np.arange(listed.size)) else tuple(listed.tolist())
        vars(self).update(levels=levels, hosts=tuple(hosts[number] for number in order), rank_map=rank_map)

    def _given(self, hosts: tuple[Host, ...]) -> IntArray:
        """Return the rank of each device, in the order in which the hosts were given."""
        size = sum(host.devices for host in hosts)
        _check_total(size, max(hosts, key=lambda host: host.devices))
        if self.rank_map is None:
            return np.arange(size, dtype=np.int64)
        ranks = np.asarray(tuple(self.rank_map))
        if ranks.dtype.kind not in "iu" or not np.array_equal(np.sort(ranks), np.arange(size)):
            raise ClusterError(
                f"rank_map {quoted(ranks.tolist())} has {ranks.size} entries for {size} devices; list each rank from 0 "
                f"to {size - 1} once, host by host, or leave it out where ranks fill the hosts in order",
                size=size,
            )
        return ranks.astype(np.int64)

    # -- from -----------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None, hosts: str | Iterable[str] | None = None) -> Cluster:
        """Return the cluster of an axis string of the machine: innermost first, each size in units of the level before.

        A size may be followed by the level's bandwidth: ``host=8:450GB,leaf=4:400Gb``, bytes or bits a second of one
        device. The level named host or node is the host; without one, the outermost of the first that lie inside hosts
        by their names, else the first. With ``world_size``, one size may be ``*``, which is inferred. ``hosts`` names
        them, in the launcher's order; in natural order they fill the levels. Without, they are node0, node1 and so on.

        >>> Cluster.parse("host=2,leaf=2", hosts=["node10", "node9"]).rank_map
        (2, 3, 0, 1)
        """
        parts = [item.partition(":") for item in str(text).split(",")]
        sizes = fill(parse_axes(",".join(size for size, _, _ in parts)), world_size, "world_size")
        if rails := [name for name in sizes if re.fullmatch(r"rails?|rail[-_]\w+", name)]:
            raise ClusterError(
                f"{rails[0]} in {quoted(text)}: levels are nested, and the rails of a fabric (device i of each host on "
                "switch i) are not; leave it out: host=8,leaf=4 describes the hosts that share all of their switches",
                received=text,
            )
        rates = {name: rate(given, name) for name, (_, colon, given) in zip(sizes, parts, strict=True) if colon}
        levels = tuple(
            replace(level, bandwidth=rates[level.name], assumed=False) if level.name in rates else level
            for level in Level.all_unmeasured(sizes)
        )
        host = host_level(list(sizes))
        outer = list(sizes)[host + 1 :]
        _check_size(prod(sizes.values()), quoted(text), received=text)
        *within, devices = accumulate(list(sizes.values())[: host + 1], mul)
        inside = tuple(tuple(device // size for device in range(devices)) for size in within)
        count = prod(sizes[name] for name in outer)
        steps = dict(zip(outer, accumulate((sizes[level] for level in outer), mul), strict=True))
        if hosts is None:
            return cls(levels, HostRange(count * devices, devices, tuple(steps.items()), inside))
        listed = host_list(hosts)
        if len(listed) != count:
            raise ClusterError(
                f"{quoted(text)} has {count} hosts, but {len(listed)} are named; change the list or a size",
                hosts=len(listed),
                expected=count,
            )
        places = {
            name: tuple(f"{level}{number // step}" for level, step in steps.items())
            for number, name in enumerate(sorted(listed, key=natural))
        }
        return cls(levels, tuple(Host(name, devices, places[name], inside) for name in listed))

    @classmethod
    def of_nodes(cls, gpus_per_node: int, world_size: int) -> Cluster:
        """Hosts of ``gpus_per_node`` devices in one network, the last one smaller where they do not divide the world.

        >>> [host.devices for host in Cluster.of_nodes(8, 20).hosts]
        [8, 8, 4]
        """
        width = integer(gpus_per_node, "gpus_per_node", least=1)
        world = integer(world_size, "world_size", least=1)
        return cls(Level.all_unmeasured(["host"]), HostRange(world, width))

    @classmethod
    def read(
        cls, path: str | Path, *, hosts: str | Iterable[str] | None = None, gpus_per_node: int | None = None
    ) -> Cluster:
        """Return the cluster of a file: ``rankmesh cluster --json``, Slurm, Kubernetes, AWS, or ``{host: switch}``.

        ``hosts`` are the job's hosts in the launcher's order, as names or as a list (``node[1-4,7]``); without, all
        hosts of the file. ``gpus_per_node`` is for files without the number of devices of a host.
        See `rankmesh.core.clusters.read`.
        """
        from rankmesh.core.clusters.read import read

        return read(cls, Path(path), hosts, gpus_per_node)

    # -- what it is -----------------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """Number of devices, which is the number of ranks."""
        hosts = self.hosts
        return hosts.size if isinstance(hosts, HostRange) else sum(host.devices for host in hosts)

    @cached_property
    def host_sizes(self) -> frozenset[int]:
        """The different numbers of devices of a host."""
        return frozenset(self.hosts.sizes if isinstance(self.hosts, HostRange) else (h.devices for h in self.hosts))

    @property
    def host_level(self) -> int:
        """The number of the level that is the host: how many levels lie inside hosts."""
        return len(self.hosts[0].inside)

    def level(self, name: str) -> int:
        """Return the number of a level by its name, or by Slurm's (block); ``ClusterError`` where there is none."""
        names = [level.name for level in self.levels]
        name = name if str(name) in names else OTHER_WORDS.get(str(name), name)
        if str(name) not in names:
            raise ClusterError(
                f"unknown level {quoted(name)}: this cluster has the levels {', '.join(names)}; name one of them",
                received=name,
                known=tuple(names),
            )
        return names.index(name)

    @cached_property
    def units(self) -> IntArray:
        """The unit of each rank at each level, int64 of shape ``(levels, size)``; units are numbered in host order."""
        if isinstance(self.hosts, HostRange):
            by_rank = np.stack([np.arange(self.size, dtype=np.int64) // width for width in self.hosts.widths])
        else:
            by_device, by_rank = self._units_of_devices(), np.empty((len(self.levels), self.size), dtype=np.int64)
            by_rank[:, self.ranks] = by_device
        by_rank.setflags(write=False)
        return by_rank

    def _units_of_devices(self) -> IntArray:
        devices = np.array([host.devices for host in self.hosts])
        rows = [np.arange(len(self.hosts), dtype=np.int64)]
        for number in range(len(self.levels) - 1 - self.host_level):
            names: dict[str, int] = {}
            rows.append(np.array([names.setdefault(host.places[number], len(names)) for host in self.hosts]))
        around = np.repeat(np.stack(rows), devices, axis=1)
        return np.concatenate([self._inside(devices), around]) if self.host_level else around

    @cached_property
    def widths(self) -> tuple[int, ...] | None:
        """Number of consecutive ranks in a unit of each level; None if units differ."""
        if isinstance(self.hosts, HostRange):
            return self.hosts.widths
        ranks, widths = np.arange(self.size), [int(np.argmax(units != 0)) or self.size for units in self.units]
        equal = all(np.array_equal(units, ranks // width) for units, width in zip(self.units, widths, strict=True))
        return tuple(widths) if equal else None

    def units_of(self, level: int, ranks: IntArray) -> IntArray:
        """Return the unit of each of these ranks at one level, same shape."""
        return ranks // self.hosts.widths[level] if isinstance(self.hosts, HostRange) else self.units[level][ranks]

    def filling(self, level: int, world_size: int) -> IntArray:
        """Count the ranks below ``world_size`` in each unit of a level; units without any are left out."""
        counts = np.bincount(self.units_of(level, self._checked(np.arange(world_size))))
        return counts[counts > 0]

    def _inside(self, devices: IntArray) -> IntArray:
        """Return the unit of each device at each level inside the hosts."""
        rows = []
        host = np.repeat(np.arange(len(self.hosts)), devices)
        for number in range(self.host_level):
            units = np.concatenate([host.inside[number] for host in self.hosts])
            _, of_device = np.unique(host * (int(units.max()) + 1) + units, return_inverse=True)
            rows.append(of_device)
        return np.stack(rows)

    def unit_names(self, level: int) -> list[str]:
        """Return the name of each unit of a level, in the order of ``units``; inside hosts, the host's and a number."""
        if level > self.host_level:
            return list(dict.fromkeys(host.places[level - self.host_level - 1] for host in self.hosts))
        if level == self.host_level:
            return [host.name for host in self.hosts]
        name = self.levels[level].name
        return [f"{host.name} {name}{unit}" for host in self.hosts for unit in sorted(set(host.inside[level]))]

    @cached_property
    def ranks(self) -> IntArray:
        """The rank at each device, hosts in natural order; int64 of shape ``(size,)``."""
        return np.arange(self.size) if self.rank_map is None else np.array(self.rank_map, dtype=np.int64)

    def hosts_of(self, ranks: npt.ArrayLike) -> IntArray:
        """Return the number of the host of each rank, same shape."""
        return self.units_of(self.host_level, self._checked(ranks))

    def host_of(self, rank: int) -> Host:
        """Return the host of one rank."""
        return self.hosts[int(self.hosts_of(integer(rank, "rank", least=0)))]

    def level_of(self, left: npt.ArrayLike, right: npt.ArrayLike) -> IntArray:
        """Return the number of the innermost level that two ranks share, for arrays of ranks that broadcast."""
        one, two = self._checked(left), self._checked(right)
        apart = np.zeros(np.broadcast_shapes(one.shape, two.shape), dtype=np.int64)
        for level in range(len(self.levels) - 1):
            apart += self.units_of(level, one) != self.units_of(level, two)
        return apart

    def _checked(self, ranks: npt.ArrayLike) -> IntArray:
        numbers = np.asarray(ranks, dtype=np.int64)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.size:
            raise ClusterError(
                f"rank {int(numbers.max())} has no device: the cluster has {self.size} devices, for ranks 0 to "
                f"{self.size - 1}; give a cluster with a device for each rank",
                rank=int(numbers.max()),
                size=self.size,
            )
        return numbers

    @property
    def filled(self) -> tuple[str, ...] | None:
        """The names of the hosts in the order in which ranks fill them; None where ranks are dealt out otherwise.

        >>> Cluster.parse("host=2,leaf=2", hosts="node10,node9").filled
        ('node10', 'node9')
        """
        if self.rank_map is None:
            return tuple(host.name for host in self.hosts)
        hosts = self.hosts_of(np.arange(self.size))
        order = list(dict.fromkeys(hosts.tolist()))
        same = replace(self, hosts=tuple(self.hosts[number] for number in order), rank_map=None)
        return tuple(self.hosts[number].name for number in order) if same == self else None

    @property
    def default_levels(self) -> tuple[str, ...]:
        """The levels whose bandwidth is a default."""
        return tuple(level.name for level in self.levels if level.assumed)

    def with_levels(self, levels: Iterable[Level]) -> Cluster:
        """Replace the costs of the levels, as measured; their names stay."""
        return replace(self, levels=tuple(levels))

    def whole_hosts(self) -> Cluster:
        """Return the cluster without the levels inside its hosts."""
        hosts = self.hosts
        if not isinstance(hosts, HostRange):
            whole: Sequence[Host] = tuple(replace(host, inside=()) for host in hosts)
        else:
            whole = replace(hosts, inside=())
        return replace(self, levels=self.levels[self.host_level :], hosts=whole)

    # -- value semantics ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, object]:
        """Return the document of ``rankmesh cluster --json``."""
        inner = [level.name for level in self.levels[: self.host_level]]
        outer = [level.name for level in self.levels[self.host_level + 1 :]]
        data: dict[str, object] = {
            "schema": SCHEMA,
            "levels": [level.to_dict() for level in self.levels],
            "hosts": [
                {
                    "name": host.name,
                    "devices": host.devices,
                    **{name: list(units) for name, units in zip(inner, host.inside, strict=True)},
                    **dict(zip(outer, host.places, strict=True)),
                }
                for host in self.hosts
            ],
        }
        return data if self.rank_map is None else data | {"rank_map": list(self.rank_map)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Cluster:
        """Return the cluster of ``to_dict``, or of a document that people write. Raises ``ClusterError``.

        ```yaml
        levels:                                     # innermost first; latency in s, bandwidth and uplink in bytes/s
          - {name: host}                            # a number that is left out is one that nobody measured yet
          - {name: leaf, latency: 5.0e-6, bandwidth: 25.0e+9, uplink: 100.0e+9}
          - {name: spine, uplink: 400.0e+9}
        hosts:
          - {name: "node[1-4]", devices: 8, leaf: a, spine: top}
          - {name: "node[5-8]", devices: 4, leaf: b, spine: top}
        ```

        An outermost level that no host names is one unit. A level inside hosts has a list for each host: the number of
        the unit of each device, such as ``pix: [0, 0, 1, 1]``.
        """
        return _of_document(data)

    def __repr__(self) -> str:
        return f"Cluster({self})"

    def __str__(self) -> str:
        """Sizes in words: ``288 devices, 36 hosts of 8, levels host nvlink leaf``."""
        sizes = sorted(self.host_sizes)
        each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        count = f"{len(self.hosts):,} host{'' if len(self.hosts) == 1 else 's'} of {each}"
        return f"{self.size:,} devices, {count}, levels {' '.join(level.name for level in self.levels)}"


def _check_size(size: int, what: str, **values: object) -> None:
    if size > _DEVICES:
        raise ClusterError(
            f"{what} has {quoted(size)} devices, but at most {_DEVICES:,} are read; correct the number", **values
        )


def _check_total(size: int, largest: Host) -> None:
    of_it = f"the cluster, with {quoted(largest.devices)} in {quoted(largest.name)},"
    _check_size(size, of_it, host=largest.name)


def _check_hosts(levels: tuple[Level, ...], hosts: tuple[Host, ...]) -> None:
    if not levels or not hosts:
        raise ClusterError("the cluster has no hosts; give at least one level and one host")
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        raise ClusterError(f"two of the levels {', '.join(names)} have one name; rename one")
    seen: set[str] = set()
    for host in hosts:
        if not is_word(host.name):
            raise ClusterError(f"{quoted(host.name)} cannot name a host; give a word, such as node1")
        if host.name in seen:
            raise ClusterError(f"host {quoted(host.name)} is named twice; name it once, or rename one", host=host.name)
        seen.add(host.name)
        try:
            integer(host.devices, f"devices of host {quoted(host.name)}", least=1)
        except LayoutError as error:
            raise ClusterError(str(error), host=host.name, received=host.devices) from error
        inner, outer = names[: len(hosts[0].inside)], names[len(hosts[0].inside) + 1 :]
        if len(host.places) != len(outer) or not all(map(is_word, host.places)):
            raise ClusterError(
                f"host {quoted(host.name)} is in {quoted(list(host.places))}; name its unit at each of the levels "
                f"{', '.join(outer) or '(none)'}",
                host=host.name,
            )
        _check_inside(host, inner)


def _is_unit(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _DEVICES


def _check_inside(host: Host, levels: list[str]) -> None:
    """Refuse units inside a host that are not one for each device, or that lie in two of the level around them."""
    for name, units in zip_longest(levels, host.inside, fillvalue=()):
        if len(units) != host.devices or not all(map(_is_unit, units)):
            raise ClusterError(
                f"{quoted(name or 'a level')} of host {quoted(host.name)} is {quoted(list(units))}; give the number of "
                f"the unit of each of its {host.devices} devices, such as [0, 0, 1, 1]",
                host=host.name,
            )
    for (inner, units), around in zip(zip(levels, host.inside, strict=True), host.inside[1:], strict=False):
        if len(set(zip(units, around, strict=True))) > len(set(units)):
            raise ClusterError(
                f"a unit of {inner} of host {quoted(host.name)} is in two units of the level around it; fix one of the "
                "two lists",
                host=host.name,
            )


def _check_nesting(levels: tuple[Level, ...], hosts: tuple[Host, ...]) -> None:
    """Refuse a unit that is in two units of the level around it."""
    for number in range(len(levels) - 2):
        around: dict[str, Host] = {}
        for host in hosts:
            other = around.setdefault(host.places[number], host)
            if other.places[number + 1] != host.places[number + 1]:
                inner, outer = levels[number + 1].name, levels[number + 2].name
                places = (
                    f"in {outer} {quoted(one.places[number + 1])} (host {cut(one.name)})" for one in (other, host)
                )
                raise ClusterError(
                    f"{inner} {quoted(host.places[number])} is {' and '.join(places)}; fix one of the two",
                    host=host.name,
                    unit=host.places[number],
                )


def _joined(levels: tuple[Level, ...], hosts: tuple[Host, ...]) -> tuple[tuple[Level, ...], tuple[Host, ...]]:
    """Add a network around the outermost level if that has several units."""
    tops = {host.places[-1] if host.places else host.name for host in hosts}
    if len(tops) == 1:
        return levels, hosts
    name = next(name for name in _JOINING if name not in {level.name for level in levels})
    joined = tuple(replace(host, places=(*host.places, name)) for host in hosts)
    around = Level.all_unmeasured([*(level.name for level in levels), name])[-1]
    return (*levels, around), joined


def _joined_range(levels: tuple[Level, ...], hosts: HostRange) -> tuple[tuple[Level, ...], HostRange]:
    """Add a network around a range of hosts if its outermost level has several units."""
    joined, one = _joined(levels, (hosts[0], hosts[-1]))
    return joined, hosts if joined is levels else replace(hosts, levels=(*hosts.levels, (one[0].places[-1], 0)))


# -- documents ------------------------------------------------------------------------------------------------------


def _of_document(data: Mapping[str, object]) -> Cluster:
    schema = data.get("schema", SCHEMA)
    if schema != SCHEMA or isinstance(schema, bool):
        raise ClusterError(
            f"this cluster has schema {quoted(schema)}, but this version of rankmesh reads {SCHEMA}; upgrade rankmesh",
            schema=schema,
        )
    _known(data, {"schema", "levels", "hosts", "rank_map", "links"}, "a cluster")
    described = _rows(data, "levels")
    defaults = Level.all_unmeasured(row.get("name", "") for row in described)
    levels = tuple(_level(row, default) for row, default in zip(described, defaults, strict=True))
    names = [level.name for level in levels]
    rows = _rows(data, "hosts")
    inner = [name for name in names if any(isinstance(row.get(name), list) for row in rows)]
    unnamed = _unnamed(rows, names[len(inner) :])
    hosts = tuple(host for row in rows for host in _hosts({**dict.fromkeys(unnamed, "all"), **row}, names, len(inner)))
    notes = tuple(f"no host names its {level}: all hosts are in one" for level in unnamed)
    rank_map = data.get("rank_map")
    if rank_map is not None and (not isinstance(rank_map, list | tuple) or bool in map(type, rank_map)):
        raise ClusterError(f"rank_map is {quoted(rank_map)}; give a list of ranks, or leave it out")
    # A level that was added to join the others is written down, so the hosts of a document are joined as they are.
    return Cluster(levels, hosts, None if rank_map is None else tuple(rank_map), notes)


def _unnamed(rows: list[Mapping[str, object]], levels: list[str]) -> tuple[str, ...]:
    """Return the outermost levels that no host names: all hosts are in one unit of them."""
    named = [number for number, level in enumerate(levels[1:], 1) if any(level in row for row in rows)]
    return tuple(levels[max(named, default=0) + 1 :])


def _rows(data: Mapping[str, object], key: str) -> list[Mapping[str, Any]]:
    rows = data.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ClusterError(f"{key} is {quoted(rows)}; {_FORM}; write a list of them", key=key)
    return rows


def _level(row: Mapping[str, Any], default: Level) -> Level:
    _known(row, {"name", "latency", "bandwidth", "uplink", "default", "sharp"}, f"level {quoted(row.get('name'))}")
    for key in ("default", "sharp"):
        if not isinstance(row.get(key, False), bool):
            raise ClusterError(f"{key} of level {quoted(row.get('name'))} is {quoted(row[key])}; give true or false")
    given = {key: row[key] for key in ("latency", "bandwidth", "uplink") if row.get(key) is not None}
    assumed = "bandwidth" not in given or row.get("default") is True
    return replace(default, **given, assumed=assumed, sharp=row.get("sharp") is True)


def _hosts(row: Mapping[str, Any], levels: list[str], inner: int) -> Iterator[Host]:
    name = row.get("name")
    _known(row, {"name", "devices", *levels[:inner], *levels[inner + 1 :]}, f"host {name!r}")
    places = tuple(str(_unit(row, level, name, (str, int), "a name")) for level in levels[inner + 1 :])
    each = "the unit of each device, such as [0, 0, 1, 1]"
    inside = tuple(tuple(_unit(row, level, name, (list,), each)) for level in levels[:inner])
    if "devices" not in row:
        raise ClusterError(f"host {quoted(name)} does not say how many devices it has; add devices: 8", host=name)
    for listed in host_list(name if isinstance(name, str) else ""):
        yield Host(listed, row["devices"], places, inside)


def _unit(row: Mapping[str, Any], level: str, name: object, kinds: tuple[type, ...], what: str) -> Any:
    """Return the unit of a host at a level around it; at a level inside it, the unit of each device."""
    unit = row.get(level)
    if not isinstance(unit, kinds) or isinstance(unit, bool) or unit == "":
        raise ClusterError(f"host {quoted(name)} does not say its {level}; add {level}: {what}", host=name, level=level)
    return unit


def _known(row: Mapping[str, object], known: set[str], what: str) -> None:
    for key in row:
        if key not in known:
            raise ClusterError(
                f"{what} has the key {quoted(key)}, none of {', '.join(sorted(known))}; remove or rename it", key=key
            )
