"""State: what a member holds and has kept of its last steps, and how that comes to where it is needed next.

```
step 6   step 7          two snapshots: the older one is overwritten by the next commit
  A        B
```

A commit copies the tensors, into memory that is allocated by the first two and kept from epoch to epoch. On a GPU it
waits for its copies: what a stream has been given goes on after an abort, with numbers that no collective has summed.

After a change every member of the new world calls ``restore``: a transfer from the snapshots of the members that are
left, at the shardings of the epoch in which they were taken, to the tensors and shardings of the new one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankmesh.backend.nccl import device_done
from rankmesh.core.boxes import Box
from rankmesh.errors import ConnectError, LostState, PlanError, RankmeshError, quoted
from rankmesh.guard.model_state import CurrentTensors
from rankmesh.survival.redundancy import Copies, Snapshot, Snapshots, StateLayout, transfer
from rankmesh.transfer.live.run import run
from rankmesh.transfer.live.shards import local, shards_of
from rankmesh.transfer.live.stream import where

if TYPE_CHECKING:
    from rankmesh.survival.world import EpochWorld

__all__ = ["EpochState", "Load", "WaitFor", "load_boxes", "restore"]


# Seconds that the state of an epoch has to move.
_MOVING = 3600.0
# What loads a box of a tensor, as it was at the beginning of a step, from elsewhere: (name, box, step) -> its elements.
Load = Callable[[str, Box, int], object]
# What makes a call that waits for other members, as ``EpochWorld.wait_for`` does.
WaitFor = Callable[[Callable[[], object]], object]


class Writes:
    """Writes into the tensors of an epoch, until they are closed: a thread that is left behind writes nothing later."""

    def __init__(self) -> None:
        self._lock, self._closed = threading.Lock(), False

    def __call__(self, part: Tensor, elements: Tensor) -> None:
        """Copy elements into a part of a tensor."""
        with self._lock:
            if self._closed:
                raise ConnectError("the members changed while state moved")
            part.copy_(elements)

    def close(self) -> None:
        """Wait for a write under way; from now on nothing is written."""
        with self._lock:
            self._closed = True


class EpochState:
    """The state of a member in an epoch: its tensors by name, the sharding of each, and copies of its last steps.

    ``rank`` is this one. If other ranks keep the shards that have no replica, this one keeps some of theirs: two
    snapshots of such shards take (1 + redundancy) times the memory. ``spare`` has the memory of former snapshots, which
    the next ones take.
    """

    def __init__(
        self,
        epoch: int,
        layout: StateLayout,
        tensors: Mapping[str, Tensor],
        *,
        rank: int,
        device: torch.device,
        spare: list[Tensor] | None = None,
    ) -> None:
        self.epoch, self.layout, self.tensors, self.rank = epoch, layout, tensors, rank
        self.shardings, self._device = layout.shardings, device
        self.local = tensors.local if isinstance(tensors, CurrentTensors) else ()
        self.copies = Copies(layout.holders, rank, device) if layout.redundancy else None
        # The last step at which a guard found all ranks equal, -1 for none: its copies stay. None without a guard.
        self.equal_at: int | None = None
        # The last two steps that were committed, each by its number in this epoch.
        self.commits: dict[int, int] = {}
        self.snapshots = Snapshots()
        self._spare = [] if spare is None else spare

    @property
    def steps(self) -> list[int]:
        """The steps that this member can restore its part of: its own, and what it keeps of others."""
        return sorted(self.snapshots if self.copies is None else self.copies.steps() & self.snapshots.keys())

    def leave(self) -> None:
        """Let the program's tensors go at the end of the epoch: what it held is in the snapshots."""
        self.tensors = {}

    def forget(self, after: int) -> None:
        """Drop the snapshots after a step: nobody goes on from them."""
        self.keep([step for step in self.snapshots if step <= after])

    def keep(self, steps: Collection[int | None]) -> None:
        """Drop the snapshots of all other steps; their memory is spare, unless another epoch keeps it."""
        for snapshot in [self.snapshots.pop(step) for step in [*self.snapshots] if step not in steps]:
            whole = snapshot.part_of or snapshot
            whole.epochs -= 1
            self._spare += [whole.memory] * (not whole.epochs)

    def warn_of_fewer_copies(self) -> bool:
        """Return whether some shards have fewer copies than ``redundancy``, with a warning that names them."""
        holders = self.layout.holders
        fewest = min(holders.by_rank, key=lambda rank: len(holders.by_rank[rank]), default=None)
        if fewest is None or len(holders.by_rank[fewest]) >= holders.redundancy:
            return False
        warnings.warn(
            f"redundancy is {holders.redundancy}, but only {len(holders.by_rank[fewest])} ranks are on other hosts "
            f"than rank {fewest}, on {quoted(holders.hosts[fewest])}, and keep copies of its shards; place the ranks "
            "evenly on the hosts, or give a smaller redundancy",
            stacklevel=5,
        )
        return True

    def commit(self, step: int, wait_for: WaitFor, check: Callable[[], object], old: EpochState | None = None) -> None:
        """Keep the tensors as they are now, at the beginning of a step; not where ``check`` raises.

        Copies for other ranks travel meanwhile, until the next commit; ``wait_for`` makes the calls that wait for them.
        If the tensors were restored from an ``old`` epoch that held all of them here, its snapshot is kept, or a part.
        """
        self.settle(wait_for, check)
        snapshot = self._take(step, check, None if old is None else self._same_as(old, step))
        if self.copies is not None:
            self.copies.send(step, snapshot, self.equal_at)

    def settle(self, wait_for: WaitFor, check: Callable[[], object]) -> None:
        """Wait until the copies for other ranks of the last commit are there."""
        if self.copies is not None:
            wait_for(partial(self.copies.wait, check))

    @property
    def _names(self) -> list[str]:
        """The tensors in the order of a snapshot, which begins with what is sent to other ranks."""
        first = () if self.copies is None else self.copies.names
        return [*first, *(name for name in self.tensors if name not in first)]

    def _same_as(self, old: EpochState, step: int) -> Snapshot | None:
        """Return the snapshot of another epoch, or a part, which both keep, if it is what this epoch's would be."""
        found = old.snapshots.get(step)
        if found is None or any(one.padded for one in self.shardings.values()):
            return None
        before, now = (shards_of(one.shardings, one.rank) for one in (old, self))
        if [*found.tensors] != self._names or any(before[name] != now[name] for name in self._names):
            if self.copies is not None or any(len(now[name].boxes) != 1 for name in self._names):
                return None
            try:
                found = found.part({name: where(before[name], now[name].boxes[0]) for name in self._names})
            except LookupError:  # this rank did not hold all of it
                return None
        (found.part_of or found).epochs += 1
        return found

    def _take(self, step: int, check: Callable[[], object], snapshot: Snapshot | None) -> Snapshot:
        """Return a snapshot of the tensors, if there is none yet; a copy counts once it is made."""
        if snapshot is None:
            snapshot = self.snapshots.overwritten(step, self.equal_at)
            if snapshot is None or snapshot.part_of is not None:
                snapshot = Snapshot({name: local(self.tensors[name]) for name in self._names}, spare=self._spare)
            else:  # there are as many as this epoch needs
                self._spare.clear()
            snapshot.copy({name: local(tensor) for name, tensor in self.tensors.items()})
            device_done(self._device, check)
        self.snapshots[step] = snapshot
        last = max(self.commits, default=-1)
        if self.commits.get(last) != step:
            self.commits = {number: self.commits[number] for number in self.commits if number == last}
            self.commits[last + 1] = step
        return snapshot


