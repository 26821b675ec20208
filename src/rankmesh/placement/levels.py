"""Levels: the rings of a cluster, what it costs to cross them, and what is assumed of them by their names.

>>> [f"{level.name} {level.bandwidth / 1e9:g} GB/s" for level in Level.all_unmeasured(("host", "nvlink", "leaf"))]
['host 450 GB/s', 'nvlink 450 GB/s', 'leaf 50 GB/s']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite

from rankmesh.errors import ClusterError, quoted

__all__ = ["BUS", "OTHER_WORDS", "PROCESSORS", "Level", "host_level", "is_word", "rate"]

# Bytes/s that one device sends, before anything is measured, by what a level's name says: NVLink 4 of an H100, a PCIe 5
# slot of 16 lanes, the link between two processors (NCCL's figure for Sapphire Rapids), a port of 400 Gb/s.
_NVLINK, BUS, PROCESSORS, _PORT = 450e9, 64e9, 22e9, 50e9
_BOARDS = ("board", "baseboard", "tray", "module")
_BUSES = ("pix", "pxb", "phb", "pcie", "pci", "plx", "numa", "socket", "cpu")
_BY_NAME: Mapping[str, float] = {
    **dict.fromkeys(("nvlink", "nvl", "nvswitch", "mnnvl", "xgmi", *_BOARDS), _NVLINK),
    **dict.fromkeys(_BUSES, BUS),
    **dict.fromkeys(("leaf", "spine", "core", "rack", "row", "pod", "switch", "network", "cluster", "zone"), _PORT),
}
# Names of the level that is the host, and of what NVIDIA's and Slurm's words call a level otherwise.
_HOSTS = ("host", "node", "server", "machine")
OTHER_WORDS = {"block": "nvlink"}
# Seconds of the first level inside hosts and of the first outside; they grow outward, so that an inner level is taken
# first where nothing else speaks for it.
_INSIDE, _OUTSIDE, _OUTWARD = 3.4e-6, 14e-6, (0.6e-6, 4e-6)
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMGT]?)(B|b|bit)(?:/s|ps)?")


@dataclass(frozen=True)
class Level:
    """One ring of the cluster, and what it costs to send to a device that shares this level and none inside it.

    ``latency``    seconds of one message
    ``bandwidth``  bytes/s that one device sends, with nobody in its way
    ``uplink``     bytes/s by which one unit of the level below is joined to this one, shared by all of its devices: the
                   port of a host at ``leaf``, the trunk of a rack at ``spine``. None: nothing is shared
    ``assumed``    whether the bandwidth is a default by the level's name, which nobody gave or measured
    """

    name: str
    latency: float
    bandwidth: float
    uplink: float | None = None
    assumed: bool = False

    def __post_init__(self) -> None:
        if not is_word(self.name) or not self.name.isidentifier() or self.name in ("name", "devices"):
            raise ClusterError(
                f"{quoted(self.name)} cannot name a level; use letters, digits and underscores, such as leaf",
                received=self.name,
            )
        _number(self.latency, f"latency of level {quoted(self.name)}, in seconds", zero=True)
        _number(self.bandwidth, f"bandwidth of level {quoted(self.name)}, in bytes/s")
        if self.uplink is not None:
            _number(self.uplink, f"uplink of level {quoted(self.name)}, in bytes/s")

    @classmethod
    def all_unmeasured(cls, names: Iterable[str]) -> tuple[Level, ...]:
        """Return levels of these names, innermost first, with the latencies and bandwidths that are assumed of them.

        >>> [f"{level.name} {level.bandwidth / 1e9:g}" for level in Level.all_unmeasured(("pix", "host", "leaf"))]
        ['pix 64', 'host 22', 'leaf 50']
        """
        found: list[Level] = []
        for number, name in enumerate(names):
            bandwidth = _assumed(name, [level.name for level in found])
            inside, outside = _INSIDE + _OUTWARD[0] * number, _OUTSIDE + _OUTWARD[1] * max(0, number - 1)
            found.append(cls(name, outside if bandwidth == _PORT else inside, bandwidth, assumed=True))
        return tuple(found)

    def to_dict(self) -> dict[str, object]:
        """Plain data; an uplink only where there is one, and ``default`` only where the bandwidth is one."""
        data: dict[str, object] = {"name": self.name, "latency": self.latency, "bandwidth": self.bandwidth}
        if self.uplink is not None:
            data["uplink"] = self.uplink
        return data | {"default": True} if self.assumed else data


def _assumed(name: object, inside: Sequence[object]) -> float:
    """Return the bandwidth assumed of a level by its name: of a host across its processors if others are inside it."""
    kind = _word(name)
    if kind in _BY_NAME:
        return _BY_NAME[kind]
    if kind in _HOSTS and any(_word(level) not in _BOARDS for level in inside):
        return PROCESSORS
    return _NVLINK if kind in _HOSTS or not inside else _PORT


def _word(name: object) -> str:
    """Return the name of a level without its number: nvl72 is an nvl."""
    return re.sub(r"[0-9]+$", "", str(name).lower())


def host_level(names: Sequence[str]) -> int:
    """Return the number of the level that is the host, by the names of all levels."""
    kinds = [_word(name) for name in names]
    named = [kinds.index(host) for host in _HOSTS if host in kinds]
    inside = len(list(takewhile(lambda kind: kind in (*_BOARDS, *_BUSES), kinds)))
    return named[0] if named else max(0, inside - 1)


def rate(text: str, level: str) -> float:
    """Return bytes/s of a text such as 450GB, 400Gb/s or 25GB/s."""
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        raise ClusterError(
            f"bandwidth {quoted(text)} of level {quoted(level)} is not a number of bytes or bits a second; write 50GB "
            "for gigabytes, or 400Gb for gigabits",
            received=text,
            level=level,
        )
    number, prefix, unit = found.groups()
    return float(number) * 1000.0 ** " kMGT".index(prefix or " ") / (1 if unit == "B" else 8)


def is_word(value: object) -> bool:
    """Return whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value)


def _number(value: object, what: str, *, zero: bool = False) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ClusterError(
            f"{what} is {quoted(value)}; give a number {'of at least' if zero else 'above'} 0",
            received=value,
        )
