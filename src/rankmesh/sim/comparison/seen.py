"""See: the values of a program that must be the same on every layout.

```
sim.see("loss", loss)                              a copy on every rank that sees it
sim.see("up.grad", up.weight.grad, ("tp", None))   a shard: rows cut by tp, columns whole
```

Outside a comparison ``see`` does nothing. The n-th value of a name on a rank is compared with the n-th of that name in
the reference run; all of its elements must have been seen by some rank.

>>> from rankmesh import sim
>>> def rows(groups):
...     return sim.shard(groups, torch.arange(8.0), ("dp",)).tolist()
>>> sim.run(rows, "tp=2,dp=2")
[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [4.0, 5.0, 6.0, 7.0]]
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from itertools import starmap
from typing import Any

import torch

from rankmesh.core.sharding import Shard, Sharding
from rankmesh.errors import LayoutError, quoted
from rankmesh.runtime.live import LiveGroups
from rankmesh.sim.simulation import current_context

__all__ = ["Cut", "Seen", "piece", "random", "see", "see_activations", "shard"]

Cut = Sequence[str | None] | None
Table = Mapping[str, Cut | Sharding]


class Seen:
    """One value on one rank, with how it is sharded."""

    def __init__(self, value: object, cut: Cut, options: Mapping[str, Any]) -> None:
        self.source = value
        placed = _placed(value)
        if placed is not None:
            value, found = placed
            cut = found if cut is None else cut
        self.tensor = _tensor(value).detach()
        self.cut = None if cut is None else tuple(cut)
        self.options = {name: given for name, given in options.items() if given is not None}

    def replace(self, tensor: torch.Tensor) -> None:
        """Write other numbers into the value, where it is a tensor."""
        target = self.source.to_local() if hasattr(self.source, "to_local") else self.source
        if isinstance(target, torch.Tensor):
            target.data.copy_(tensor.reshape(target.shape))
        self.tensor = tensor


def see(
    name: str,
    value: object = None,
    cut: Cut = None,
    *,
    view: str | None = None,
    at: Mapping[str, int | tuple[int, ...]] | None = None,
    parts: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    padded: Mapping[int, int] | None = None,
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    table: Table | None = None,
) -> None:
    """Have a comparison look at a value here; nothing outside ``sim.compare``.

    Args:
        name: the name of the value in the report.
        value: a tensor, an array or a number.
        cut: for each dimension the axes that cut it, as in ``rm.Sharding``. A DTensor has placements instead. Default
            None: the value is the same on every rank that sees it.
        view: the view of the mesh whose axes cut the value, as in ``rm.Sharding``.
        at: the ranks that have the value, by axis, as in ``rm.Sharding``. It is ignored for axes of size 1.
        parts: uneven sizes of the parts, as in ``rm.Sharding``.
        padded: elements of padding by dimension, as in ``rm.Sharding``.
        module: see each of its parameters and gradients instead, as ``name.weight`` and ``name.weight.grad``.
        optimizer: see the state that it keeps for each parameter of ``module``, as ``name.weight.exp_avg``.
        table: cuts (or Shardings) by parameter name or pattern, ``{"*.up": ("tp", None)}``. Other parameters are whole.

    Raises ``LayoutError`` for a value or a cut that cannot be read.
    """
    context = current_context()
    session: Any = None if context is None else context.simulation.observer
    if context is None or not hasattr(session, "see"):
        return
    if module is not None:
        _see_module(name, module, optimizer, table or {})
        return
    options = {"view": view, "at": at, "parts": parts, "padded": padded}
    session.see(context.rank, name, Seen(value, cut, options))


def _tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    except (TypeError, ValueError, RuntimeError):
        raise LayoutError(
            f"{quoted(value)} cannot be compared; give a tensor, an array or a number to sim.see", received=value
        ) from None


def _placed(value: object) -> tuple[torch.Tensor, tuple[str | None, ...]] | None:
    """Return the local tensor of a DTensor, and its cut by the dimensions of its mesh; None for anything else."""
    if "torch.distributed.tensor" not in sys.modules:  # whose import takes a second
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return None
    from rankmesh.backend.dtensors import cut_of

    return value.to_local(), cut_of(value)


def piece(whole: torch.Tensor, shard: Shard, like: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that a rank should hold; where its own is padded, the padding is copied from ``like``."""
    made = whole.new_zeros(shard.shape) if like is None else like.detach().to(whole.dtype).cpu().clone()
    for box, place in zip(shard.boxes, shard.places, strict=True):
        local = tuple(slice(at, at + stop - start) for at, (start, stop) in zip(place, box, strict=True))
        made[local] = whole[tuple(starmap(slice, box))]
    return made


