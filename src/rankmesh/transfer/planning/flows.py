"""Flows: everything that has to travel, laid end to end, and cut among the ranks that can send it.

A rank asks for what it lacks from the *set* of ranks that hold copies of it: with a cluster, from the nearest of them.
All that is asked of a set is one stretch of the sequence, by the rank that asks and then by tensor class; the set's
members take consecutive pieces of it, as long as `balance` gives each:

```
asked of set {0, 4}       | rank 8: qkv qkv up up | rank 9: qkv qkv up up |
sent by                   |          rank 0       |         rank 4        |
```

So each byte has one sender, most ranks receive from one member of a set, and every rank computes equal flows:
nothing is negotiated. The sequence is made of classes, not of tensors, in a few passes of numpy.

Lost ranks are members of no set; what is asked of a set without members is missing, and no part of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankmesh.core.strided import IntArray
from rankmesh.transfer.planning.balance import Sets, share
from rankmesh.transfer.planning.classes import TensorClass

if TYPE_CHECKING:
    from rankmesh.placement import Cluster

__all__ = ["Flows", "flows_of"]


@dataclass(frozen=True, eq=False)
class Flows:
    """The flows of a transfer: parallel arrays in the order of the sequence.

    Flow f is bytes ``low[f]`` to ``high[f] - 1`` of what ``target[f]`` needs of source shard ``shard[f]`` of tensors of
    class ``tensor_class[f]``, one after the other; ``source[f]`` sends it, over level ``level[f]`` of the cluster.
    ``bound`` is the least that the busiest sender could send. ``missing`` has a row (tensor class, source shard, target
    shard) for each pair of shards of which nobody that is left has what they have in common.
    """

    tensor_class: IntArray
    shard: IntArray
    source: IntArray
    target: IntArray
    low: IntArray
    high: IntArray
    level: IntArray
    bound: int
    missing: IntArray

    @property
    def bytes(self) -> IntArray:
        """Bytes of each flow."""
        return self.high - self.low


@dataclass(eq=False)
class _Asked:
    """Requests of ranks to sets: parallel arrays. ``group`` is a set of copies, before any nearness."""

    tensor_class: IntArray
    shard: IntArray
    other: IntArray
    group: IntArray
    target: IntArray
    bytes: IntArray


class _Copies:
    """The sets of copies of all classes, numbered; the sets of one block share no ranks."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._sizes: list[IntArray] = []
        self._ranks: list[IntArray] = []
        self._block_of: list[IntArray] = []
        self._blocks = 0
        self._count = 0

    def number(self, one: TensorClass) -> IntArray:
        """Return the number of the set that holds each source shard of a class."""
        where = one.source.shard_map
        order = np.argsort(where.first)
        pattern = where.copies, one.copies
        if pattern not in self._known:
            self._known[pattern] = self._count
            self._count += len(order)
            self._add(one, order)
        numbers = np.empty_like(order)
        numbers[order] = self._known[pattern] + np.arange(len(order))
        return numbers

    def _add(self, one: TensorClass, order: IntArray) -> None:
        """Add the sets of one pattern; the sets of a sharding alone share no ranks."""
        rows = one.source.shard_map.ranks[order]
        blocks = np.zeros(len(rows), dtype=np.int64)
        sizes, ranks = np.full_like(blocks, rows.shape[1]), rows.reshape(-1)
        if one.kept:
            wider = [(*row, *one.kept.get(shard, ())) for shard, row in zip(order.tolist(), rows.tolist(), strict=True)]
            sizes, ranks = np.array(list(map(len, wider))), np.concatenate([np.array(row) for row in wider])
            blocks = np.array(_blocks(wider))
        self._sizes.append(sizes)
        self._ranks.append(ranks)
        self._block_of.append(self._blocks + blocks)
        self._blocks += int(blocks.max()) + 1

    def members(self, lost: Sequence[int]) -> tuple[IntArray, IntArray, IntArray]:
        """Return where the members of each set start, the members except lost ones, and the block of each set."""
        blocks, sizes, ranks = map(np.concatenate, (self._block_of, self._sizes, self._ranks))
        if lost:
            kept = ~np.isin(ranks, lost)
            sizes = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[kept], minlength=len(sizes))
            ranks = ranks[kept]
        return np.append(0, np.cumsum(sizes)), ranks, blocks


def _blocks(sets: Sequence[Sequence[int]]) -> list[int]:
    """Return the first block for each set in which it shares no rank with another set."""
    taken: list[set[int]] = []
    blocks = []
    for ranks in sets:
        block = next((number for number, others in enumerate(taken) if others.isdisjoint(ranks)), len(taken))
        if block == len(taken):
            taken.append(set())
        taken[block].update(ranks)
        blocks.append(block)
    return blocks


