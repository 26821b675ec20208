"""Torch stores as side channels.

A set of participants is a counter of 64 bits for each 31 of them, with two bits for each. A rank adds one to its own
two bits, so one operation both arrives and returns who has arrived:

```
participants 0 .. 3     rank 0 adds 1, rank 2 adds 16, rank 3 adds 64     sum 81 = 01 01 00 01     absent: rank 1
```

A rank that adds a second time, as in a retry, finds a 2 there and takes it back: the bits of other ranks stay right.

A call of torch's TCP client has no limit of its own once the network is cut: such a channel is ``remote``, and a round
makes its calls on a thread that it can leave behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import first_line
from rankmesh.rendezvous.channel import LARGEST, LARGEST_EACH, LARGEST_LIST, ChannelLost, foreign
from rankmesh.rendezvous.waiting import underlying, wait_for

__all__ = ["StoreChannel"]

_Result = TypeVar("_Result")

# Participants in one counter, which is signed: a bit is left unused. And decimal digits of a counter.
_BLOCK, _DIGITS = 31, 20
# Nobody writes this: asking a store to change it into itself reads in one message, where `get` waits first.
_NEVER = "?"


class StoreChannel:
    """The keys of one job in a torch store, under ``prefix`` (by default one for each run of a launcher)."""

    def __init__(self, store: Any, prefix: str | None = None) -> None:
        self._store = store
        self._prefix = f"rankmesh/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}" if prefix is None else prefix
        self.remote = isinstance(underlying(store), TCPStore)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def again(self) -> StoreChannel:
        return StoreChannel(_answered(self._store.clone), self._prefix)

    # -- sets ---------------------------------------------------------------------------------------------------

    def arrive(self, key: str, participants: Sequence[int], rank: int, *, asks: bool = True) -> bool:
        """Add a participant to a set; whether the set is complete by that, which the store returns unasked."""
        block, position = divmod(participants.index(rank), _BLOCK)
        here = self.tick(f"{key}/{block}", 1 << 2 * position)
        again = here >> 2 * position & 3 > 1
        if again:
            here = self.tick(f"{key}/{block}", -(1 << 2 * position))
        if _absent(here, _members(participants, block)):
            return False
        blocks = _blocks(participants)
        return blocks == 1 or self.tick(f"{key}/blocks", 0 if again else 1) == blocks

    def absent(self, key: str, participants: Sequence[int]) -> list[int]:
        found: list[int] = []
        for block in range(_blocks(participants)):
            text = self.read(f"{key}/{block}") or "0"
            here = int(text) if text.isdecimal() and len(text) < _DIGITS else -1
            members = _members(participants, block)
            if not 0 <= here < 1 << 2 * len(members):
                raise foreign(self._key(f"{key}/{block}"), f"{text[:60]!r}, which is not a set of ranks")
            found += _absent(here, members)
        return found

    # -- texts --------------------------------------------------------------------------------------------------

    def post(self, key: str, rank: int, text: str) -> None:
        _answered(lambda: self._store.append(self._key(key), f"{rank} {text}\n"))

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for line in (self._read(key, max(LARGEST_LIST, writers * LARGEST_EACH)) or "").splitlines():
            rank, _, text = line.partition(" ")
            if not rank.isdecimal() or len(rank) > 9:
                raise foreign(self._key(key), f"{line[:60]!r}, which is not a text of a rank")
            found.setdefault(int(rank), []).append(text)
        return found

    def first(self, key: str, text: str) -> str:
        return self._text(key, _answered(lambda: self._store.compare_set(self._key(key), "", text)), LARGEST)

    def announce(self, key: str, text: str) -> str:
        found = self.first(key, text)
        if self.remote and found == text:
            # The server without libuv wakes nobody when it compares and sets.
            _answered(lambda: self._store.append(self._key(key), ""))
        return found

    def write(self, key: str, text: str) -> None:
        _answered(lambda: self._store.set(self._key(key), text))

    def read(self, key: str) -> str | None:
        return self._read(key, LARGEST)

    def _read(self, key: str, largest: int) -> str | None:
        found = _answered(lambda: self._store.compare_set(self._key(key), _NEVER, _NEVER))
        return None if found == _NEVER.encode() else self._text(key, found, largest)

    def _text(self, key: str, content: bytes, largest: int) -> str:
        if len(content) > largest:
            raise foreign(self._key(key), f"{len(content)} bytes; at most {largest} are read from the store")
        return content.decode(errors="replace")

    # -- numbers ------------------------------------------------------------------------------------------------

    def advance(self, key: str, number: int) -> None:
        _answered(lambda: self._store.compare_set(self._key(key), str(number), str(number + 1)))

    def tick(self, key: str, amount: int) -> int:
        return int(_answered(lambda: self._store.add(self._key(key), amount)))

    # -- the rest -----------------------------------------------------------------------------------------------

    def wait(self, key: str, seconds: float) -> bool:
        return _answered(lambda: wait_for(self._store, [self._key(key)], seconds))

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        blocks = _blocks(participants)
        names = [f"{key}/{block}" for key in sets for block in (*range(blocks), *(["blocks"] if blocks > 1 else []))]
        for key in (*keys, *names):
            _answered(lambda key=key: self._store.delete_key(self._key(key)))  # type: ignore[misc]


def _answered(call: Callable[[], _Result]) -> _Result:
    """Return what a store answers; ``ChannelLost`` where it has failed."""
    try:
        return call()
    except (RuntimeError, ConnectionError) as error:
        raise ChannelLost(first_line(error)) from error


def _blocks(participants: Sequence[int]) -> int:
    return -(-len(participants) // _BLOCK)


def _members(participants: Sequence[int], block: int) -> Sequence[int]:
    return participants[block * _BLOCK : (block + 1) * _BLOCK]


def _absent(counter: int, members: Sequence[int]) -> list[int]:
    return [rank for position, rank in enumerate(members) if not counter >> 2 * position & 3]
