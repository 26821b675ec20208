"""Flows: everything that has to travel, laid end to end, and cut among the ranks that can send it.

A rank asks for what it lacks from the *set* of ranks that hold copies of it: with a cluster, from the nearest of them.
All that is asked of a set is one stretch of the sequence, by the rank that asks and then by tensor class; the set's
members take consecutive pieces of it, as long as `balance` gives each:

```
asked of set {0, 4}       | rank 8: qkv qkv up up | rank 9: qkv qkv up up |
sent by                   |          rank 0       |         rank 4        |
```

So each byte has one sender, most ranks receive from one member of a set, and every rank computes equal flows:
nothing is negotiated. The sequence is made of classes, not of tensors, in a few passes of numpy. Shares are computed
among planned ranks (`repeats`), and one rank's flows from them alone, whatever the size of the world.

Lost ranks are members of no set; what is asked of a set without members is missing, and no part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankmesh.core.sharding import ShardMap
from rankmesh.core.strided import IntArray
from rankmesh.transfer.planning.balance import Sets, share
from rankmesh.transfer.planning.classes import TensorClass
from rankmesh.transfer.planning.repeats import Repeated, Repeats

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster

__all__ = ["Flows", "Shares"]

_NONE = np.zeros(0, dtype=np.int64)
Record = tuple[int, int, int, int]


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

    def rows(self, which: npt.NDArray[Any] | slice) -> _Asked:
        """Return some of the requests, in this order."""
        return _Asked(*(getattr(self, name)[which] for name in _Asked.__annotations__))


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
        where = one.holders
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
        rows = one.holders.ranks[order]
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
        """Return the start of each set's members, the members except lost ones, and the block of each set."""
        blocks, sizes, ranks = (np.concatenate([_NONE, *of]) for of in (self._block_of, self._sizes, self._ranks))
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


@dataclass(eq=False)
class _Sequence:
    """The requested bytes, in order: record r starts at byte ``at[r]``, the records of set s at record ``first[s]``.

    ``heads`` has the group, the level and the unit of each set, a row each. ``missing``: see `Flows`.
    """

    asked: _Asked
    at: IntArray
    first: IntArray
    heads: IntArray
    sets: Sets
    missing: IntArray

    def repeated(
        self, each: int, sent: IntArray, repeats: Repeats
    ) -> tuple[Repeated, Repeated, dict[int, list[Record]]]:
        """Return the members of one set and the ranks that ask, by what they send and ask; and the records of these.

        A record is the class of a tensor, a source shard, where it starts in what its rank asks for, and its length.
        """
        of = slice(*self.sets.start[each : each + 2].tolist())
        rows = slice(*np.append(self.first, len(self.at))[each : each + 2].tolist())
        targets = self.asked.target[rows]
        first = np.flatnonzero(np.append(True, targets[1:] != targets[:-1]))
        targets, starts = targets[first], self.at[rows][first]
        lengths = np.diff(np.append(starts, starts[0] + self.sets.asked[each]))
        asked = self.asked.rows(rows)
        places = self.at[rows] - starts[np.searchsorted(targets, asked.target)]
        records: dict[int, list[Record]] = {}
        columns = (asked.tensor_class, asked.shard, places, asked.bytes)
        for target, *record in zip(asked.target.tolist(), *(column.tolist() for column in columns), strict=True):
            records.setdefault(target, []).append(tuple(record))
        senders = Repeated(self.sets.ranks[of].tolist(), sent[of].tolist(), repeats)
        return senders, Repeated(targets.tolist(), lengths.tolist(), repeats), records


