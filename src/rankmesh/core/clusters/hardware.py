"""Hardware: rates of devices, of their memory and links, and of NCCL on these; ``hardware.toml`` has the numbers.

>>> DEVICES["h100"].matrix["bf16"] / 1e12, DEVICES["a100"].memory / 1e9, DEVICES["b200"].link / 1e9
(989.0, 80.0, 900.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import inf
from typing import Any

from rankmesh.core.documents import parse_toml
from rankmesh.errors import PlacementError, quoted

__all__ = ["DEVICES", "NCCL", "SHARE", "Device", "device"]


@dataclass(frozen=True)
class Device:
    """One device: dense FLOP/s of matrix products by precision, bytes/s of its memory, its size in bytes.

    ``units`` compute at once, each a tile of a product (streaming multiprocessors). ``speed``: FLOP/s that it reaches
    in training, in place of the model of its kernels. ``link``, ``port``: bytes/s of its NVLinks and of its network
    port; ``reached``, ``ll``: bytes/s that NCCL reaches of the links, with its Simple and its LL protocol; ``nvls``:
    the share of ``reached`` that reductions in the switch reach, 0 without NVLink SHARP; ``switch``: bytes/s of bus
    bandwidth that NCCL's channels bring to it; ``trees``: that trees reach at most on one host, two and more.
    """

    name: str
    matrix: Mapping[str, float]
    bandwidth: float
    memory: float
    units: int
    link: float
    reached: float
    ll: float
    nvls: float
    port: float
    switch: float = 0.0
    trees: tuple[float, ...] = (inf, inf, inf)
    speed: float | None = None

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products; a device without FP8 does them in bfloat16."""
        return self.matrix.get(precision, self.matrix["bf16"])


def _device(name: str, row: Mapping[str, Any]) -> Device:
    matrix = {"bf16": row["half"] * 1e12} | ({"fp8": row["fp8"] * 1e12} if "fp8" in row else {})
    links = {key: row.get(key, 0.0) * 1e9 for key in ("link", "reached", "ll", "port", "switch")}
    trees = tuple(rate * 1e9 for rate in row.get("trees", (inf, inf, inf)))
    sizes = row["memory"] * 1e12, row["size"] * 1e9, row["units"]
    return Device(name, matrix, *sizes, nvls=row["nvls"], trees=trees, **links)


_DATA: Mapping[str, Any] = parse_toml(files(__package__).joinpath("hardware.toml").read_text(encoding="utf-8"))
DEVICES: Mapping[str, Device] = {name: _device(name, row) for name, row in _DATA["devices"].items()}
# Shares of a line rate that messages reach, by kind of link; NCCL's latencies in microseconds, and shares by protocol.
SHARE: Mapping[str, float] = _DATA["share"]
NCCL: Mapping[str, Any] = _DATA["nccl"]


def device(name: str) -> Device:
    """Return the device of this name; ``PlacementError`` lists those that are known."""
    if name not in DEVICES:
        raise PlacementError(f"unknown device {quoted(name)}; give one of {', '.join(DEVICES)}", received=name)
    return DEVICES[name]
