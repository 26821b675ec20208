"""Transfers: the moves that turn tensors under one layout into the same tensors under another.

```
source shardings ─┐
                  ├─ Transfer ── of(rank)     what one rank sends, receives and copies
target shardings ─┤              digest       equal on all ranks, or nothing moves
cluster ──────────┘              run(...)     live
```

A rank copies each element that it has itself, and receives any other from one of the nearest ranks that have it,
and the busiest sender sends as little as it can.

>>> from rankmesh.core.mesh import Mesh
>>> up = Sharding(Mesh(tp=2), ("tp", None), shape=(8, 6))
>>> moves = Transfer({"up": up}, {"up": Sharding(Mesh(tp=4), ("tp", None), shape=(8, 6))})
>>> moves.of(1).receives
(Move(name='up', box=((2, 4), (0, 6)), source=0, target=1, bytes=48),)
>>> moves.of(0).copies
(Move(name='up', box=((0, 2), (0, 6)), source=0, target=0, bytes=48),)
>>> moves.bytes, moves.bytes_out(0), moves.bytes_in(0)
(144, 48, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from rankmesh.core.axes import integer
from rankmesh.core.boxes import Box
from rankmesh.core.sharding import Sharding
from rankmesh.core.strided import IntArray
from rankmesh.errors import LostState, PlanError, extra, in_words, quoted
from rankmesh.transfer.planning.classes import Copies, TensorClass, classes_of, digest_of
from rankmesh.transfer.planning.flows import Flows, Shares
from rankmesh.transfer.planning.local import LocalMoves, local_moves

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rankmesh.core.clusters.cluster import Cluster
    from rankmesh.transfer.live.bridge import Bridge
    from rankmesh.transfer.live.run import Moved
    from rankmesh.transfer.live.shards import Shards

__all__ = ["Transfer"]

BUDGET = 256 << 20
# A name, a box of it, and the ranks that had that.
Missing = tuple[str, Box, tuple[int, ...]]


class Transfer:
    """The moves that turn tensors of ``source`` into tensors of ``target``: shardings by name; equal when equivalent.

    Every name of ``target`` is one of ``source``, of the same shape and dtype; further names of ``source`` do not
    move. The meshes may be disjoint, overlap or be equal. With a ``cluster`` the nearest holder sends.

    Ranks that are ``lost`` send nothing: others that hold their shards, or keep copies of them, send these.
    ``copies``: which ranks keep copies, by tensor and by the rank whose source shard it is: ``{"up": {3: [5]}}`` where
    rank 5 has rank 3's shard beside its own. Boxes that no rank has any more are ``missing``.

    >>> from rankmesh.core.mesh import Mesh
    >>> two, one = ({"up": Sharding(Mesh(tp=size), ("tp",), shape=(8,))} for size in (2, 1))
    >>> Transfer(two, one, lost=[1]).missing
    (('up', ((4, 8),), (1,)),)
    >>> Transfer(two, one, lost=[1], copies={"up": {1: [2]}}).of(2).sends
    (Move(name='up', box=((4, 8),), source=2, target=0, bytes=16),)

    Whatever moves raises ``LostState`` where something is missing, unless the transfer is ``partial``: then the rest
    moves. Raises ``PlanError`` for names, shapes or dtypes that differ, for ranks that the cluster does not have, and
    for a lost rank that the target gives something.
    """

    def __init__(
        self,
        source: Mapping[str, Sharding],
        target: Mapping[str, Sharding],
        cluster: Cluster | None = None,
        *,
        lost: Iterable[int] = (),
        copies: Mapping[str, Mapping[int, Iterable[int]]] | None = None,
        partial: bool = False,
    ) -> None:
        for what, given in (("source", source), ("target", target)):
            _check(given, what)
        missing = sorted(target.keys() - source.keys())
        if missing:
            raise PlanError(
                f"the source has no {quoted(missing[0])} ({len(missing)} of {len(target)} names of the target); give "
                "both sides the same names",
                missing=tuple(missing),
            )
        self.source = {name: source[name] for name in sorted(target)}
        self.target = {name: target[name] for name in sorted(target)}
        self.copies = _copies({name: of for name, of in (copies or {}).items() if name in target})
        self.classes: tuple[TensorClass, ...] = classes_of(self.source, self.target, self.copies)
        self.cluster, self.partial = cluster, partial
        self.lost = tuple(sorted({integer(rank, "lost rank", least=0) for rank in lost}))
        self._refuse_lost_targets()
        if cluster is not None and self.world_size > cluster.size:
            raise PlanError(
                f"the cluster has {cluster.size} devices, but the transfer has ranks up to {self.world_size - 1}; give "
                f"a cluster of {self.world_size} devices or more",
                devices=cluster.size,
                world_size=self.world_size,
            )
        self._local: tuple[int, LocalMoves] | None = None

    @cached_property
    def world_size(self) -> int:
        """One past the last rank of any mesh."""
        meshes = {id(mesh): mesh for mesh in (s.mesh for side in (self.source, self.target) for s in side.values())}
        kept = {rank + 1 for one in self.classes for _, ranks in one.copies for rank in ranks}
        return max(kept.union(mesh.rank_range.stop for mesh in meshes.values()), default=0)

    def _refuse_lost_targets(self) -> None:
        """Raise ``PlanError`` if the target gives a lost rank something."""
        lost = np.array(self.lost, dtype=np.int64)
        for one in self.classes if self.lost else ():
            there = lost[one.receivers.shard_of(lost) >= 0].tolist()
            if there:
                raise PlanError(
                    f"rank {there[0]} is lost, and the target gives it {quoted(one.names[0])}; give a target on ranks "
                    "that are left",
                    lost=tuple(there),
                    name=one.names[0],
                )

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self.classes, self.cluster, self.lost)

    @property
    def flows(self) -> Flows:
        """The flows between all ranks, by tensor class, from which everything of all ranks is read.

        Raises ``LostState`` where something is missing, unless the transfer is ``partial``.
        """
        self._refuse_missing()
        return self._shares.all

    def _refuse_missing(self) -> None:
        if len(self._shares.missing) and not self.partial:
            raise LostState(self.missing, self.lost)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """The boxes that are needed and that no rank is left to send: (name, box, ranks that had it), by target shard.

        Every rank can read it, whether the transfer is ``partial`` or not.
        """
        found = []
        for number, source, target in self._shares.missing.tolist():
            one = self.classes[number]
            had = tuple(sorted({*one.holders.ranks[source].tolist(), *one.kept.get(source, ())}))
            found += [(name, box, had) for name in one.names for box in one.boxes(source, target)]
        return tuple(sorted(found))

    def of(self, rank: int) -> LocalMoves:
        """Return the boxes that one rank sends, receives and copies; none for a rank that takes no part."""
        number = integer(rank, "rank", least=0)
        if self._local is None or self._local[0] != number:
            self._refuse_missing()
            self._local = (number, local_moves(self.classes, self._shares.of(number), number))
        return self._local[1]

    # -- bytes --------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes that travel between ranks."""
        return int(self.flows.bytes.sum())

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that any transfer must send: of each rank's target what it does not hold already."""
        return sum(_needed(one) for one in self.classes)

    @property
    def sender_bound(self) -> int:
        """Bytes that the busiest sender sends at least, whoever of those that may send does."""
        return self._shares.bound

    @cached_property
    def outgoing(self) -> IntArray:
        """Bytes that each rank sends, by rank."""
        return np.bincount(self.flows.source, self.flows.bytes, self.world_size).astype(np.int64)

    @cached_property
    def incoming(self) -> IntArray:
        """Bytes that each rank receives, by rank."""
        return np.bincount(self.flows.target, self.flows.bytes, self.world_size).astype(np.int64)

    def bytes_out(self, rank: int) -> int:
        """Bytes that one rank sends to others."""
        return int(self.outgoing[rank]) if rank in range(self.world_size) else 0

    def bytes_in(self, rank: int) -> int:
        """Bytes that one rank receives from others."""
        return int(self.incoming[rank]) if rank in range(self.world_size) else 0

    @property
    def levels(self) -> dict[str, int]:
        """Bytes by the level of the cluster over which they travel; without a cluster all are of level ``world``."""
        names = ["world"] if self.cluster is None else [level.name for level in self.cluster.levels]
        totals = [int(self.flows.bytes[self.flows.level == number].sum()) for number in range(len(names))]
        return dict(zip(names, totals, strict=True))

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that are equal on two ranks if and only if their transfers are."""
        cluster = None if self.cluster is None else self.cluster.to_dict()
        return digest_of(self.classes, cluster, lost=self.lost, partial=self.partial)

    def reversed(self) -> Transfer:
        """Return the transfer back, from target to source.

        Raises ``PlanError`` where a rank of the source is lost.
        """
        return Transfer(self.target, self.source, self.cluster, lost=self.lost, partial=self.partial)

    # -- live ---------------------------------------------------------------------------------------------------

    def run(
        self,
        tensors: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        budget: int = BUDGET,
        *,
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 300.0,
        progress: Callable[[int, int], object] | None = None,
        kept: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> Moved:
        """Move the tensors from the source to the target; every rank of ``group`` calls it, also ranks without a part.

        Args:
            tensors: this rank's shards under the source, by name.
            into: this rank's shards under the target, by name. They are written.
            budget: bytes of memory that this may take beside the tensors (default 256 MiB). At most 16 MiB stay.
            group: the process group whose ranks take part. Default None: the world.
            timeout: seconds, or a timedelta, that any wait may take (default 300).
            progress: called with the bytes received so far and the bytes of all (default None).
            kept: the copies of other ranks' shards that this rank has by ``copies``, by rank and name (default None).

        See `rankmesh.transfer.live.run`.
        """
        with extra("torch"):
            from rankmesh.transfer.live.run import run
        return run(self, tensors, into, budget, group=group, timeout=timeout, progress=progress, kept=kept)

    def bridge(
        self,
        budget: int = BUDGET,
        *,
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 300.0,
        device: str | torch.device | None = None,
    ) -> Bridge:
        """Return the transfer as a differentiable function: activations between two meshes of a job.

        Every rank of ``group`` makes it and calls it, as it calls ``run``. See `rankmesh.transfer.live.bridge`.
        """
        with extra("torch"):
            from rankmesh.transfer.live.bridge import Bridge
        return Bridge(self, budget, group=group, timeout=timeout, device=device)

    def allocate(self, rank: int, *, device: str | torch.device | None = None) -> Shards:
        """Return empty tensors of a rank's target shards, by name, as ``into`` of `run`."""
        with extra("torch"):
            from rankmesh.transfer.live.shards import allocate
        return allocate(self.target, rank, device)

    # -- value semantics ----------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Transfer) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:
        copies = {name: dict(of) for name, of in self.copies.items()}
        made = partial(Transfer, lost=self.lost, copies=copies, partial=self.partial)
        return made, (self.source, self.target, self.cluster)

    def __repr__(self) -> str:
        words = [f"{len(self.target)} tensors of {len(self.classes)} classes"]
        words += [f"{self._shares.all.bytes.sum()} bytes between ranks"]
        words += [f"lost {in_words(self.lost)}"] if self.lost else []
        words += [f"{len(self.missing)} boxes missing"] if len(self._shares.missing) else []
        return f"Transfer({', '.join(words)})"