class Shares:
    """The bytes that each member of each set sends, computed among the planned ranks; equal on every rank.

    ``bound`` and ``missing``: see `Flows`; ``lost`` ranks send nothing.
    """

    def __init__(self, classes: Sequence[TensorClass], cluster: Cluster | None, lost: Sequence[int]) -> None:
        self._classes, self._cluster, self._lost = classes, cluster, lost
        self._unit = max((one.itemsize for one in classes), default=1)
        widths = () if cluster is None else cluster.widths
        self._widths: tuple[int, ...] = widths or ()
        maps = {id(where): where for one in classes for where in (one.holders, one.receivers)}
        uniform = widths is not None and not lost and not any(one.copies for one in classes)
        self._repeats = Repeats.of(maps.values(), self._widths) if uniform else Repeats()
        self._planned = self._planned_sequence(maps) if self._repeats.digits else self._sequence
        self._sent, self.bound = share(self._planned.sets, self._unit)
        self.missing = self._planned.missing

    @cached_property
    def _sequence(self) -> _Sequence:
        return _sequence(self._classes, None if self._cluster is None else self._cluster.units, self._lost, self._unit)

    def _planned_sequence(self, maps: Mapping[int, ShardMap]) -> _Sequence:
        planned = {number: self._repeats.map(where) for number, where in maps.items()}
        classes = [
            replace(one, holders=planned[id(one.holders)], receivers=planned[id(one.receivers)])
            for one in self._classes
        ]
        ranks = np.arange(max(where.mesh.rank_range.stop for where in planned.values()))
        units = [self._repeats.unit(ranks, width) for width in self._widths]
        return _sequence(classes, np.stack(units) if units else None, (), self._unit)

    @cached_property
    def all(self) -> Flows:
        """The flows between all ranks; O(world)."""
        sequence, sent = self._sequence, self._sent
        if self._repeats.digits and len(sequence.at):
            sent = sent[self._places(sequence)]
        record, sender, low, high = _flows(sequence.at, sequence.asked.bytes, np.append(0, np.cumsum(sent)))
        return Flows(
            tensor_class=sequence.asked.tensor_class[record],
            shard=sequence.asked.shard[record],
            source=sequence.sets.ranks[sender],
            target=sequence.asked.target[record],
            low=low - sequence.at[record],
            high=high - sequence.at[record],
            level=sequence.heads[1][np.searchsorted(sequence.first, record, "right") - 1],
            bound=self.bound,
            missing=self.missing,
        )

    def _places(self, sequence: _Sequence) -> IntArray:
        """Return for each member of all sets which member of the planned sets it is."""
        planned, (group, level, unit) = self._planned, sequence.heads.copy()
        for number, width in enumerate(self._widths):
            here = level == number
            unit[here] = self._repeats.unit(self._repeats.planned(unit[here] * width), width)
        shape = int(group.max()) + 1, len(self._widths) + 1, int(planned.heads[2].max()) + 1
        numbers = np.ravel_multi_index(tuple(planned.heads), shape)
        of = np.searchsorted(numbers, np.ravel_multi_index((group, level, unit), shape))[sequence.sets.of]
        many = int(planned.sets.ranks.max()) + 1
        keys = planned.sets.of * many + planned.sets.ranks
        places: IntArray = np.searchsorted(keys, of * many + self._repeats.planned(sequence.sets.ranks))
        return places

    def of(self, rank: int) -> Flows:
        """Return the flows that one rank sends or receives, in order."""
        if not self._repeats.digits:
            return self.all
        sequence, number = self._planned, self._repeats.planned(rank)
        asks = np.searchsorted(sequence.first, np.flatnonzero(sequence.asked.target == number), "right") - 1
        sends = sequence.sets.of[(sequence.sets.ranks == number) & (self._sent > 0)]
        rows = [row for each in sorted({*asks.tolist(), *sends.tolist()}) for row in self._of(rank, each)]
        tensor_class, shard, source, target, low, high, level = np.array(rows, dtype=np.int64).reshape(-1, 7).T
        return Flows(tensor_class, shard, source, target, low, high, level, self.bound, self.missing)

    def _of(self, rank: int, each: int) -> Iterator[tuple[int, ...]]:
        """Yield the flows of one rank in one planned set: rows of the columns of `Flows`."""
        number, values = self._repeats.planned(rank), self._repeats.values(rank)
        level = int(self._planned.heads[1][each])
        repeats = self._repeats.within(self._widths[level]) if self._widths else self._repeats
        inside, outside = values[: len(repeats.digits)], values[len(repeats.digits) :]
        senders, receivers, records = self._planned.repeated(each, self._sent, repeats)
        if number in senders.ranks:
            local = senders.byte_range(number, inside)
            sent, received = [local], receivers.over(local)
        else:
            local = receivers.byte_range(number, inside)
            sent, received = list(senders.over(local)), iter([local])
        for asker in received:
            target = self._repeats.rank(asker.rank, (*asker.values, *outside))
            for tensor_class, shard, start, length in records[asker.rank]:
                low, high = asker.start + start, asker.start + start + length
                for sender in sent:
                    first, last = max(low, sender.start), min(high, sender.stop)
                    if first < last:
                        source = self._repeats.rank(sender.rank, (*sender.values, *outside))
                        yield tensor_class, shard, source, target, first - low, last - low, level


def _asked(number: int, one: TensorClass, groups: IntArray) -> _Asked:
    """Return the requests of a class: the bytes that its target ranks do not hold as source ranks."""
    source, target, elements = one.pairs()
    ranks = one.receivers.ranks[target]
    away = one.away(source, ranks)
    shard, other, count = (np.broadcast_to(each[:, None], ranks.shape)[away] for each in (source, target, elements))
    count = count * (one.itemsize * len(one.names))
    return _Asked(np.full(len(shard), number), shard, other, groups[shard], ranks[away], count)


def _sequence(classes: Sequence[TensorClass], units: IntArray | None, lost: Sequence[int], unit: int) -> _Sequence:
    """Lay what is asked end to end, by sets; ``lost`` ranks are members of none."""
    copies = _Copies()
    parts = [_asked(number, one, copies.number(one)) for number, one in enumerate(classes)]
    asked = _Asked(
        *(np.concatenate([_NONE, *(getattr(one, name) for one in parts)]) for name in _Asked.__annotations__)
    )
    missing = np.zeros((0, 3), dtype=np.int64)
    start, ranks, block = copies.members(lost)
    if lost:
        nobody = np.diff(start)[asked.group] == 0
    if lost and nobody.any():
        missing = np.unique(np.stack([asked.tensor_class, asked.shard, asked.other], axis=1)[nobody], axis=0)
        asked = asked.rows(~nobody)
    if not len(asked.bytes):
        return _Sequence(
            asked, _NONE, _NONE, np.zeros((3, 0), dtype=np.int64), Sets(_NONE, _NONE, _NONE, _NONE), missing
        )
    level, place = _nearest(asked, start, ranks, units)
    order = np.lexsort((asked.tensor_class, asked.target, place, level, asked.group))
    asked, keys = asked.rows(order), np.stack([asked.group, level, place])[:, order]
    new_set = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    # Ranks that ask are sequence out from whole units on, wide elements first: whole units then never cut an element.
    at = _places(asked.bytes, new_set | np.append(True, asked.target[1:] != asked.target[:-1]), unit)
    end = -(-(at[-1] + asked.bytes[-1]) // unit) * unit
    heads = keys[:, new_set]
    sets = _sets(heads, start, ranks, block, np.diff(np.append(at[new_set], end)), units)
    return _Sequence(asked, at, np.flatnonzero(new_set), heads, sets, missing)


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
    """Return the start of each record in the sequence: one after the other, each rank's first at a whole unit."""
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
