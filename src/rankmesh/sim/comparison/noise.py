"""Noise: how far values move when sums are taken in another order, which is not a difference between layouts.

A second run of the reference permutes what every matrix product and sum adds up. How far a value moves there is its
*spread*. A layout may differ from the reference by the tolerance, or by ``MARGIN`` times the spread where that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rankmesh.backend.tracing import TorchDispatchMode

__all__ = ["MARGIN", "PermutedReductions", "Scale", "largest", "proportion"]

# The spread is one draw of the noise: another order may move a value somewhat further.
MARGIN = 16.0
# Units in the last place of a value's own dtype that partial sums may add.
_ULPS = 8.0

_aten = torch.ops.aten
# An operation of torch, and the dimensions over which one sums.
_Operation = Callable[..., torch.Tensor]
_Dims = int | Sequence[int] | None


def _permuted_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(a.shape[-1] - 1, -1, -1, device=a.device)
    return a.index_select(-1, order), b.index_select(-2, order)


def _mm(op: _Operation, a: torch.Tensor, b: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
    return op(*_permuted_product(a, b), *rest, **named)


def _addmm(op: _Operation, add: torch.Tensor, *rest: torch.Tensor, **named: object) -> torch.Tensor:
    return op(add, *_permuted_product(*rest[:2]), *rest[2:], **named)


def _sum(op: _Operation, x: torch.Tensor, dims: _Dims = None, *rest: object, **named: object) -> torch.Tensor:
    along = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    return op(x.flip(along) if along else x, dims, *rest, **named)


def _sum_all(op: _Operation, x: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
    return op(x.flip(list(range(x.dim()))) if x.dim() else x, *rest, **named)


_PERMUTED: dict[object, Callable[..., torch.Tensor]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _addmm,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _sum,
    _aten.sum.default: _sum_all,
    _aten.mean.default: _sum_all,
}


class PermutedReductions(TorchDispatchMode):
    """Inside, matrix products and sums add up what they add up in the opposite order.

    >>> x = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    >>> with PermutedReductions():
    ...     same = float((x[None] @ x[:, None] * 0).sum())
    >>> same
    0.0
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operation of torch; a DTensor's operation is dispatched again as one of its shard."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        plain = all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types)
        permuted = _PERMUTED.get(func) if plain else None
        if permuted is None:
            return func(*args, **(kwargs or {}))
        return permuted(func, *args, **(kwargs or {}))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor; 0 where it is empty, infinite where it holds a NaN."""
    if not tensor.numel():
        return 0.0
    number = tensor.detach() if tensor.is_floating_point() or tensor.is_complex() else tensor.to(torch.float64)
    most = float(number.abs().max())
    return float("inf") if most != most else most


def proportion(unit: torch.Tensor, value: torch.Tensor, allowed: float) -> float | None:
    """Return by which factor a value is a multiple of another one; None where it is none.

    >>> proportion(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), 1e-9)
    2.0
    """
    if unit.numel() != value.numel() or unit.is_complex() or value.is_complex():
        return None
    left, right = unit.detach().double().flatten(), value.detach().double().flatten()
    square = float(left @ left)
    factor = float(left @ right) / square if square else 1.0
    return factor if largest(right - factor * left) <= allowed else None


@dataclass(frozen=True)
class Scale:
    """The noise of one value: ``size`` is its largest element, ``spread`` the distance by which it moved."""

    size: float
    spread: float
    exact: bool
    eps: float

    @classmethod
    def of(cls, value: torch.Tensor, permuted: torch.Tensor | None) -> Scale:
        """From a value of the reference, and the same one under permuted reductions."""
        floating = value.is_floating_point() or value.is_complex()
        moved = 0.0
        if floating and permuted is not None and permuted.shape == value.shape:
            moved = largest(torch.nan_to_num(permuted.to(value.dtype) - value))
        finite = torch.nan_to_num(value, posinf=0.0, neginf=0.0) if floating else value
        return cls(largest(finite), moved, not floating, torch.finfo(value.dtype).eps if floating else 0.0)

    def allowed(self, tolerance: float, overall: float) -> float:
        """Return the difference allowed in an element; ``overall`` is the largest element of all values seen."""
        if self.exact:
            return 0.0
        return max(max(tolerance, _ULPS * self.eps) * self.size, MARGIN * self.spread, self.eps * overall)
