"""Messages: sends and receives have no counterpart on one process, so what is wrong about them is found by trial.

```
peer     another member of the group              send 0 → 2   becomes   0 → 1
group    another kind of group, as far along it
order    the opposite order, some at a time       1 0 3 2      becomes   0 1 2 3
part     another part of what the tensor is a slice of
```

A send and the receives that get what it sends are one *exchange*: most changes are of all of its calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

import torch

from rankmesh.backend import torch_threads
from rankmesh.errors import LayoutError
from rankmesh.sim.calls import Call
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.repairs import Repair, regroupings
from rankmesh.sim.comparison.stacks import Node, Stack, nodes_of
from rankmesh.sim.group import SimulatedGroup

__all__ = ["Message", "Rerouting", "changes", "regrouped"]

# A call, with the lines that led to it and the kind of its group.
Message = tuple[Stack, str, Call]
_STEPS = ("next", "previous", "next in the ring", "previous in the ring")
_INVERSE = dict(zip(_STEPS, ("previous", "next", "previous in the ring", "next in the ring"), strict=True))
_PARTS = ("other", "next", "previous")
# Messages that are tried in the opposite order at a time.
_MOST_TURNED = 16
# Tags of reordered messages, beyond those of programs.
_TAGS = 1 << 32


def changes(
    messages: Sequence[Message], delivered: Iterable[tuple[Call, Call]], layouts: Sequence[Layout]
) -> Iterator[Repair]:
    """The changes to try, of coarse nodes first: of whole exchanges, then of the sends or the receives alone."""
    nodes = {
        operation: nodes_of((stack, kind, operation) for stack, kind, call in messages if call.operation == operation)
        for operation in ("send", "recv")
    }
    at = {id(call): nodes[call.operation][stack, kind] for stack, kind, call in messages if stack.sites}
    pairs = [(send, recv) for send, recv in delivered if id(send) in at and id(recv) in at]
    for depth in range(max(map(len, at.values()), default=0)):
        node_of = {key: found[min(depth, len(found) - 1)] for key, found in at.items()}
        exchanges = _exchanges([(node_of[id(send)], node_of[id(recv)]) for send, recv in pairs])
        for exchange in exchanges:
            first, *others = exchange
            yield from (Repair("group", one.what, first, tuple(others)) for one in regroupings(first, layouts))
            yield from (Repair("peer", step, first, tuple(others)) for step in _STEPS)
            members = [(send, recv) for send, recv in pairs if node_of[id(send)] in exchange]
            named = next((node_of[id(recv)] for _, recv in members if _received_backwards(members)), first)
            rest = tuple(node for node in exchange if node != named)
            yield from (Repair("order", str(count), named, rest) for count in _turns(members))
        for node in dict.fromkeys(node_of.values()):
            steps = _STEPS if node.operation == "send" else tuple(map(_INVERSE.__getitem__, _STEPS))
            yield from (Repair("peer", peer, node) for peer in (*steps, "first", "last"))
            yield from regroupings(node, layouts)
            yield from (Repair("part", part, node) for part in _PARTS)


def _exchanges(pairs: Iterable[tuple[Node, Node]]) -> list[list[Node]]:
    """The nodes whose messages belong together, sends first."""
    found: dict[Node, dict[Node, None]] = {}
    for send, recv in dict.fromkeys(pairs):
        both = {**found.get(send, {send: None}), **found.get(recv, {recv: None})}
        found.update(dict.fromkeys(both, both))
    distinct = {id(one): one for one in found.values()}
    return [sorted(one, key=lambda node: node.operation, reverse=True) for one in distinct.values()]


def _turns(pairs: Sequence[tuple[Call, Call]]) -> list[int]:
    """How many messages at a time could be in the opposite order."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for send, recv in pairs:
        counts[send.rank, recv.rank] += 1
    common = gcd(*counts.values()) if counts else 1
    return [count for count in range(2, min(common, _MOST_TURNED) + 1) if common % count == 0]


def _received_backwards(pairs: Sequence[tuple[Call, Call]]) -> bool:
    """Whether some rank receives into the later parts of a tensor first."""
    last: dict[tuple[int, int], int] = {}
    for _, recv in pairs:
        tensor = recv.outputs[0]
        key = recv.rank, tensor.untyped_storage().data_ptr()
        if last.get(key, -1) > int(tensor.storage_offset()):
            return True
        last[key] = int(tensor.storage_offset())
    return False