def _copies(copies: Mapping[str, Mapping[int, Iterable[int]]]) -> dict[str, Copies]:
    """Return the ranks that keep copies, by name and owner; equal ones are one object, since many names share it."""
    known: dict[int, Copies] = {}
    for of in copies.values():
        if id(of) not in known:
            known[id(of)] = tuple(
                (integer(rank, "rank", least=0), tuple(sorted({integer(one, "rank", least=0) for one in ranks})))
                for rank, ranks in sorted(of.items())
            )
    return {name: known[id(of)] for name, of in copies.items() if of}


def _check(shardings: object, what: str) -> None:
    if not isinstance(shardings, Mapping):
        raise PlanError(f"the {what} is {quoted(shardings)}; give shardings by name", received=shardings)
    for name, sharding in shardings.items():
        if not isinstance(sharding, Sharding):
            raise PlanError(
                f"{what} {name!r} is {quoted(sharding)}; give a Sharding, such as "
                "Sharding(mesh, ('tp', None), shape=(16384, 4096), dtype='bfloat16')",
                name=name,
                received=sharding,
            )


def _needed(one: TensorClass) -> int:
    """Return the bytes that the target ranks of a class lack."""
    source, target, elements = one.pairs()
    away = one.away(source, one.receivers.ranks[target]).sum(axis=1)
    return int((away * elements).sum()) * one.itemsize * len(one.names)
