"""Redundancy: copies of what no other rank holds, kept by ranks on other hosts, which get them at each commit.

```
host a   ranks 0  1            rank 0's shards are kept by rank 2, rank 1's by rank 3, rank 2's by rank 0, ...
host b   ranks 2  3            on one host: rank 0's by rank 1, rank 1's by rank 2, ...

commit(6)   copies of step 5 have arrived here, and on every rank     over the older snapshots: step 6
            copies of step 6 begin to travel, while the program goes on
```

A rank overwrites its snapshots of step 4, and the copies of step 4 that it keeps, when every rank has its step 5:
so at any moment there is a step of which every rank has its snapshot and the copies that it is to keep, and two steps
are enough. A rank reports a step only with the copies that it keeps of it; what all that are left report in common can
be restored, as long as of each shard its rank or one of its replica holders is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

# Numpy loads this when it looks for distinct values first: now, and not while all ranks wait after a loss.
import numpy.ma  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.backend.nccl import device_done
from rankmesh.core.axes import integer
from rankmesh.core.grouped import grouped
from rankmesh.core.mesh import Mesh, MeshData
from rankmesh.core.sharding import Sharding, ShardMap
from rankmesh.errors import PlanError, quoted
from rankmesh.survival.agreement import same_step
from rankmesh.transfer import Transfer

__all__ = ["Copies", "ReplicaHolders", "Snapshot", "Snapshots", "StateLayout", "checked", "transfer"]

# Tags of our messages in the default group, which the program's do not have.
_COPIES, _ARRIVED = 27_001, 27_002
# As long as the program takes: a loss is noticed elsewhere, and ends every wait.
_LONG, _MOMENT = timedelta(days=30), timedelta(milliseconds=1)
# The tensors of a snapshot begin at multiples of this many bytes.
_ALIGNED = 64


def checked(redundancy: object, size: int) -> int:
    """Return the number of ranks, of ``size``, that keep copies; raise ``PlanError`` if there are fewer others."""
    number = integer(redundancy, "redundancy", least=0)
    if number >= size:
        raise PlanError(
            f"redundancy is {number}, but the plan has {size} ranks, and each copy is on another one; give at most "
            f"{size - 1}",
            redundancy=number,
            size=size,
        )
    return number


@dataclass(frozen=True)
class ReplicaHolders:
    """The ranks that hold copies of each rank's shards: ``redundancy`` of them, on other hosts if there are several.

    A shard has a replica where another rank, on another host where there are several, holds the same.

    >>> from rankmesh.core.mesh import Mesh
    >>> mesh = Mesh(tp=2, pp=2)
    >>> cut = {"w": Sharding(mesh, ("tp",), (8,)), "b": Sharding(mesh, ("tp-pp",), (8,))}
    >>> ReplicaHolders(cut, ("a", "a", "b", "b"), 1).by_rank
    {0: (2,), 1: (3,), 2: (0,), 3: (1,)}
    >>> ReplicaHolders(cut, ("a", "a", "b", "b"), 1).by_name == {"b": {0: (2,), 1: (3,), 2: (0,), 3: (1,)}}
    True
    """

    shardings: Mapping[str, Sharding]
    hosts: Sequence[str]
    redundancy: int

    @cached_property
    def by_name(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Of each tensor the ranks whose shards others keep, with those: as ``Transfer`` takes it."""
        known: dict[ShardMap, dict[int, tuple[int, ...]]] = {}
        for sharding in self.shardings.values():
            where = sharding.shard_map
            if where not in known:
                rows = where.ranks.tolist() if self.redundancy else []
                known[where] = {min(row): self._ring(min(row)) for row in rows if not self._has_replica(row)}
        found = {name: known[sharding.shard_map] for name, sharding in self.shardings.items()}
        return {name: of for name, of in found.items() if of}

    @cached_property
    def by_rank(self) -> dict[int, tuple[int, ...]]:
        """The holders of copies for each rank that has shards without a replica."""
        different = {id(of): of for of in self.by_name.values()}  # many tensors have one
        return dict(sorted((rank, ranks) for of in different.values() for rank, ranks in of.items()))

    def names(self, rank: int) -> list[str]:
        """Return the tensors of which others keep a rank's shard."""
        return sorted(name for name, of in self.by_name.items() if rank in of)

    def _has_replica(self, ranks: Sequence[int]) -> bool:
        return len({self.hosts[rank] for rank in ranks} if self._several else ranks) > 1

    @property
    def _several(self) -> bool:
        return len(set(self.hosts)) > 1

    @cached_property
    def _by_host(self) -> dict[str, list[int]]:
        return grouped((host, rank) for rank, host in enumerate(self.hosts))

    def _ring(self, rank: int) -> tuple[int, ...]:
        """Return the ranks at the same place on the next hosts, then at the next places; on one host the next ranks."""
        hosts, size = list(self._by_host), len(self.hosts)
        if not self._several:
            return tuple((rank + 1 + number) % size for number in range(min(self.redundancy, size - 1)))
        mine = hosts.index(self.hosts[rank])
        place = self._by_host[self.hosts[rank]].index(rank)
        others = [self._by_host[hosts[(mine + 1 + number) % len(hosts)]] for number in range(len(hosts) - 1)]
        ordered = [
            ranks[(place + number) % len(ranks)]
            for number in range(max(map(len, others)))
            for ranks in others
            if number < len(ranks)
        ]
        return tuple(ordered[: self.redundancy])


