"""One run of the program under one layout: what is seen is kept (the reference) or compared with what was kept.

```
reference    values, by name and number            how far each may be off: the tolerance, or its noise
layout       each rank's shard of a value  ──────  the same elements of the reference
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf

import torch

from rankmesh.core.boxes import Box, uncovered
from rankmesh.core.sharding import Shard, Sharding
from rankmesh.errors import LayoutError, RankmeshError, quoted
from rankmesh.sim.calls import Call, call_site
from rankmesh.sim.channel import Channel, Observer
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.noise import Scale, largest
from rankmesh.sim.comparison.repairs import Repair
from rankmesh.sim.comparison.result import Difference
from rankmesh.sim.comparison.seen import Seen, piece
from rankmesh.sim.comparison.stacks import Stack, stack_here
from rankmesh.sim.failures import RanksFailed
from rankmesh.sim.group import SimulatedGroup
from rankmesh.sim.simulation import current_context

__all__ = ["SAME_SHAPE", "Key", "Record", "Reference", "Session", "Stopped"]

# Collectives whose tensors have one shape whatever the size of the group.
SAME_SHAPE = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce")
# A name, and the how-manieth value of that name on its rank.
Key = tuple[str, int]
# A value of this size, in units of the largest, is what rounding leaves of a zero.
_ROUNDING = 1e-12


class Stopped(BaseException):
    """Ends a trial as soon as it cannot succeed; no error of the user's program."""


@dataclass(eq=False)
class Record:
    """One rank's call of one collective: where in its program, and what it gave and got before the traced value."""

    stack: Stack
    kind: str
    operation: str
    given: list[torch.Tensor] | None = None
    results: list[torch.Tensor] | None = None


@dataclass(eq=False)
class Reference:
    """The values that the program saw on one process, with the size and the noise of each."""

    values: dict[Key, torch.Tensor]
    scales: dict[Key, Scale]
    tolerance: float

    @cached_property
    def order(self) -> dict[Key, int]:
        """The number of each value in the order of the program."""
        return {key: number for number, key in enumerate(self.values)}

    def place(self, key: Key) -> int:
        """Return the place of a value in the program's order, behind all others where one process does not see it."""
        return self.order.get(key, len(self.order))

    @cached_property
    def _overall(self) -> float:
        return max((scale.size for scale in self.scales.values() if not scale.exact), default=0.0)

    @property
    def spread(self) -> float:
        """The largest spread of a value, in units of its largest element; values that are all rounding aside."""
        whole = (one for one in self.scales.values() if one.size > _ROUNDING * self._overall)
        return max((one.spread / one.size for one in whole), default=0.0)

    def allowed(self, key: Key) -> float:
        """Return the difference that is allowed in an element of a value."""
        return self.scales[key].allowed(self.tolerance, self._overall)


