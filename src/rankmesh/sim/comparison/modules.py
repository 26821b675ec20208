"""What a comparison sees of a module, and how a program makes tensors that are shards of one tensor.

>>> import rankmesh as rm
>>> from rankmesh import sim
>>> def rows(groups):
...     return sim.shard(groups, torch.arange(8.0), ("dp",)).tolist()
>>> sim.run(rows, "tp=2,dp=2")
[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [4.0, 5.0, 6.0, 7.0]]
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch

from rankmesh.core.sharding import Sharding
from rankmesh.runtime.live import LiveGroups
from rankmesh.sim.comparison.seen import Cut, piece, see

__all__ = ["random", "see_activations", "see_module", "shard"]

Table = Mapping[str, "Cut | Sharding"]


def see_module(name: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, table: Table) -> None:
    """See the parameters of a module, their gradients, and what an optimizer keeps for each."""
    for parameter, value in module.named_parameters():
        cut, options = _cut(table, parameter)
        see(f"{name}.{parameter}", value, cut, **options)
        if value.grad is not None:
            see(f"{name}.{parameter}.grad", value.grad, cut, **options)
        for kept, state in (optimizer.state.get(value, {}) if optimizer is not None else {}).items():
            if isinstance(state, torch.Tensor):
                see(f"{name}.{parameter}.{kept}", state, *([cut] if state.shape == value.shape else []), **options)


def see_activations(module: torch.nn.Module, table: Table | None = None, name: str = "") -> AbstractContextManager[Any]:
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

    The whole tensor is drawn from a generator that ``name`` seeds; ``draw`` is ``torch.randn`` or ``torch.rand``, of
    which a dropout mask is made.
    """
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = draw(tuple(shape), generator=source, dtype=torch.float64)
    return shard(groups, whole.to(dtype or torch.get_default_dtype()), cut, view=view, parts=parts)