def restore(
    world: EpochWorld,
    old: EpochState | None,
    step: int,
    positions: Sequence[int],
    new: EpochState | None,
    load: Load | None,
    budget: int,
) -> None:
    """Bring what was held at the beginning of ``step`` to where it is held now; every rank of the world calls it.

    ``positions`` are the ranks of this world that the members of the old epoch have now, in the order of their ranks
    then; a lost member has a position beyond the world. Rank 0 holds something of the new epoch. ``load`` loads a shard
    that no rank holds or keeps, on each rank that needs it. Without ``load``, every rank raises ``LostState`` with the
    ranks of the old epoch.
    """
    size = world.size
    source = min(position for position in positions if position < size)
    if old is not None and world.rank == source:
        world.give("before", old.layout.text)
    if new is not None and world.rank == 0:
        world.give("now", new.layout.text)
    before = StateLayout.read(world.taken("before")) if old is None else old.layout
    now = StateLayout.read(world.taken("now")) if new is None else new.layout
    lost = [position for position in positions if position >= size]
    try:
        moves = transfer(before, now, positions, lost)
    except PlanError:  # on every rank, which raises it after all have found it, as LostState below
        _all_found(world, "refused")
        raise
    if moves.missing and load is None:
        ranks = {position: rank for rank, position in enumerate(positions)}
        missing = [(name, box, tuple(sorted(ranks[one] for one in had))) for name, box, had in moves.missing]
        _all_found(world, "lost")
        raise LostState(missing, [ranks[position] for position in lost])
    kept: dict[int, dict[str, Tensor]] = {}
    if old is not None and old.copies is not None:
        kept = {positions[rank]: tensors for rank, tensors in old.copies.at(step).items()}
    given = {} if old is None else old.snapshots[step].tensors
    tensors = {name: one for name, one in given.items() if name in now.shardings}
    target = {} if new is None else new.tensors
    writes = Writes()
    try:
        world.wait_for(lambda: run(moves, tensors, target, budget, timeout=_MOVING, kept=kept, write=writes))
    finally:
        writes.close()
    if new is not None and load is not None:
        load_boxes(new, moves.of(world.rank).missing, step, load)


def _all_found(world: EpochWorld, key: str) -> None:
    """Wait until every rank has found what it raises: the first one that does ends the epoch of all."""
    with suppress(RankmeshError, RuntimeError):
        world.meet(key)


def load_boxes(new: EpochState, boxes: Iterable[tuple[str, Box]], step: int, load: Load) -> None:
    """Load boxes of the tensors that this rank holds now."""
    for name, box in boxes:
        tensor = local(new.tensors[name])
        part = tensor[where(new.shardings[name].of(new.rank), box)]
        loaded = load(name, box, step)
        if not isinstance(loaded, Tensor) or loaded.shape != part.shape or loaded.dtype != tensor.dtype:
            given = f"{loaded.dtype} {list(loaded.shape)}" if isinstance(loaded, Tensor) else quoted(loaded)
            raise PlanError(
                f"restore({name!r}, {box}, {step}) gave {given}, but the box is {tensor.dtype} {list(part.shape)}; "
                "return a tensor of it",
                name=name,
                box=box,
            )
        with torch.no_grad():
            part.copy_(loaded)