def regrouped(layout: Layout, pg: SimulatedGroup, call: Call, kind: str) -> SimulatedGroup:
    """The group of another kind on which a call is made instead, at the place of its rank there."""
    groups = layout.kinds[kind]
    if not groups.has(call.rank):
        raise LayoutError(f"rank {call.rank} is in no group of the kind {kind}")
    ranks = groups.of(call.rank).ranks
    call.position = ranks.index(call.rank)
    return pg.simulation.group(call.rank, f"repair/{pg.channel.label.partition('@')[0]}/{kind}", ranks, kind)


class Rerouting:
    """The messages of one run, as a repair changes them; ``LayoutError`` where it cannot."""

    def __init__(self, layout: Layout, repair: Repair) -> None:
        self._layout, self._repair = layout, repair
        self._counts: Mapping[object, list[int]] = defaultdict(lambda: [0])

    def apply(
        self, pg: SimulatedGroup, call: Call, peer: int | None, tag: int
    ) -> tuple[SimulatedGroup, int | None, int]:
        """The group, the peer and the tag of a call that the repair changes."""
        form = self._repair.form
        if form == "group":
            return *self._moved(pg, call, peer), tag
        if form == "peer":
            return pg, self._toward(len(pg.channel.ranks), call), tag
        if form == "order":
            return pg, peer, self._numbered(pg, call, peer, tag)
        _take_part(call, self._repair.what)
        return pg, peer, tag

    def _moved(self, pg: SimulatedGroup, call: Call, peer: int | None) -> tuple[SimulatedGroup, int | None]:
        former, step = len(pg.channel.ranks), 0 if peer is None else peer - call.position
        step -= former * (1 if step > 0 else -1) if 2 * abs(step) > former else 0
        other = regrouped(self._layout, pg, call, self._repair.what)
        size = len(other.channel.ranks)
        if size == 1:
            raise LayoutError(f"rank {call.rank} has nobody to exchange messages with over {self._repair.what}")
        return other, None if peer is None else (call.position + step) % size

    def _toward(self, size: int, call: Call) -> int:
        what, node = self._repair.what, self._repair.node
        if node is not None and node.operation != call.operation:
            what = _INVERSE[what]
        found = {"first": 0, "last": size - 1}.get(what, call.position + (1 if what.startswith("next") else -1))
        found = found % size if what.endswith("ring") else found
        if not 0 <= found < size or found == call.position:
            raise LayoutError(f"position {call.position} of {size} has no {what}")
        return found

    def _numbered(self, pg: SimulatedGroup, call: Call, peer: int | None, tag: int) -> int:
        """A tag of its own for each message, by its number between two ranks: that of a send is turned."""
        if peer is None:
            raise LayoutError("a receive from anybody has no order")
        sends = call.operation == "send"
        ends = (call.position, peer) if sends else (peer, call.position)
        counter = self._counts[pg.channel, call.operation, ends, tag]
        number, counter[0] = counter[0], counter[0] + 1
        call.buffered = sends
        return _TAGS * (tag + 1) + (_turned(number, int(self._repair.what)) if sends else number)


def _turned(number: int, count: int) -> int:
    return number - number % count + count - 1 - number % count


def _take_part(call: Call, which: str) -> None:
    """Let the call send from, or receive into, another part of the memory of which its tensor is one."""
    sends = call.operation == "send"
    other = _part((call.inputs if sends else call.outputs)[0], which)
    if sends:
        call.inputs, call.given, call.versions = [other], [other.clone()], [torch_threads.version(other)]
    else:
        call.outputs = [other]


def _part(tensor: torch.Tensor, which: str) -> torch.Tensor:
    length = tensor.numel()
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    parts, index = (total // length, tensor.storage_offset() // length) if length else (0, 0)
    if parts == 1:
        return tensor.detach()
    other = {"other": parts - 1 - index, "next": index + 1, "previous": index - 1}[which]
    if total != parts * length or tensor.storage_offset() % length or not 0 <= other < parts or other == index:
        raise LayoutError(f"a tensor of shape {list(tensor.shape)} has no {which} part")
    return tensor.detach().as_strided(tensor.shape, tensor.stride(), other * length)
