"""Results of each collective: from the tensors of all members, exactly, in the order of their positions.

```
operation         member p gives          member p gets
all_reduce        x_p                     x_0 + x_1 + ...           summed in the order of the positions
broadcast         x_p                     x_root
reduce            x_p                     the sum on the root, nothing elsewhere
all_gather        x_p                     [x_0, x_1, ...]
gather            x_p                     [x_0, x_1, ...] on the root
scatter           [y_0, y_1, ...] (root)  y_p
reduce_scatter    [x_p0, x_p1, ...]       x_0p + x_1p + ...
all_to_all        [x_p0, x_p1, ...]       [x_0p, x_1p, ...]
barrier           nothing                 nothing
```

Calls with one large tensor, such as all_gather_single, give and take its parts. Sums are made in the tensors' own
dtype, one after the other: every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold

import torch
from torch.distributed import ReduceOp

from rankmesh.backend.single_rank import premultiplied
from rankmesh.sim.calls import Call, shapes

__all__ = ["compute", "reduction_name"]


_REDUCTIONS: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduction_name(operation: object) -> str:
    """Return the name of a reduction: SUM, AVG, or a scaled sum with its factor."""
    factor = premultiplied(operation)
    if factor is not None:
        return f"PREMUL_SUM x {float(factor):g}"
    return next((str(known).rpartition(".")[2] for known in _REDUCTIONS if operation == known), str(operation))


def _reduced(tensors: Sequence[torch.Tensor], operation: object) -> torch.Tensor:
    first, *rest = tensors
    factor = premultiplied(operation)
    if factor is not None:
        scaled: torch.Tensor = fold(torch.add, (tensor * factor for tensor in rest), first * factor)
        return scaled
    kind = next(known for known in _REDUCTIONS if operation == known)
    total: torch.Tensor = fold(_REDUCTIONS[kind], rest, first)
    if kind == ReduceOp.AVG:
        whole = not (total.is_floating_point() or total.is_complex())
        return torch.div(total, len(tensors), rounding_mode="trunc" if whole else None)
    return total


def compute(calls: Sequence[Call]) -> str | None:
    """Give each call its results; where what one member gives is not what another one takes, return why instead."""
    with torch.no_grad():
        why = _RULES[calls[0].operation.removesuffix("_coalesced").removesuffix("_single")](calls)
    why = why or next(filter(None, (_misfit(call, calls) for call in calls)), None)
    if why is not None:
        for call in calls:
            call.results = None
    return why


def _all_reduce(calls: Sequence[Call]) -> None:
    each = [_reduced([call.given[i] for call in calls], calls[0].reduction) for i in range(len(calls[0].given))]
    for call in calls:
        call.results = each


def _reduce(calls: Sequence[Call]) -> None:
    _nothing(calls)
    root = _root(calls)
    root.results = [_reduced([call.given[i] for call in calls], root.reduction) for i in range(len(root.given))]


def _broadcast(calls: Sequence[Call]) -> None:
    for call in calls:
        call.results = _root(calls).given


def _all_gather(calls: Sequence[Call]) -> None:
    every = [tensor for call in calls for tensor in call.given]
    for call in calls:
        call.results = every


def _gather(calls: Sequence[Call]) -> None:
    _nothing(calls)
    _root(calls).results = [call.given[0] for call in calls]


def _scatter(calls: Sequence[Call]) -> str | None:
    root = _root(calls)
    if len(root.given) != len(calls):
        return f"rank {root.rank} scatters {len(root.given)} tensors to {len(calls)} members"
    for call in calls:
        call.results = [root.given[call.position]]
    return None


def _reduce_scatter(calls: Sequence[Call]) -> None:
    for call in calls:
        count = len(call.outputs)
        parts = range(call.position * count, call.position * count + count)
        call.results = [_reduced([other.given[part] for other in calls], call.reduction) for part in parts]


def _all_to_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call.results = [other.given[call.position] for other in calls]


def _nothing(calls: Sequence[Call]) -> None:
    for call in calls:
        call.results = []


def _root(calls: Sequence[Call]) -> Call:
    return next(call for call in calls if call.position == call.root)


_RULES: dict[str, Callable[[Sequence[Call]], str | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "new_group": _nothing,
}


def _misfit(call: Call, calls: Sequence[Call]) -> str | None:
    """Return why the results of a call are not what it takes; a reduction has one shape on all members."""
    results = call.results or []
    if call.reduction is not None:
        return None
    if len(results) != len(call.outputs):
        return f"rank {call.rank} takes {len(call.outputs)} tensors of {len(results)}"
    for result, output in zip(results, call.outputs, strict=True):
        if (result.numel(), result.dtype) != (output.numel(), output.dtype):
            giver = next(other.rank for other in calls if any(given is result for given in other.given))
            return f"rank {call.rank} takes {shapes([output])[0]} where rank {giver} gives {shapes([result])[0]}"
    return None
