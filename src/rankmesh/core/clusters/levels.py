"""Levels: the rings of a cluster, what it costs to cross them, and what is assumed of them by their names.

>>> [f"{level.name} {level.bandwidth / 1e9:g} GB/s" for level in Level.all_unmeasured(("host", "nvlink", "leaf"))]
['host 450 GB/s', 'nvlink 450 GB/s', 'leaf 50 GB/s']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rankmesh.core.axes import check_number
from rankmesh.core.clusters.hardware import DEVICES, SHARE, Device
from rankmesh.errors import ClusterError, counted, quoted

__all__ = [
    "BUS",
    "OTHER_WORDS",
    "PROCESSORS",
    "Level",
    "domain",
    "host_level",
    "in_words",
    "is_word",
    "rate",
    "reached",
]

# Bytes/s that one device sends: a PCIe 5 slot of 16 lanes, the link between two processors (NCCL's figure for Sapphire
# Rapids). NVLinks and ports are those of the device.
BUS, PROCESSORS = 64e9, 22e9
_BOARDS = ("board", "baseboard", "tray", "module")
_BUSES = ("pix", "pxb", "phb", "pcie", "pci", "plx", "numa", "socket", "cpu")
# What kind of link a level's name says: the device's NVLinks or its network port, a bus, the link between processors.
_BY_NAME: Mapping[str, str] = {
    **dict.fromkeys(("nvlink", "nvl", "nvswitch", "mnnvl", "xgmi", *_BOARDS), "nvlink"),
    **dict.fromkeys(_BUSES, "bus"),
    **dict.fromkeys(("leaf", "spine", "core", "rack", "row", "pod", "switch", "network", "cluster", "zone"), "port"),
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
    ``sharp``      whether the switches of this level reduce (NVIDIA SHARP, NCCL's CollNet)
    """

    name: str
    latency: float
    bandwidth: float
    uplink: float | None = None
    assumed: bool = False
    sharp: bool = False

    def __post_init__(self) -> None:
        if not is_word(self.name) or not self.name.isidentifier() or self.name in ("name", "devices"):
            raise ClusterError(
                f"{quoted(self.name)} cannot name a level; use letters, digits and underscores, such as leaf",
                received=self.name,
            )
        check_number(self.latency, f"latency of level {quoted(self.name)}, in seconds", ClusterError, zero=True)
        check_number(self.bandwidth, f"bandwidth of level {quoted(self.name)}, in bytes/s", ClusterError)
        if self.uplink is not None:
            check_number(self.uplink, f"uplink of level {quoted(self.name)}, in bytes/s", ClusterError)

    @classmethod
    def all_unmeasured(cls, names: Iterable[str]) -> tuple[Level, ...]:
        """Return levels of these names, innermost first, with the latencies and bandwidths that are assumed of them.

        >>> [f"{level.name} {level.bandwidth / 1e9:g}" for level in Level.all_unmeasured(("pix", "host", "leaf"))]
        ['pix 64', 'host 22', 'leaf 50']
        """
        listed = tuple(names)
        found: list[Level] = []
        for number, (name, kind) in enumerate(zip(listed, _kinds(listed), strict=True)):
            inside, outside = _INSIDE + _OUTWARD[0] * number, _OUTSIDE + _OUTWARD[1] * max(0, number - 1)
            rate = _line_rate(kind, DEVICES["h100"])
            found.append(cls(name, outside if kind == "port" else inside, rate, assumed=True))
        return tuple(found)

    def to_dict(self) -> dict[str, object]:
        """Plain data; an uplink only where there is one, ``sharp`` and ``default`` only where they are true."""
        data: dict[str, object] = {"name": self.name, "latency": self.latency, "bandwidth": self.bandwidth}
        if self.uplink is not None:
            data["uplink"] = self.uplink
        return data | {key: True for key, true in (("sharp", self.sharp), ("default", self.assumed)) if true}


def _kinds(names: Sequence[object]) -> list[str]:
    """Return the kind of link of each level by its name: of a host across its processors if others are inside it."""
    words = [_word(name) for name in names]
    found = []
    for number, word in enumerate(words):
        if word in _BY_NAME:
            found.append(_BY_NAME[word])
        elif word in _HOSTS:
            found.append("processors" if set(words[:number]) - set(_BOARDS) else "nvlink")
        else:
            found.append("port" if number else "nvlink")
    return found


def _line_rate(kind: str, device: Device) -> float:
    return {"nvlink": device.link, "port": device.port, "bus": BUS, "processors": PROCESSORS}[kind]


def reached(levels: Iterable[Level], device: Device) -> tuple[Level, ...]:
    """Return the levels with the bandwidths that NCCL reaches on this device, where theirs are assumed.

    >>> [round(level.bandwidth / 1e9) for level in reached(Level.all_unmeasured(("host", "leaf")), DEVICES["a100"])]
    [240, 24]
    """
    listed = tuple(levels)
    by_kind = {
        "nvlink": device.reached,
        "port": SHARE["network"] * device.port,
        "bus": SHARE["bus"] * BUS,
        "processors": SHARE["bus"] * PROCESSORS,
    }
    return tuple(
        replace(level, bandwidth=by_kind[kind], assumed=False) if level.assumed else level
        for level, kind in zip(listed, _kinds([level.name for level in listed]), strict=True)
    )


def domain(levels: Sequence[Level]) -> tuple[int, bool]:
    """Return the number of the outermost level before the network, -1 if there is none; and whether it is all NVLink.

    >>> domain(Level.all_unmeasured(("host", "nvlink", "leaf"))), domain(Level.all_unmeasured(("pix", "host", "leaf")))
    ((1, True), (1, False))
    """
    inside = list(takewhile(lambda kind: kind != "port", _kinds([level.name for level in levels])))
    return len(inside) - 1, set(inside) == {"nvlink"}


def in_words(levels: Sequence[Level], devices: int, device: Device) -> str:
    """Describe in one line the links that NCCL is assumed to use; ``devices``: the number in a host.

    >>> in_words(Level.all_unmeasured(("host", "leaf")), 8, DEVICES["h100"])
    'h100: NVLink of 450 GB/s with NVLS, 8 ports of 50 GB/s'
    """
    last, switched = domain(levels)
    parts = []
    if last >= 0:
        inner = levels[last]
        line = _line_rate(_kinds([level.name for level in levels])[last], device) if inner.assumed else inner.bandwidth
        name = "NVLink" if switched else inner.name
        parts.append(f"{name} of {line / 1e9:.4g} GB/s{' with NVLS' if switched and device.nvls else ''}")
    if last + 1 < len(levels):
        outer = levels[last + 1]
        line = device.port if outer.assumed else outer.bandwidth
        ports = devices if outer.uplink is None else max(1, round(outer.uplink / outer.bandwidth))
        parts.append(f"{counted(ports, 'port')} of {line / 1e9:.4g} GB/s")
        parts += ["SHARP"] if any(level.sharp for level in levels) else []
    return f"{device.name}: {', '.join(parts)}"


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
