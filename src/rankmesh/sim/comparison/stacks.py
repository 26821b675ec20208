"""Stacks: which lines of the user's program led to a collective, for a backward pass also in the forward pass.

```
innermost   collectives.py:38 in total             got its group as an argument
            collectives.py:75 in backward          got it from its context
            collectives.py:112 in copied           recorded in the forward pass; an argument again
            tensor_parallel.py:55 in forward       chose the group: the site
            train.py:12 in program
```

The *site* of a collective is the innermost line that chose its group: it did not get it as an argument, and is always
reached with the same kinds. A ``Node`` is a site, or a finer one with more lines.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.backend.tracing import autograd_node, values_of
from rankmesh.runtime.handles import LiveGroup
from rankmesh.sim.calls import Site, is_users_file

__all__ = ["Node", "Stack", "forward_passes_recorded", "nodes_of", "stack_here"]

# The call by which Python enters the backward pass, and where a node of autograd keeps the lines that made it.
_ENGINE, _KEPT = ("graph.py", "_engine_run_backward"), "rankmesh.lines"

# A line, and the process groups that its function got as arguments, by identity.
_Line = tuple[Site, frozenset[int]]


@dataclass(frozen=True)
class Stack:
    """The lines that led to a call, innermost first; the first ``passing`` of them got the group as an argument."""

    sites: tuple[Site, ...]
    passing: int


@dataclass(frozen=True)
class Node:
    """Calls that are reached through these lines, innermost first, on one kind of group.

    ``anywhere``: also those that have these lines further out, as a backward pass has what made it.
    """

    sites: tuple[Site, ...]
    kind: str
    operation: str
    anywhere: bool = False

    @property
    def site(self) -> Site:
        """The outermost line of the node."""
        return self.sites[-1]

    def matches(self, stack: Sequence[Site], kind: str) -> bool:
        """Return whether a call is one of these."""
        if kind != self.kind:
            return False
        starts = range(len(stack) - len(self.sites) + 1) if self.anywhere else (0,)
        return any(tuple(stack[start : start + len(self.sites)]) == self.sites for start in starts)


def stack_here(pg: object) -> Stack:
    """Return the stack of the call on a process group that is being made on this thread."""
    lines = list(_lines(sys._getframe(1)))
    passing = next((number for number, (_, given) in enumerate(lines) if id(pg) not in given), len(lines))
    return Stack(tuple(site for site, _ in lines), min(passing, max(len(lines) - 1, 0)))


def _lines(frame: FrameType | None) -> Iterator[_Line]:
    """Yield the user's lines from a frame outwards; from a backward pass on, those that made what it differentiates.

    Where no lines are recorded, as in the hooks of DistributedDataParallel, the line that started the pass is one.
    """
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            yield Site(code.co_filename, frame.f_lineno, code.co_name), _given(frame)
        elif code.co_name == _ENGINE[1] and code.co_filename.endswith(_ENGINE[0]):
            node = autograd_node()
            made_by = None if node is None else node.metadata.get(_KEPT)
            if made_by is not None:
                yield from made_by
                return
        frame = frame.f_back


def _given(frame: FrameType) -> frozenset[int]:
    """Return the process groups among the arguments of a function."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    names = code.co_varnames[:count]
    return frozenset(id(pg) for value in values_of(frame, names) for pg in _groups(value))


def _groups(value: object) -> Iterator[object]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, LiveGroup):
        yield vars(value).get("pg")
    elif isinstance(value, tuple | list | dict) and len(value) < 64:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _groups(one)
    elif isinstance(value, torch.autograd.function.FunctionCtx):
        for one in vars(value).values():
            yield from _groups(one)


@contextmanager
def forward_passes_recorded() -> Iterator[None]:
    """Have what an ``autograd.Function`` makes keep the lines that called it, for its backward pass."""
    apply: Any = torch.autograd.Function.__dict__["apply"]

    def recorded(cls: type[torch.autograd.Function], /, *args: object, **kwargs: object) -> object:
        result = apply.__get__(None, cls)(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        nodes = {one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None}
        lines = list(_lines(sys._getframe(1))) if nodes else []
        for node in nodes:
            made: Any = node
            made.metadata.setdefault(_KEPT, lines)
        return result

    torch.autograd.Function.apply = classmethod(recorded)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def nodes_of(calls: Iterable[tuple[Stack, str, str]]) -> dict[tuple[Stack, str], list[Node]]:
    """For each stack and kind its site first, then finer nodes, where other calls share the site.

    ``calls`` are the stack, the kind of group and the operation of each.
    """
    listed = [call for call in dict.fromkeys(calls) if call[0].sites]
    kinds: dict[tuple[Site, ...], set[str]] = defaultdict(set)
    longer: dict[tuple[Site, ...], set[tuple[Site, ...]]] = defaultdict(set)
    for stack, kind, _ in listed:
        for length in range(1, len(stack.sites) + 1):
            kinds[stack.sites[:length]].add(kind)
            longer[stack.sites[: length - 1]].add(stack.sites[:length])

    def lengths(stack: Stack) -> list[int]:
        sites = stack.sites
        known = range(stack.passing + 1, len(sites) + 1)
        first = next(length for length in known if len(kinds[sites[:length]]) == len(kinds[sites]))
        return [first, *(length + 1 for length in range(first, len(sites)) if len(longer[sites[:length]]) > 1)]

    return {
        (stack, kind): [Node(stack.sites[:length], kind, operation) for length in lengths(stack)]
        for stack, kind, operation in listed
    }
