"""Exchange: rounds of messages, posted and waited for, packed and unpacked.

```
message of one piece that is contiguous here      sent from, or received into, the tensor itself
any other                                         through a buffer of bytes
```

With a ``write`` of the caller's, messages are received into buffers only: no element of a target changes but by it.
With ``staging``, each message has a place of its own there, and ``unpack`` writes all of them into the targets.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.backend.nccl import Batch, device_done_within
from rankmesh.errors import first_line, in_words
from rankmesh.transfer.live.agreement import ExchangeError, in_one_line
from rankmesh.transfer.live.shards import flat, same_place
from rankmesh.transfer.live.stream import Message, Slices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Copy",
    "Exchange",
    "GroupTransport",
    "MessageSchedule",
    "P2PTransport",
    "PendingMessage",
    "Write",
    "batches",
    "start_each",
]

# Sends and receives of one call: NCCL hangs above some 8,000.
_OPERATIONS = 4000
# Rounds underway at a time, where none has a buffer.
_AHEAD = 32
# An error that comes after so much of the time limit is that it is over.
_WHOLE = 0.99
# Messages begin at multiples of this many bytes in the staging.
_ALIGNED = 64
# Buffers of main memory that the last exchange has left for the next one: a new page costs more than its copy.
_LEFT: deque[Tensor] = deque(maxlen=4)

Round = Sequence[Message]
# What copies elements into a part of a target: (part, elements).
Write = Callable[[Tensor, Tensor], object]


class Copy(NamedTuple):
    """A box that this rank has already: where it is among its source tensors, and where among its target tensors."""

    name: str
    here: Slices
    into: str
    there: Slices


@dataclass(frozen=True, eq=False)
class MessageSchedule:
    """The messages of one rank by round under one budget, and its copies; planned once."""

    sends: Sequence[Round]
    receives: Sequence[Round]
    copies: Sequence[Copy]


@dataclass(eq=False)
class PendingMessage:
    """A message that was posted: what travels, its buffer if it has one, and the work to wait for."""

    message: Message
    tensor: Tensor
    buffer: Tensor | None
    sending: bool
    work: Waitable | None = None


class Waitable(Protocol):
    """Work that was started, as torch's is."""

    def wait(self, timeout: timedelta) -> object:
        """Wait for it; ``RuntimeError`` where it failed, or takes too long."""


class P2PTransport(Protocol):
    """The calls of a process group that an exchange makes."""

    def staging(self, tensors: Sequence[Tensor]) -> torch.device:
        """Return the buffers' device: the GPU of the tensors if messages are sent from there, else main memory."""

    def together(self, device: torch.device) -> bool:
        """Return whether the messages of a round start together, with buffers there, and may wait for each other."""

    def start(self, row: Sequence[PendingMessage]) -> None:
        """Start messages, each a ``work``, in order; in few calls where a round starts together, as NCCL needs it."""


