"""Run: the moves of a transfer over one process group, point to point.

```
round         0          1          2
post          0 send     1 send     2 send          each pair's next message, packed into a buffer where it needs one
              0 recv     1 recv     2 recv
meanwhile     copies     unpack 0   unpack 1        the messages of the round before are waited for, and unpacked
```

At most two rounds with buffers are underway at a time, so this takes the memory of two messages for each peer, at most
``budget`` in all: the longest message is chosen for the rank with the most peers, the same on all ranks. Rounds without
buffers are posted further ahead. The boxes between two ranks are sent in the order of the plan, so only bytes are sent.

A rank that fails in between goes on sending and receiving, so that no rank waits for it, and reports its failure at the
end (`agreement`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rankmesh.backend.default import default_group, default_pg
from rankmesh.core.axes import integer
from rankmesh.core.options import time_limit
from rankmesh.core.sharding import Shard
from rankmesh.errors import PlanError, TransferError
from rankmesh.rendezvous import Outcome
from rankmesh.runtime.world import World
from rankmesh.transfer.live.agreement import ExchangeError, TransferAgreement, in_one_line
from rankmesh.transfer.live.exchange import Copy, Exchange, GroupTransport, MessageSchedule, Write
from rankmesh.transfer.live.shards import apart, local, mark, problem_of, same_place, shards_of
from rankmesh.transfer.live.stream import DIRECT, Message, located, messages
from rankmesh.transfer.planning.local import LocalMoves

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.transfer.planning.transfer import Transfer

__all__ = ["Moved", "longest_message", "run", "schedule", "schedule_of"]

# Messages beyond this length gain nothing, and longer ones are later to be packed while others travel.
_LONGEST = 4 << 20
_SHORTEST = 64


@dataclass(frozen=True)
class Moved:
    """The result of a transfer on one rank: bytes received, sent, copied, bytes of ``memory``, seconds, rounds.

    ``memory``: buffers, at most the budget; and sources that were copied first, out of the way of a target.
    """

    bytes_in: int
    bytes_out: int
    bytes_copied: int
    memory: int
    seconds: float
    rounds: int


def run(
    moves: Transfer,
    tensors: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    budget: int,
    *,
    group: ProcessGroup | None = None,
    timeout: float | timedelta = 300.0,
    progress: Callable[[int, int], object] | None = None,
    kept: Mapping[int, Mapping[str, Tensor]] | None = None,
    write: Write | None = None,
) -> Moved:
    """Move this rank's part of a transfer; every rank of the group calls it.

    ``kept`` are the copies of other ranks' shards that this rank has by the transfer's ``copies``, by rank and name.
    With ``write`` nothing else writes into ``into``.

    The ranks first make sure that they hold one transfer, one budget and the tensors of it; in the end they wait for
    each other. Raises ``PlanError`` for a budget that holds no message; ``AgreementError`` on every rank when they
    differ or one stays away; ``TransferError`` on every rank when one fails, naming it and what is ``incomplete``.
    """
    began, limit, refused = time.perf_counter(), time_limit(timeout), None
    world = default_group()
    group = default_pg() if group is None else group
    ranks = dist.get_process_group_ranks(group)
    side = _Side(moves, tensors, into, world.rank, kept or {})
    try:
        longest = longest_message(moves, budget)
    except PlanError as error:
        refused, longest = error, _SHORTEST
        side.problem = error.message
    schedule = schedule_of(moves, world.rank, longest)
    agreement, transport = None, GroupTransport(group)
    if not world.dry and len(ranks) > 1:
        serves, name = World.current().serves, group.group_name
        # Some ranks have no tensors: all must know whether the messages of others start together.
        agreement = TransferAgreement(world.store, name, world.rank, ranks, limit, serves=serves)
        together = transport.together(transport.staging((*side.tensors.values(), *side.into.values())))
        what = {"digest": moves.digest, "budget": None if refused else int(budget)}
        problem, text = side.problem or _outside(moves, ranks), "together" if together else ""
        try:
            if agreement.start(what, problem, text, lambda texts: any(texts.values())).value:
                transport.meet()
        except TransferError as error:
            raise refused or error from error
    elif refused is not None:
        raise refused
    elif side.problem:
        raise TransferError(f"rank {world.rank}: {side.problem}", rank=world.rank, ranks=(world.rank,))
    exchange = Exchange(
        transport, side.tensors, side.into, limit, agreement.advance if agreement else None, progress, write
    )
    failure = _moved(side, exchange, schedule, agreement)
    if agreement is not None:
        outcome = agreement.end(failure)
    else:
        outcome = Outcome("failed", (world.rank,), message=str(failure)) if failure else Outcome()
    if not outcome.agreed:
        raise side.failed(exchange, schedule, outcome)
    mark(into, ())
    part, memory = moves.of(world.rank), exchange.memory + side.memory
    seconds, rounds = time.perf_counter() - began, len(schedule.sends)
    return Moved(part.bytes_in, part.bytes_out, part.bytes_copied, memory, seconds, rounds)


def _moved(
    side: _Side, exchange: Exchange, schedule: MessageSchedule, agreement: TransferAgreement | None
) -> ExchangeError | None:
    """Exchange everything, and return what failed."""
    try:
        exchange.attempt(side.prepare, schedule)
        exchange.all(schedule)
    except ExchangeError as failure:
        return failure
    except BaseException as error:
        # An interrupted rank does not wait for the others; they learn why it left.
        if agreement is not None:
            agreement.end(ExchangeError(in_one_line(error)))
        raise
    return None


class _Side:
    """The tensors of one rank."""

    def __init__(
        self,
        moves: Transfer,
        tensors: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        rank: int,
        kept: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        self.moves, self.rank, self.given = moves, rank, into
        self.problem, self.memory = "", 0
        self.tensors: dict[str, Tensor] = {}
        self.into: dict[str, Tensor] = {}
        sides = ((moves.source, tensors, "source", self.tensors), (moves.target, into, "target", self.into))
        for (shardings, given, what, checked), shards in zip(sides, _shards(moves, rank), strict=True):
            self.problem = self.problem or problem_of(given, shardings, shards, what)
            checked |= {name: local(given[name]) for name in shards if isinstance(given.get(name), Tensor)}
        for owner, names in _kept(moves, rank).items():
            copies = {name: tensor for name, tensor in kept.get(owner, {}).items() if name in names}
            shards = {name: moves.source[name].of(owner) for name in names}
            self.problem = self.problem or problem_of(copies, moves.source, shards, f"copy for rank {owner} of")
            self.tensors |= {_key(name, owner): local(tensor) for name, tensor in copies.items()}

    def prepare(self, schedule: MessageSchedule) -> None:
        """Mark the target as incomplete, and copy sources out of the way of what is written."""
        mark(self.given, self.into)
        written = {piece.name for row in schedule.receives for message in row for piece in message.pieces}
        for name, here, into, there in schedule.copies:
            if into not in written and not same_place(self.tensors[name][here], self.into[into][there]):
                written.add(into)
        for name in apart(self.tensors, [self.into[name] for name in written]):
            self.tensors[name] = self.tensors[name].clone()
            self.memory += self.tensors[name].nbytes

    def failed(self, exchange: Exchange, schedule: MessageSchedule, outcome: Outcome) -> TransferError:
        """Return the error of a transfer that failed: what is incomplete came from ranks that failed, or not at all."""
        missing = {
            piece.name
            for row in schedule.receives
            for message in row
            if message.peer in outcome.ranks or message not in exchange.received
            for piece in message.pieces
        }
        if not exchange.copied:
            missing |= {copy.into for copy in schedule.copies}
        incomplete = tuple(sorted(missing))
        mark(self.given, incomplete)
        return TransferError(
            f"the transfer did not complete, since {outcome.message}; {len(incomplete)} of {len(self.into)} target "
            f"tensors of rank {self.rank} are incomplete; do not use them before another run",
            rank=self.rank,
            ranks=outcome.ranks,
            incomplete=incomplete,
        )


@lru_cache(maxsize=8)
def _shards(moves: Transfer, rank: int) -> tuple[dict[str, Shard], dict[str, Shard]]:
    """Return the shards of one rank by name, under the source and under the target."""
    return shards_of(moves.source, rank), shards_of(moves.target, rank)


@lru_cache(maxsize=8)
def _peers(moves: Transfer) -> tuple[frozenset[int], int]:
    """Return the ranks that send or receive, and how many peers the rank with the most of them has, at least 1."""
    pairs = np.unique(np.stack([moves.flows.source, moves.flows.target]), axis=1)
    ranks, counts = np.unique(pairs, return_counts=True)
    return frozenset(ranks.tolist()), int(counts.max(initial=1))


def _outside(moves: Transfer, ranks: list[int]) -> str:
    """Return which rank has a part and is not in the group, in words."""
    absent = sorted(_peers(moves)[0].difference(ranks))
    if not absent:
        return ""
    return f"rank {absent[0]} has a part in the transfer, but is not in the group; give a group of all its ranks"


def longest_message(moves: Transfer, budget: int) -> int:
    """Return the length of a message of which two for each peer fit the budget, on the rank with the most peers."""
    _, peers = _peers(moves)
    longest = min(integer(budget, "budget", least=1) // (2 * peers), _LONGEST)
    if longest < _SHORTEST:
        raise PlanError(
            f"the budget is {budget} bytes, and a rank with {peers} peers needs two messages of {_SHORTEST} bytes for "
            f"each; give at least {2 * peers * _SHORTEST}",
            budget=budget,
            peers=peers,
        )
    return longest // _SHORTEST * _SHORTEST


@lru_cache(maxsize=8)
def schedule_of(moves: Transfer, rank: int, longest: int, direct: int = DIRECT) -> MessageSchedule:
    """Return the messages of one rank by round, and its copies."""
    return schedule(moves, moves.of(rank), longest, direct)


def schedule(moves: Transfer, local_moves: LocalMoves, longest: int, direct: int = DIRECT) -> MessageSchedule:
    """Return the messages of some of a rank's moves, which its peers choose equally."""
    rank = local_moves.rank
    ours, theirs = ({name: {name: shard} for name, shard in side.items()} for side in _shards(moves, rank))
    for owner, names in _kept(moves, rank).items():
        for name in names:
            ours.setdefault(name, {})[_key(name, owner)] = moves.source[name].of(owner)
    sends, receives = [], []
    for peer, part in groupby(sorted(local_moves.sends, key=lambda move: move.target), key=lambda move: move.target):
        sends.append(messages(part, peer, ours, moves.source, longest, direct))
    for peer, part in groupby(sorted(local_moves.receives, key=lambda move: move.source), key=lambda move: move.source):
        receives.append(messages(part, peer, theirs, moves.target, longest, direct))
    copies = tuple(
        Copy(*located(ours[move.name], move.box), *located(theirs[move.name], move.box)) for move in local_moves.copies
    )
    rounds = max((len(stream) for stream in (*sends, *receives)), default=0)
    return MessageSchedule(_by_round(sends, rounds), _by_round(receives, rounds), copies)


def _kept(moves: Transfer, rank: int) -> dict[int, list[str]]:
    """Return the names of tensors of which this rank keeps a copy of another rank's shard, by that rank."""
    found: dict[int, list[str]] = {}
    for name, of in moves.copies.items():
        for owner, ranks in of:
            if rank in ranks and rank != owner and moves.source[name].holds(owner):
                found.setdefault(owner, []).append(name)
    return found


def _key(name: str, owner: int) -> str:
    """Return the name of the copy of another rank's shard among this rank's tensors; no tensor has such a name."""
    return f"\0{owner}\0{name}"


def _by_round(streams: list[list[Message]], rounds: int) -> tuple[tuple[Message, ...], ...]:
    rows = [tuple(message for message in row if message is not None) for row in zip_longest(*streams)]
    return (*rows, *((),) * (rounds - len(rows)))