def flows_of(classes: Sequence[TensorClass], cluster: Cluster | None, lost: Sequence[int]) -> Flows:
    """Return the flows of a transfer in which ``lost`` ranks send nothing; equal on every rank."""
    copies = _Copies()
    asked = [_asked(number, one, copies.number(one)) for number, one in enumerate(classes)]
    columns = [np.concatenate([getattr(one, name) for one in asked]) for name in _Asked.__annotations__]
    every, missing = _Asked(*columns), np.zeros((0, 3), dtype=np.int64)
    if len(every.bytes):
        members = copies.members(lost)
        nobody = np.diff(members[0])[every.group] == 0
        if nobody.any():
            pairs = np.stack([every.tensor_class, every.shard, every.other], axis=1)[nobody]
            every, missing = _Asked(*(column[~nobody] for column in columns)), np.unique(pairs, axis=0)
    if not len(every.bytes):
        none = np.zeros(0, dtype=np.int64)
        return Flows(none, none, none, none, none, none, none, 0, missing)
    unit = max(one.itemsize for one in classes)
    return _cut(every, members, unit, None if cluster is None else cluster.units, missing)


def _asked(number: int, one: TensorClass, groups: IntArray) -> _Asked:
    """Return what the target ranks of a class do not hold as source ranks."""
    source, target, elements = one.pairs()
    ranks = one.target.shard_map.ranks[target]
    away = one.away(source, ranks)
    shard, other, count = (np.broadcast_to(each[:, None], ranks.shape)[away] for each in (source, target, elements))
    count = count * (one.itemsize * len(one.names))
    return _Asked(np.full(len(shard), number), shard, other, groups[shard], ranks[away], count)


def _cut(
    asked: _Asked,
    members: tuple[IntArray, IntArray, IntArray],
    unit: int,
    units: IntArray | None,
    missing: IntArray,
) -> Flows:
    start, ranks, block = members
    level, place = _nearest(asked, start, ranks, units)
    keys = np.stack([asked.group, level, place])
    order = np.lexsort((asked.tensor_class, asked.target, place, level, asked.group))
    keys = keys[:, order]
    new_set = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    heads = keys[:, new_set]
    target, length = asked.target[order], asked.bytes[order]
    # Ranks that ask are laid out from whole units on, wide elements first: whole units then never cut an element.
    new_rank = new_set | np.append(True, target[1:] != target[:-1])
    at = _places(length, new_rank, unit)
    end = -(-(at[-1] + length[-1]) // unit) * unit
    asked_of = np.diff(np.append(at[new_set], end))
    sets = _sets(heads, start, ranks, block, asked_of, units)
    sent, least = share(sets, unit)
    pieces = np.append(0, np.cumsum(sent))
    record, sender, low, high = _flows(at, length, pieces)
    return Flows(
        tensor_class=asked.tensor_class[order][record],
        shard=asked.shard[order][record],
        source=sets.ranks[sender],
        target=target[record],
        low=low - at[record],
        high=high - at[record],
        level=keys[1][record],
        bound=least,
        missing=missing,
    )


def _nearest(asked: _Asked, start: IntArray, ranks: IntArray, units: IntArray | None) -> tuple[IntArray, IntArray]:
    """Return the innermost level at which some holder shares a unit with the rank that asks, and that unit."""
    level = np.full(len(asked.group), -1)
    place = np.zeros_like(level)
    if units is None:
        return level + 1, place
    sizes = np.diff(start)
    of = np.repeat(np.arange(len(sizes)), sizes)
    for number, unit in enumerate(units):
        here = of * (unit.max() + 1) + unit[ranks]
        mine = asked.group * (unit.max() + 1) + unit[asked.target]
        found = (level < 0) & np.isin(mine, here)
        level[found], place[found] = number, unit[asked.target[found]]
    return level, place


def _places(length: IntArray, new: IntArray, unit: int) -> IntArray:
    """Return where each record starts in the sequence: one after the other, each rank's first at a whole unit."""
    first = np.flatnonzero(new)
    totals = np.add.reduceat(length, first)
    starts = np.append(0, np.cumsum(-(-totals // unit) * unit)[:-1])
    before = np.cumsum(length) - length
    return np.asarray(np.repeat(starts - before[first], np.diff(np.append(first, len(length)))) + before)


def _sets(
    heads: IntArray, start: IntArray, ranks: IntArray, block: IntArray, asked: IntArray, units: IntArray | None
) -> Sets:
    """Return the sets that are asked: the members of each group that are in the unit of the rank that asks."""
    group, level, place = heads
    sizes = np.diff(start)[group]
    of = np.repeat(np.arange(len(group)), sizes)
    offset = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members = ranks[start[group][of] + offset]
    if units is not None:
        near = units[level[of], members] == place[of]
        of, members = of[near], members[near]
        block = block * len(units)
    counts = np.bincount(of, minlength=len(group))
    return Sets(np.append(0, np.cumsum(counts)), members, asked, block[group] + level)


def _flows(at: IntArray, length: IntArray, pieces: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Match records with senders' pieces, both in order: (record, sender, from, to) wherever the two meet."""
    cuts = np.sort(np.concatenate([at, pieces[:-1]]))  # of equal ones only the last is not empty
    record = np.searchsorted(at, cuts, "right") - 1
    sender = np.searchsorted(pieces, cuts, "right") - 1
    stops = np.minimum(np.append(cuts[1:], pieces[-1]), (at + length)[record])
    real = cuts < stops
    return record[real], sender[real], cuts[real], stops[real]