class GroupTransport:
    """A process group of torch's."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._ranks = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}

    def staging(self, tensors: Sequence[Tensor]) -> torch.device:
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
        return device if "nccl" in str(dist.get_backend_config(self._group)) else torch.device("cpu")

    def together(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def meet(self) -> None:
        """Connect all members over NCCL, which leaves it undefined what a first call does that only some make."""
        dist.all_reduce(torch.zeros(1, device="cuda"), group=self._group)

    def start(self, row: Sequence[PendingMessage]) -> None:
        if row and not self.together(row[0].tensor.device):
            start_each(self._group, self._ranks, row)
            return
        peers = [(self._ranks[one.message.peer], one.sending) for one in row]
        for batch in batches(peers, dist.get_rank(self._group), dist.get_world_size(self._group)):
            operations = [
                dist.P2POp(dist.isend if sending else dist.irecv, row[n].tensor, group=self._group, group_peer=peer)
                for n, (peer, sending) in ((number, peers[number]) for number in batch)
            ]
            started = Batch(dist.batch_isend_irecv(operations), row[batch[0]].tensor.device)
            for number in batch:
                row[number].work = started


def start_each(group: ProcessGroup, places: Mapping[int, int], row: Sequence[PendingMessage]) -> None:
    """Start messages one by one; ``places`` has the position of each peer in the group."""
    for one in row:
        call = group.send if one.sending else group.recv
        one.work = call([one.tensor], places[one.message.peer], 0)


class Exchange:
    """The exchange of one rank: the ``received`` messages, whether its copies are done, and the memory that it took."""

    def __init__(
        self,
        transport: P2PTransport,
        tensors: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        timeout: timedelta,
        advance: Callable[[], None] | None = None,
        progress: Callable[[int, int], object] | None = None,
        write: Write | None = None,
        staging: Tensor | None = None,
    ) -> None:
        self._direct, self._write = write is None, write or Tensor.copy_
        self._transport, self._tensors, self._into, self._timeout = transport, tensors, into, timeout
        self._advance, self._progress = advance or (lambda: None), progress
        self._device = transport.staging((*tensors.values(), *into.values()))
        self._together = transport.together(self._device)
        self._ahead = 2 if self._together else _AHEAD
        self._free: list[Tensor] = []
        self._lost: dict[int, str] = {}
        self._error = ""
        self.received: set[Message] = set()
        self.copied, self.memory, self._arrived = False, 0, 0
        self.staging, self._staged = staging, dict[Message, Tensor]()

    def all(self, schedule: MessageSchedule) -> None:
        """Every round and every copy. Raises ``ExchangeError``, in the end, when this rank failed or lost others."""
        sends, receives, copies = schedule.sends, schedule.receives, schedule.copies
        self._total = sum(message.payload for row in receives for message in row)
        self._longest = max((message.bytes for row in (*sends, *receives) for message in row), default=0)
        if self.staging is not None:
            self._stage([message for row in receives for message in row], self.staging)
        rows, buffered = deque[list[PendingMessage]](), 0
        for number, sent_received in enumerate([*zip(sends, receives, strict=True)] or [((), ())]):
            while buffered >= 2 or len(rows) >= self._ahead:
                buffered -= _has_buffer(rows[0])
                self._finish(rows.popleft())
            rows.append(self._post(*sent_received))
            buffered += _has_buffer(rows[-1])
            if number == 0:
                self.attempt(self._copy, copies)
        for row in rows:
            self._finish(row)
        # What was unpacked and copied counts once the GPU has done it.
        for device in {tensor.device for tensor in self._into.values()}:
            self.attempt(device_done_within, device, self._timeout)
        if self._error:
            raise ExchangeError(self._error)
        if self._lost:
            raise ExchangeError("; ".join(sorted(set(self._lost.values())))[:200], tuple(self._lost))
        if self._device.type == "cpu":  # after an error something may still be sent from a buffer
            _LEFT.extend(self._free)

    def attempt(self, work: Callable[..., object], *given: object) -> None:
        """Do something that may fail on this rank; after a failure the rank only goes on exchanging messages."""
        if self._error:
            return
        try:
            work(*given)
        except Exception as error:  # noqa: BLE001  - whatever it is, the others must know
            self._error = in_one_line(error)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _post(self, sends: Round, receives: Round) -> list[PendingMessage]:
        """Start a round: receives first, so that what arrives finds its place."""
        row = [
            PendingMessage(message, *self._place(message, self._into, self._direct), sending=False)
            for message in receives
        ]
        for message in sends:
            one = PendingMessage(message, *self._place(message, self._tensors, True), sending=True)
            if one.buffer is not None:
                self.attempt(self._pack, message, one.buffer)
            row.append(one)
        row = [one for one in row if one.message.peer not in self._lost]
        if self._together:
            self._transport.start(row)
            return row
        for one in row:
            started = time.monotonic()
            try:
                self._transport.start([one])
            except RuntimeError as error:
                self._lose(one, error, started, {one.message.peer})
        return [one for one in row if one.work is not None]

    def _finish(self, row: Sequence[PendingMessage]) -> None:
        """Wait for a round, and unpack it."""
        for one in row:
            if one.message.peer not in self._lost and self._waited(one, row) and not one.sending:
                if one.buffer is not None:
                    self.attempt(self._unpack, one.message, one.buffer)
                if not self._error:
                    self.received.add(one.message)
                self._arrived += one.message.payload
            if one.buffer is not None:
                self._free.append(one.buffer)
        self._advance()
        if self._progress is not None and row:
            self.attempt(self._progress, self._arrived, self._total)

    def _waited(self, one: PendingMessage, row: Sequence[PendingMessage]) -> bool:
        started = time.monotonic()
        try:
            if one.work is not None:
                one.work.wait(self._timeout)
        except RuntimeError as error:
            # Of messages that started together, any may be the one that the others wait for.
            self._lose(one, error, started, {other.message.peer for other in row if other.work is one.work})
            return False
        return True

    def _lose(self, one: PendingMessage, error: RuntimeError, started: float, peers: Collection[int]) -> None:
        """Count the peer of a message as lost; all ``peers`` if the timeout has passed since ``started``."""
        reason = first_line(error)
        if time.monotonic() - started >= _WHOLE * self._timeout.total_seconds():
            # gloo closes the connections to all peers when one of them times out: nothing more arrives.
            why = f"no message from or to {in_words(sorted(peers))} ended within {self._timeout.total_seconds():g} s"
            self._lost = dict.fromkeys(peers, why)
            raise ExchangeError(why, tuple(self._lost)) from error
        self._lost.setdefault(one.message.peer, reason.rpartition("] ")[2][:120])

    # -- staging ----------------------------------------------------------------------------------------------------

    def _stage(self, received: Sequence[Message], staging: Tensor) -> None:
        """Give each message its place in the staging, or in a larger one."""
        ends = list(accumulate(-(-message.bytes // _ALIGNED) * _ALIGNED for message in received))
        if ends and (staging.nbytes < ends[-1] or staging.device != self._device):
            self.staging = staging = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        for message, start in zip(received, [0, *ends], strict=False):
            self._staged[message] = staging[start : start + message.bytes]

    def unpack(self) -> int:
        """Write the staged messages into the targets; return their bytes."""
        for message, staged in self._staged.items():
            self._unpack(message, staged)
        return self._total

    # -- memory -----------------------------------------------------------------------------------------------------

    def _place(self, message: Message, tensors: Mapping[str, Tensor], direct: bool) -> tuple[Tensor, Tensor | None]:
        """Return the bytes to send or receive: with ``direct`` a view of a contiguous tensor, otherwise a buffer."""
        if message in self._staged:
            return self._staged[message], None
        if len(message.pieces) == 1 and direct:
            piece = message.pieces[0]
            part = tensors[piece.name][piece.here]
            if part.is_contiguous() and part.device == self._device and not self._error:
                return flat(part).view(torch.uint8), None
        buffer = self._free.pop() if self._free else self._new()
        return buffer[: message.bytes], buffer

    def _new(self) -> Tensor:
        self.memory += self._longest
        with suppress(IndexError):
            if self._device.type == "cpu" and (left := _LEFT.pop()).nbytes == self._longest:
                return left
        return torch.empty(self._longest, dtype=torch.uint8, device=self._device)

    def _pack(self, message: Message, buffer: Tensor) -> None:
        for part, elements in _parts(message, self._tensors, buffer):
            elements.copy_(part)

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        for part, elements in _parts(message, self._into, buffer):
            self._write(part, elements)

    def _copy(self, copies: Sequence[Copy]) -> None:
        for name, here, into, there in copies:
            part, place = self._tensors[name][here], self._into[into][there]
            if not same_place(part, place):
                self._write(place, part)
        self.copied = True


def _parts(message: Message, tensors: Mapping[str, Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the part of a tensor that each piece of a message is, and its elements in the buffer."""
    typed = buffer
    for name, here, offset, size in message.pieces:
        part = tensors[name][here]
        width = part.element_size()
        typed = typed if typed.dtype == part.dtype else buffer[: len(buffer) // width * width].view(part.dtype)
        yield part, typed[offset // width : (offset + size) // width].view_as(part)


def _has_buffer(row: Sequence[PendingMessage]) -> bool:
    return any(one.buffer is not None for one in row)


def batches(peers: Sequence[tuple[int, bool]], rank: int, size: int, limit: int = _OPERATIONS) -> list[list[int]]:
    """Return the messages of a round, by number, in batches of at most ``limit``; ``peers`` has peer and direction.

    Both ends of a message put it into the same batch: by how far apart they are, and by how many were before it between
    them in its direction. So a rank in one batch never waits for a rank in a later one.

    >>> batches([(1, True), (1, True), (1, False)], rank=0, size=2, limit=4)
    [[0, 1, 2]]
    >>> batches([(1, True), (1, True), (1, False)], rank=0, size=2, limit=2)
    [[0, 2], [1]]
    """
    apart = max(1, min(size - 1, limit // 2))
    between = max(1, limit // (2 * apart))
    before: Counter[tuple[int, bool]] = Counter()
    found: dict[tuple[int, int], list[int]] = {}
    for number, (peer, sending) in enumerate(peers):
        distance = (peer - rank if sending else rank - peer) % size
        found.setdefault((before[peer, sending] // between, (distance - 1) // apart), []).append(number)
        before[peer, sending] += 1
    return [found[key] for key in sorted(found)]