def _memory(size: int, device: torch.device | None, spare: list[Tensor]) -> Tensor:
    """Return memory for a snapshot, out of ``spare`` if a block there suits: its pages are there already.

    A block suits if it has room for one snapshot or for two, which are equally large, and little more: all of it stays
    as long as one of them. If none suits, all are freed.
    """
    for block in sorted((one for one in spare if device in (None, one.device)), key=lambda one: one.nbytes):
        rest = block[-(-size // _ALIGNED) * _ALIGNED :]
        is_double = rest.nbytes >= size > 0
        if 0 <= (rest if is_double else block).nbytes - size <= size // 8:
            spare[:] = [one for one in spare if one is not block] + [rest] * is_double
            return block[:size]
    spare.clear()
    return torch.empty(size, dtype=torch.uint8, device=device)


class Snapshot:
    """Tensors by name in one block of memory, with the order, shapes and dtypes of ``like``.

    The block is taken out of ``spare`` if one suits, or shared with ``part_of``. ``epochs`` is how many epochs keep it.
    """

    def __init__(
        self, like: Mapping[str, Tensor], device: torch.device | None = None, spare: list[Tensor] | None = None
    ) -> None:
        self.epochs = 1
        self.part_of: Snapshot | None = None
        ends, end = {}, 0
        for name, tensor in like.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            end = start + tensor.numel() * tensor.element_size()
            ends[name] = slice(start, end)
        device = device or next((tensor.device for tensor in like.values()), None)
        self.memory = _memory(end, device, [] if spare is None else spare)
        self.tensors = {
            name: self.memory[ends[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in like.items()
        }
        self._ends = ends

    def first(self, names: Sequence[str]) -> Tensor:
        """Return the memory of the first tensors, which are these."""
        return self.memory[: self._ends[names[-1]].stop if names else 0]

    def part(self, places: Mapping[str, tuple[slice, ...]]) -> Snapshot:
        """Return a snapshot of parts of the tensors, without a copy: the block stays as long as one of both is kept."""
        found = copy(self)
        found.part_of = self.part_of or self
        found.tensors = {name: self.tensors[name][place] for name, place in places.items()}
        return found

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors by their names."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)


class Snapshots(dict[int, Snapshot]):
    """Snapshots of the same tensors at the beginning of two steps, by step."""

    def overwritten(self, step: int, kept: int | None = None) -> Snapshot | None:
        """Take out the snapshot that a step overwrites: its own, or the oldest but for the newest and the ``kept``.

        None where there is no such snapshot, and the step needs memory of its own.
        """
        old = [step] if step in self else sorted(self.keys() - {max(self, default=step), kept})
        return self.pop(old[0]) if old else None


@dataclass
class Copies:
    """The copies that one rank keeps of two steps, and the copies of its own shards on their way to others."""

    holders: ReplicaHolders
    rank: int
    device: torch.device
    _arrived: set[int] = field(default_factory=set)
    _underway: tuple[int, list[dist.Work]] | None = None

    def __post_init__(self) -> None:
        self.names = self.holders.names(self.rank)
        owners = sorted(owner for owner, ranks in self.holders.by_rank.items() if self.rank in ranks)
        self.kept = {owner: Snapshots() for owner in owners}

    def steps(self) -> set[int]:
        """Return the steps of which all copies that this rank keeps have arrived; also after the world has ended."""
        if self._underway is not None and self.device.type == "cpu":
            step, works = self._underway
            with suppress(RuntimeError):
                for work in works:
                    work.wait(_MOMENT)
                self._arrived.add(step)
        self._underway = None  # what travels between GPUs ends by an abort as if it had arrived
        return self._arrived

    def at(self, step: int) -> dict[int, dict[str, Tensor]]:
        """Return the copies of the shards of other ranks at a step, by rank and name."""
        return {owner: by_step[step].tensors for owner, by_step in self.kept.items() if step in by_step}

    def wait(self, check: Callable[[], object]) -> None:
        """Wait until the copies that travel have arrived on every rank: what is older is needed by none.

        ``check`` raises where they may have been cut short.
        """
        if self._underway is None:
            return
        step, works = self._underway
        self._wait(works, check)
        self._underway = None
        self._arrived.add(step)
        self._meet(step, check)

    def send(self, step: int, snapshot: Snapshot, kept: int | None = None) -> None:
        """Have the copies of a step travel; ``snapshot`` begins with what this rank sends.

        The copies of the step before it stay, and of step ``kept``.
        """
        operations = []
        for owner, snapshots in self.kept.items():
            into = snapshots[step] = snapshots.overwritten(step, kept) or self._allocated(owner)
            operations.append(dist.P2POp(dist.irecv, into.memory, owner, tag=_COPIES))
        sent = snapshot.first(self.names)
        holders = self.holders.by_rank.get(self.rank, ())
        operations += [dist.P2POp(dist.isend, sent, holder, tag=_COPIES) for holder in holders]
        before = self._arrived - {step}
        self._arrived = {*sorted(before)[-1:], *(before & {kept})}  # older ones are overwritten
        self._underway = step, dist.batch_isend_irecv(operations) if operations else []

    def _allocated(self, owner: int) -> Snapshot:
        like = {}
        for name in self.holders.names(owner):
            sharding = self.holders.shardings[name]
            like[name] = torch.empty(sharding.of(owner).shape, dtype=getattr(torch, sharding.dtype), device="meta")
        return Snapshot(like, self.device)

    def _meet(self, step: int, check: Callable[[], object]) -> None:
        """Wait until every rank of the plan is here, for this step, in log2(ranks) messages to and from each."""
        size, distance = len(self.holders.hosts), 1
        while distance < size:
            sent, came = (torch.full((1,), step, device=self.device) for _ in range(2))
            to, source = (self.rank + distance) % size, (self.rank - distance) % size
            operations = [
                dist.P2POp(dist.irecv, came, source, tag=_ARRIVED),
                dist.P2POp(dist.isend, sent, to, tag=_ARRIVED),
            ]
            self._wait(dist.batch_isend_irecv(operations), check)
            same_step(self.rank, step, f"rank {source}", int(came))
            distance *= 2

    def _wait(self, works: Sequence[dist.Work], check: Callable[[], object]) -> None:
        limit = () if self.device.type == "cuda" else (_LONG,)
        for work in works:
            work.wait(*limit)
        device_done(self.device, check)


@dataclass(frozen=True)
class StateLayout:
    """The shardings of an epoch by name, on one mesh; the hosts of its ranks, and how many of them keep copies.

    A model has thousands of names and few shardings: the text has each once.

    >>> mesh = Mesh(tp=2)
    >>> layout = StateLayout(mesh, {name: Sharding(mesh, ("tp",), shape=(8,)) for name in "ab"}, ("node1", "node1"), 0)
    >>> layout.text.count("shape"), StateLayout.read(layout.text) == layout
    (1, True)
    """

    mesh: Mesh
    shardings: Mapping[str, Sharding]
    hosts: tuple[str, ...]
    redundancy: int

    @cached_property
    def text(self) -> str:
        """All of it as JSON."""
        numbers = {one: number for number, one in enumerate(dict.fromkeys(self.shardings.values()))}
        numbered = {name: numbers[one] for name, one in self.shardings.items()}
        different = [one.to_dict() for one in numbers]
        return json.dumps([self.mesh.to_dict(), different, numbered, self.hosts, self.redundancy])

    @cached_property
    def holders(self) -> ReplicaHolders:
        """The ranks that hold copies of each rank's shards."""
        return ReplicaHolders(self.shardings, self.hosts, self.redundancy)

    @classmethod
    def read(cls, text: str) -> StateLayout:
        """Return the layout in a text of another member."""
        mesh, different, numbered, hosts, redundancy = json.loads(text)
        here = Mesh.from_dict(mesh)
        shardings = [Sharding.from_dict(here, data) for data in different]
        return cls(here, {name: shardings[number] for name, number in numbered.items()}, tuple(hosts), redundancy)

    def on(self, mesh: Mesh) -> dict[str, Sharding]:
        """Return the shardings on this mesh, which has the same axes."""
        moved = {one: replace(one, mesh=mesh) for one in dict.fromkeys(self.shardings.values())}
        return {name: moved[one] for name, one in self.shardings.items()}


def transfer(before: StateLayout, now: StateLayout, positions: Sequence[int], lost: Sequence[int]) -> Transfer:
    """Return the transfer between what two epochs held, from the ranks that the old one's members have now.

    Raises ``PlanError`` for a tensor that the old one did not hold, or in another shape or dtype.
    """
    if names := tuple(sorted(now.shardings.keys() - before.shardings.keys())):
        raise PlanError(
            f"hold() was given {quoted(names[0])}, which no rank held before the change ({len(names)} of "
            f"{len(now.shardings)} names); hold the same names under every plan",
            names=names,
        )
    copies: dict[int, dict[int, list[int]]] = {}
    by_name = before.holders.by_name
    for of in by_name.values():
        if id(of) not in copies:  # many tensors have one
            copies[id(of)] = {positions[rank]: [positions[one] for one in ranks] for rank, ranks in of.items()}
    # The same mesh of other ranks, in no order.
    ranks: MeshData = {"offset": min(positions), "rank_map": list(positions), "consecutive": False}
    moved = before.on(Mesh.from_dict({**before.mesh.to_dict(), **ranks}))
    return Transfer(
        {name: one for name, one in moved.items() if name in now.shardings},
        now.on(now.mesh),
        lost=lost,
        copies={name: copies[id(of)] for name, of in by_name.items()},
        partial=True,
    )
