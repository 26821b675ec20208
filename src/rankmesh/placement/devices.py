"""Devices: what one can compute, move and keep, from its maker's data sheet.

>>> DEVICES["h100"].matrix["bf16"] / 1e12, DEVICES["a100"].memory / 1e9
(989.0, 80.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.errors import PlacementError, quoted

__all__ = ["DEVICES", "Device", "device"]


@dataclass(frozen=True)
class Device:
    """One device: dense FLOP/s of matrix products by precision, bytes/s of its memory, its size in bytes.

    ``units`` compute at once, each a tile of a product (streaming multiprocessors). ``speed``: FLOP/s that it reaches
    in training, in place of the model of its kernels.
    """

    name: str
    matrix: Mapping[str, float]
    bandwidth: float
    memory: float
    units: int
    speed: float | None = None

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products; a device without FP8 does them in bfloat16."""
        return self.matrix.get(precision, self.matrix["bf16"])


def _of(name: str, bf16: float, fp8: float | None, bandwidth: float, memory: float, units: int) -> Device:
    matrix = {"bf16": bf16 * 1e12} if fp8 is None else {"bf16": bf16 * 1e12, "fp8": fp8 * 1e12}
    return Device(name, matrix, bandwidth * 1e12, memory * 1e9, units)


# NVIDIA's data sheets, SXM modules, without sparsity: bfloat16 and FP8 TFLOP/s, TB/s, GB, multiprocessors.
DEVICES: Mapping[str, Device] = {
    each.name: each
    for each in (
        _of("a100", 312, None, 2.039, 80, 108),
        _of("h100", 989, 1979, 3.35, 80, 132),
        _of("h800", 989, 1979, 3.35, 80, 132),
        _of("h200", 989, 1979, 4.8, 141, 132),
        _of("b200", 2250, 4500, 8.0, 180, 148),
        _of("gb200", 2450, 4900, 8.0, 186, 148),
    )
}


def device(name: str) -> Device:
    """Return the device of this name; ``PlacementError`` lists those that are known."""
    if name not in DEVICES:
        raise PlacementError(f"unknown device {quoted(name)}; give one of {', '.join(DEVICES)}", received=name)
    return DEVICES[name]