class Session(Observer):
    """A run; ``reference`` is None in the run of the reference itself.

    ``repair``   a change that is tried; ``until`` is the key up to which every value must then be right
    ``trace``    every collective is recorded, those before this value with their tensors
    """

    def __init__(
        self,
        layout: Layout,
        reference: Reference | None,
        *,
        repair: Repair | None = None,
        until: Key | None = None,
        trace: Key | None = None,
    ) -> None:
        self.layout, self.reference, self.repair, self.trace = layout, reference, repair, trace
        self.failure: RanksFailed | None = None
        self.values: dict[Key, torch.Tensor] = {}
        self.deviations: dict[Key, Difference] = {}
        self.worst: dict[str, float] = {}
        self.records: dict[int, list[Record]] = defaultdict(list)
        # Whether the repair has changed a call; how many of its sums were of different numbers, and of equal ones.
        self.changed, self.sums_of_different, self.sums_of_equal = False, 0, 0
        self._until = -1 if until is None or reference is None else reference.order.get(until, -1)
        self._numbers: dict[tuple[int, str], int] = defaultdict(int)
        self._covered: dict[Key, set[Box]] = defaultdict(set)
        self._kind_of = cache(layout.kind_of)
        # Until all members have joined, as a call keeps what made its tensors: where calls are recorded, and the
        # members in the program of the groups of those that the repair changes.
        self._recorded: dict[Call, Record] = {}
        self._chosen: dict[Call, tuple[int, ...]] = {}

    @property
    def looks_at_lines(self) -> bool:
        """Return whether the lines that led to each collective matter."""
        return self.trace is not None or (self.repair is not None and self.repair.node is not None)

    # -- what is seen -------------------------------------------------------------------------------------------

    def see(self, rank: int, name: str, seen: Seen) -> None:
        """Keep or compare one value of one rank."""
        number = self._numbers[rank, name]
        self._numbers[rank, name] += 1
        key = (name, number)
        if self.reference is None:
            self.values[key] = seen.tensor.cpu().clone()
        elif key not in self.reference.values:
            self._note(key, "extra", rank, inf, None, seen.tensor)
        else:
            self._compare(key, rank, seen, self.reference)

    def _compare(self, key: Key, rank: int, seen: Seen, reference: Reference) -> None:
        whole = reference.values[key]
        sharding = self._sharding(key[0], whole, seen)
        shard = sharding.of(rank)
        if not sharding.holds(rank):
            return
        self._covered[key].update(shard.boxes)
        if tuple(seen.tensor.shape) != shard.shape:
            self._note(key, "shape", rank, inf, piece(whole, shard, None), seen.tensor)
            return
        error, expected = _difference(whole, shard, seen.tensor)
        if not self.looks_at_lines:
            error = self._repaired(key, rank, seen, sharding, error)
        size = reference.scales[key].size
        self.worst[key[0]] = max(self.worst.get(key[0], 0.0), error / size if size else error)
        if not error <= reference.allowed(key):
            self._note(key, "value", rank, error, expected, seen.tensor)

    def _sharding(self, name: str, whole: torch.Tensor, seen: Seen) -> Sharding:
        options = dict(seen.options)
        sizes = self.layout.mesh.view(options.get("view")).axes
        if "at" in options:
            options["at"] = {axis: at for axis, at in options["at"].items() if sizes.get(axis) != 1}
        dtype = str(whole.dtype).removeprefix("torch.")
        try:
            return Sharding(self.layout.mesh, seen.cut, tuple(whole.shape), dtype, **options)
        except RankmeshError as error:
            raise LayoutError(f"sim.see({quoted(name)}) under {self.layout.name}: {error}", name=name) from error

    def _note(
        self, key: Key, why: str, rank: int, error: float, expected: torch.Tensor | None, got: torch.Tensor
    ) -> None:
        known = self.deviations.get(key)
        if known is None:
            self._deviates(key, why, [rank], error, expected, got.cpu().clone(), call_site().short)
        else:
            ranks = tuple(sorted({*known.ranks, rank}))
            self.deviations[key] = replace(known, ranks=ranks, error=max(known.error, error))
        if self.reference is not None and self.reference.order.get(key, self._until + 1) <= self._until:
            raise Stopped

    def _deviates(
        self,
        key: Key,
        why: str,
        ranks: Iterable[int],
        error: float = inf,
        expected: torch.Tensor | None = None,
        got: torch.Tensor | None = None,
        site: str | None = None,
    ) -> None:
        name, number = key
        self.deviations[key] = Difference(
            name, self.layout.name, tuple(sorted(ranks)), expected, got, site, number=number, why=why, error=error
        )

    def finish(self) -> None:
        """Note the values of the reference of which some part was seen by no rank."""
        for key, whole in self.reference.values.items() if self.reference else ():
            box: Box = tuple((0, length) for length in whole.shape)
            parts = self._covered.get(key, ())
            if key not in self.deviations and whole.numel() and uncovered(box, parts):
                ranks = [rank for rank in range(self.layout.plan.world_size) if not self._has_seen(rank, key)]
                self._deviates(key, "unseen", ranks, expected=whole)

    def _has_seen(self, rank: int, key: Key) -> bool:
        return self._numbers[rank, key[0]] > key[1]

    def fail(self, failure: RanksFailed) -> None:
        """Note that the program failed, and what it had not seen until then."""
        self.finish()
        keys = list(self.reference.values) if self.reference else []
        first = next((key for key in keys if key in self.deviations), keys[-1])
        self.failure = failure
        self._deviates(first, "failed", failure.failures)

    # -- repairs of what is seen --------------------------------------------------------------------------------

    def _repaired(self, key: Key, rank: int, seen: Seen, sharding: Sharding, error: float) -> float:
        """Return the difference that is left when what is seen has been repaired, if that makes it right."""
        repair, reference = self.repair, self.reference
        if repair is None or reference is None or not seen.tensor.is_floating_point():
            return error
        allowed = reference.allowed(key)
        if repair.factor is not None:
            better = None if error <= allowed else seen.tensor * repair.factor.value(self.layout)
        else:
            better = self._summed(rank, repair.kind, seen.tensor, differs=not error <= allowed, allowed=allowed)
        if better is None:
            return error
        left, _ = _difference(reference.values[key], sharding.of(rank), better)
        if left <= allowed:
            seen.replace(better)
            return left
        return error

    def _summed(
        self, rank: int, kind: str, tensor: torch.Tensor, *, differs: bool, allowed: float
    ) -> torch.Tensor | None:
        """Return the sum over a group where one member differs; None where all are right, or all equal."""
        given = torch.cat([tensor.new_tensor([float(differs)]), tensor.reshape(-1)])
        every = self._gathered(rank, kind, given)
        if not any(float(one[0]) for one in every):
            return None
        if all(largest(one[1:] - every[0][1:]) <= allowed for one in every):
            return None
        return torch.stack([one[1:] for one in every]).sum(0).reshape(tensor.shape)

    def _gathered(self, rank: int, kind: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of the members of a rank's group, on a group of the repair's own."""
        context = current_context()
        ranks = self.layout.kinds[kind].of(rank).ranks
        if context is None or len(ranks) == 1:
            return [tensor]
        pg = context.simulation.group(rank, f"seen/{kind}", ranks, kind)
        every = [torch.empty_like(tensor) for _ in ranks]
        with torch.no_grad():
            pg.allgather([every], [tensor]).wait()
        return every

    # -- collectives --------------------------------------------------------------------------------------------

    def route(self, pg: SimulatedGroup, call: Call) -> SimulatedGroup:
        """Return the group of a collective, or the one that the repair gives it."""
        if not self.looks_at_lines or pg.channel.name.startswith("seen/"):
            return pg
        if not self._changes(pg, call) or self.repair is None or self.repair.form != "group":
            return pg
        return self._moved(pg, call, self.repair.kind)

    def _changes(self, pg: SimulatedGroup, call: Call) -> bool:
        """Record a call where that is wanted; whether it is one that the repair changes."""
        kind, stack = self._kind_of(pg.channel.label, pg.channel.ranks), stack_here(pg)
        if self.trace is not None:
            record = Record(stack, kind, call.operation)
            self.records[call.rank].append(record)
            if self.reference is None or not self._has_seen(call.rank, self.trace):
                record.given, self._recorded[call] = call.given, record
        changes = self.repair is not None and self.repair.changes(stack.sites, kind)
        if changes:
            self.changed, self._chosen[call] = True, pg.channel.ranks
        return changes

    def _moved(self, pg: SimulatedGroup, call: Call, kind: str) -> SimulatedGroup:
        groups = self.layout.kinds[kind]
        if not groups.has(call.rank):
            raise LayoutError(f"rank {call.rank} is in no group of the kind {kind}")
        ranks, former = groups.of(call.rank).ranks, len(pg.channel.ranks)
        call.position = ranks.index(call.rank)
        other = pg.simulation.group(call.rank, f"repair/{pg.channel.label.partition('@')[0]}/{kind}", ranks, kind)
        if call.operation not in SAME_SHAPE and len(ranks) != former:
            raise LayoutError(f"{call.operation} has tensors for {former} ranks, not for {len(ranks)}")
        if call.root is not None:
            call.root %= len(ranks)
            call.signature = {**call.signature, "root": f"rank {ranks[call.root]}"}
        return other

    def computed(self, channel: Channel, calls: Sequence[Call]) -> None:
        """Record the results, scale those that the repair scales; count what a repair's sums add up."""
        for call in calls:
            if (record := self._recorded.pop(call, None)) is not None:
                shaped = zip(call.results or (), call.outputs, strict=False)
                record.results = [result.reshape(output.shape) for result, output in shaped]
        repair, chosen = self.repair, [self._chosen.pop(call, None) for call in calls]
        if repair is None or not any(chosen):
            return
        if repair.factor is not None:
            factor = repair.factor.value(self.layout)
            for call in calls:
                call.results = [_scaled(result, factor) for result in call.results or ()]
        if repair.form == "group" and calls[0].reduction is not None:
            sums: dict[object, torch.Tensor] = {}
            for former, call in zip(chosen, calls, strict=True):
                flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in call.given])
                sums[former] = sums[former] + flat if former in sums else flat
            self._count(list(sums.values()))

    def _count(self, added: Sequence[torch.Tensor]) -> None:
        """Count whether the repair adds equal numbers: then it only scales them."""
        first, *others = added
        if others:
            close = all(torch.allclose(first, other, rtol=1e-6, atol=0.0) for other in others)
            self.sums_of_equal += close
            self.sums_of_different += not close


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor if tensor.is_floating_point() or tensor.is_complex() else tensor


def _difference(whole: torch.Tensor, shard: Shard, got: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the largest difference of an element from what a rank should hold, and that."""
    wide = torch.complex128 if whole.is_complex() or got.is_complex() else torch.float64
    expected = piece(whole, shard, got)
    left, right = expected.to(wide), got.detach().cpu().to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    return largest((left - right).masked_fill(same, 0)), expected
