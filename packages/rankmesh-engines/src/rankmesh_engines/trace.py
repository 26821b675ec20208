"""Traces: a loader run on tensors that have no storage, and where every element of its parameters came from.

Tensors of a checkpoint are meta tensors. Views of them are torch's own; what copies (``copy_``, ``clone``, ``cat``,
``index_select`` and others) is written down instead of done, as `strided.Copy`. What computes a new value leaves its
name, and a parameter that has such values is refused.

>>> import torch
>>> with Trace() as trace:
...     weight = trace.source("weight", (4, 6))
...     parameter = torch.empty(2, 6)
...     _ = parameter.copy_(weight.chunk(2)[1])
>>> trace.fragments(parameter)
{'weight': [Fragment(box=((2, 4), (0, 6)), offset=0, strides=(6, 1))]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankmesh.backend.tracing import TorchDispatchMode, storage_key
from rankmesh.errors import LayoutError
from rankmesh.transfer.live.shards import local
from rankmesh_engines.strided import Copy, Fragment, compose, contiguous, fragments, merged, outside, view

__all__ = ["Trace"]

_FILLS = {"fill_", "zero_", "uniform_", "normal_", "trunc_normal_", "random_", "empty_like", "new_empty",
          "new_empty_strided", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
          "rand_like", "randn_like", "empty_strided"}  # fmt: skip
_COPIES = {"clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy"}


@dataclass
class _Memory:
    """One storage, kept alive, and the copies that were written to it, by where they read.

    A copy of a source reads ``name``; one of a computed value has no dimensions of a source, only ``name`` for why.
    """

    storage: torch.UntypedStorage
    pieces: list[tuple[str, Copy]] = field(default_factory=list)
    end: int = 0  # where nothing has been written yet


class Trace(TorchDispatchMode):
    """A record of what ran inside ``with``, as copies from sources; tensors of other origin are constants."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, _Memory] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of a checkpoint, without storage."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._shapes[name] = tuple(shape)
        whole = view(0, shape, contiguous(shape))
        memory = self._memory(tensor)
        memory.pieces, memory.end = [(name, Copy(0, 0, ((whole.size, 1, 1),)))], whole.size
        return tensor

    def fragments(self, tensor: Tensor) -> dict[str, list[Fragment]]:
        """Return the boxes of each source that a tensor holds; offsets and strides are in the tensor's elements.

        Raises ``LayoutError`` where it holds values that were computed, naming the operation.
        """
        found: dict[str, list[Fragment]] = {}
        for name, piece in self._read(local(tensor)):
            if name not in self._shapes:
                raise LayoutError(
                    f"it holds values that {name.partition(' of ')[0]} computes; only copies have a layout",
                    sources=name.partition(" of ")[2].split(", "),
                )
            found.setdefault(name, []).extend(fragments(piece, self._shapes[name]))
        return {name: merged(boxes) for name, boxes in found.items()}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "from_local") for kind in types):
            return NotImplemented  # a DTensor: its own tensors come next
        name = func.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        known = [tensor for tensor in inputs if self._pieces(tensor)]
        if name in ("copy_", "_foreach_copy_") and (known or any(tensor.is_meta for tensor in inputs)):
            pairs = zip(args[0], args[1], strict=True) if name != "copy_" else [(args[0], args[1])]
            for into, tensor in pairs:
                self._write(into, self._read(tensor.expand(into.shape)))
            return args[0]
        if not known:
            return func(*args, **kwargs)
        if name in _FILLS:
            if name.endswith("_"):
                self._write(args[0], [])
                return args[0]
            return func(*args, **kwargs)
        if name in _COPIES:
            dtype, form = kwargs.get("dtype") or args[0].dtype, args[0]
            if form.is_contiguous() or kwargs.get("memory_format") is torch.contiguous_format or name == "contiguous":
                made = torch.empty(form.shape, dtype=dtype, device="meta")
            else:
                made = torch.empty_like(form, dtype=dtype, device="meta", memory_format=torch.preserve_format)
            self._write(made, self._read(form))
            return made
        joined = _JOINS.get(name)
        if joined is not None:
            return joined(self, args, kwargs)
        result = func(*args, **kwargs)
        self._mark(name, known, inputs, func, result)
        return result

    def _mark(self, name: str, known: list[Tensor], inputs: list[Tensor], func: Any, result: Any) -> None:
        """Mark the results that are not views of known tensors as computed by an operation."""
        memories, in_place = {storage_key(tensor) for tensor in inputs}, name.endswith("_")
        computed = [tensor for tensor in _tensors(result) if in_place or storage_key(tensor) not in memories]
        if not computed:
            return
        origins = {origin for tensor in known for source, _ in self._pieces(tensor) for origin in self._origins(source)}
        why = f"{name} of {', '.join(sorted(origins))}"
        for tensor in computed:
            whole = view(0, tensor.shape, contiguous(tensor.shape))
            self._write(tensor, [(why, Copy(0, 0, whole.dims))])

    def _origins(self, source: str) -> list[str]:
        return [source] if source in self._shapes else source.partition(" of ")[2].split(", ")

    def _memory(self, tensor: Tensor) -> _Memory:
        key = storage_key(tensor)
        if key not in self._memories:
            self._memories[key] = _Memory(tensor.untyped_storage())
        return self._memories[key]

    def _pieces(self, tensor: Tensor) -> list[tuple[str, Copy]]:
        memory = self._memories.get(storage_key(tensor))
        return memory.pieces if memory else []

    def _read(self, tensor: Tensor) -> list[tuple[str, Copy]]:
        """Return the places in sources of the elements of a view, counted row by row."""
        where = view(int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return [(name, met) for name, piece in self._pieces(tensor) for met in compose(piece, where)]

    def _write(self, into: Tensor, pieces: list[tuple[str, Copy]], *, over: bool = True) -> None:
        """Write elements, counted row by row, over the elements of a view."""
        memory, numbers = self._memory(into), contiguous(into.shape)
        there = Copy(
            int(into.storage_offset()),
            0,
            tuple((size, to, number) for size, to, number in zip(into.shape, into.stride(), numbers, strict=True)),
        )
        if over and there.to < memory.end:
            memory.pieces = [(name, rest) for name, piece in memory.pieces for rest in outside(piece, there)]
        memory.end = max(memory.end, there.last + 1)
        memory.pieces += [(name, met) for name, piece in pieces for met in compose(piece, there)]

    def _cat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensors = [tensor for tensor in args[0] if tensor.shape != (0,)]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].dim()
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        made, start = torch.empty(shape, dtype=tensors[0].dtype, device="meta"), 0
        for tensor in tensors:
            self._write(made.narrow(dim, start, tensor.shape[dim]), self._read(tensor), over=False)
            start += tensor.shape[dim]
        return made

    def _stack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return self._cat(([tensor.unsqueeze(dim) for tensor in args[0]], dim % (args[0][0].dim() + 1)), {})

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, dim, index = args
        runs: list[list[int]] = []
        for place in index.reshape(-1).tolist():
            if runs and place == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
        return self._cat(([tensor.narrow(dim, start, count) for start, count in runs], dim % tensor.dim()), kwargs)

    def _index(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, places = args
        given = [dim for dim, index in enumerate(places) if index is not None]
        if len(given) != 1 or places[given[0]].dim() != 1:
            raise LayoutError(f"a loader picks elements by {len(given)} indices at a time; pick along one dimension")
        index = places[given[0]]
        return self._select((tensor, given[0], index.nonzero() if index.dtype == torch.bool else index), kwargs)


_JOINS: dict[str, Callable[[Trace, tuple[Any, ...], dict[str, Any]], Tensor]] = {
    "cat": Trace._cat,
    "stack": Trace._stack,
    "index_select": Trace._select,
    "index": Trace._index,
}


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, which are tensors, lists of them, or other values."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, list | tuple | dict):
                yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