# -- modules, and tensors that are shards of one tensor --------------------------------------------------------------


def _see_module(name: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, table: Table) -> None:
    """See the parameters of a module, their gradients, and what an optimizer keeps for each."""
    for parameter, value in module.named_parameters():
        cut, options = _cut(table, parameter)
        see(f"{name}.{parameter}", value, cut, **options)
        if value.grad is not None:
            see(f"{name}.{parameter}.grad", value.grad, cut, **options)
        for kept, state in (optimizer.state.get(value, {}) if optimizer is not None else {}).items():
            if isinstance(state, torch.Tensor):
                see(f"{name}.{parameter}.{kept}", state, *([cut] if state.shape == value.shape else []), **options)


def see_activations(
    module: torch.nn.Module, table: Table | None = None, name: str = ""
) -> AbstractContextManager[object]:
    """See the output of every part of a module when it has run, until the result is closed.

    ``table`` has cuts (or Shardings) by the part's name or a pattern of it, as in ``sim.see(table=)``; only parts that
    it names are seen, all of them without a table.
    """
    hooks = ExitStack()
    for part, child in module.named_modules():
        if table is not None and _found(table, part) is None:
            continue
        cut, options = _cut(table or {}, part)
        handle = child.register_forward_hook(_hook(".".join(filter(None, (name, part))) or "output", cut, options))
        hooks.callback(handle.remove)
    return hooks


def _hook(name: str, cut: Cut, options: dict[str, Any]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, given: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            see(name, output, cut, **options)

    return hook


def _found(table: Table, name: str) -> str | None:
    if name in table:
        return name
    return next((pattern for pattern in table if fnmatchcase(name, pattern)), None)


def _cut(table: Table, name: str) -> tuple[Cut, dict[str, Any]]:
    pattern = _found(table, name)
    given = None if pattern is None else table[pattern]
    if isinstance(given, Sharding):
        return given.cut, {"view": given.view, "at": given.at, "parts": given.parts, "padded": given.padded}
    return given, {}


def shard(
    groups: LiveGroups,
    whole: torch.Tensor,
    cut: Cut = None,
    *,
    view: str | None = None,
    parts: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank has whole, as a copy; ``cut`` as in ``rm.Sharding``."""
    dtype = str(whole.dtype).removeprefix("torch.")
    local = Sharding(
        groups.plan.mesh, None if cut is None else tuple(cut), tuple(whole.shape), dtype, view=view, parts=parts
    ).of(groups.rank)
    return piece(whole, local, None)


def random(
    groups: LiveGroups,
    name: str,
    shape: Sequence[int],
    cut: Cut = None,
    *,
    view: str | None = None,
    parts: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    draw: Callable[..., torch.Tensor] = torch.randn,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return this rank's shard of a random tensor: each element has the value that it has on one process.

    Args:
        groups: the live groups of this rank.
        name: seeds the generator of the whole tensor.
        shape: the shape of the whole tensor.
        cut: for each dimension the axes that cut it, as in ``rm.Sharding``. Default None: every rank has all of it.
        view: the view of the mesh whose axes cut the tensor, as in ``rm.Sharding``.
        parts: uneven sizes of the parts, as in ``rm.Sharding``.
        draw: ``torch.randn`` (default), or ``torch.rand``, from which a program makes a dropout mask.
        dtype: the dtype of the shard. Default None: torch's default dtype.
    """
    context, wanted = current_context(), (tuple(shape), draw, dtype or torch.get_default_dtype())
    drawn = {} if context is None else context.simulation.drawn
    known, whole, others = drawn.pop(name, (None, torch.empty(0), 0))
    if known != wanted:
        source, others = torch.Generator().manual_seed(zlib.crc32(name.encode())), groups.plan.world_size
        whole = draw(wanted[0], generator=source, dtype=torch.float64).to(wanted[2])
    if others > 1:
        drawn[name] = wanted, whole, others - 1
    return shard(groups, whole, cut, view=view, parts=parts)
