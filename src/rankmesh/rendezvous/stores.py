"""Torch stores as the side channel of a round: where ranks leave arrivals, texts and one outcome for each other.

A channel holds no state of a round: every method names the key that it works on.

A set of participants is a counter of 64 bits for each 31 of them, with two bits for each. A rank adds one to its own
two bits, so one operation both arrives and returns who has arrived:

```
participants 0 .. 3     rank 0 adds 1, rank 2 adds 16, rank 3 adds 64     sum 81 = 01 01 00 01     absent: rank 1
```

A rank that adds a second time, as in a retry, finds a 2 there and takes it back: the bits of other ranks stay right.

A call of torch's TCP client has no limit of its own once the network is cut: such a channel is ``remote``, and a round
makes its calls on a thread that it can leave behind. So does a ``BoundedChannel`` for other calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import first_line
from rankmesh.rendezvous.channel import LARGEST, LARGEST_EACH, LARGEST_LIST, PATIENCE, ChannelLost, foreign
from rankmesh.rendezvous.waiting import answered_within, submit, underlying, wait_for

__all__ = ["BoundedChannel", "StoreChannel"]

_Result = TypeVar("_Result")

# Participants in one counter, which is signed: a bit is left unused. And decimal digits of a counter.
_BLOCK, _DIGITS = 31, 20
# Nobody writes this: asking a store to change it into itself reads in one message, where `get` waits first.
_NEVER = "?"


class StoreChannel:
    """The keys of one job in a torch store, under ``prefix`` (by default one for each run of a launcher).

    The store is of any kind: TCP with either server, File, Hash, the store of simulated ranks, a PrefixStore of these.
    ``remote`` is set where a call may never return, as over a network that is cut. Every method raises ``ChannelLost``
    where the store has failed.
    """

    def __init__(self, store: Store, prefix: str | None = None) -> None:
        self._store = store
        self._prefix = f"rankmesh/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}" if prefix is None else prefix
        self.remote = isinstance(underlying(store), TCPStore)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def again(self) -> StoreChannel:
        """Return a channel of these keys over another connection: a call that was given up still occupies this one."""
        return StoreChannel(_answered(self._store.clone), self._prefix)  # type: ignore[attr-defined]

    # -- sets ---------------------------------------------------------------------------------------------------

    def arrive(self, key: str, participants: Sequence[int], rank: int) -> bool:
        """Add a participant to a set, once; return whether that completes the set."""
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
        """Return the participants that are not in a set."""
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
        """Add a text of a rank, one line without a newline."""
        self._append(key, f"{rank} {text}\n")

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        """Return the texts of each rank, in its order; the more ``writers`` there are, the more bytes are read."""
        found: dict[int, list[str]] = {}
        for line in (self._read(key, max(LARGEST_LIST, writers * LARGEST_EACH)) or "").splitlines():
            rank, _, text = line.partition(" ")
            if not rank.isdecimal() or len(rank) > 9:
                raise foreign(self._key(key), f"{line[:60]!r}, which is not a text of a rank")
            found.setdefault(int(rank), []).append(text)
        return found

    def first(self, key: str, text: str) -> str:
        """Write a text if there is none; return the text that is there then."""
        return self._text(key, _answered(lambda: self._store.compare_set(self._key(key), "", text)), LARGEST)

    def announce(self, key: str, text: str) -> str:
        """Like ``first``, and wake the ranks that wait for the key."""
        found = self.first(key, text)
        if self.remote and found == text:
            # The server without libuv wakes nobody when it compares and sets.
            self._append(key, "")
        return found

    def _append(self, key: str, text: str) -> None:
        _answered(lambda: self._store.append(self._key(key), text))  # type: ignore[attr-defined]  # absent from its stubs

    def write(self, key: str, text: str) -> None:
        """Write a text, and wake the ranks that wait for the key."""
        _answered(lambda: self._store.set(self._key(key), text))

    def read(self, key: str) -> str | None:
        """Return the text under a key, None where there is none."""
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
        """Raise a number by one from ``number``: once, whoever asks for it."""
        _answered(lambda: self._store.compare_set(self._key(key), str(number), str(number + 1)))

    def tick(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; return its new value."""
        return _answered(lambda: self._store.add(self._key(key), amount))

    # -- the rest -----------------------------------------------------------------------------------------------

    def wait(self, key: str, seconds: float) -> bool:
        """Wait at most ``seconds`` for a text under a key; return whether there is one."""
        return _answered(lambda: wait_for(self._store, [self._key(key)], seconds))

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        """Remove keys, and sets of participants, whether they are there or not."""
        blocks = _blocks(participants)
        names = [f"{key}/{block}" for key in sets for block in (*range(blocks), *(["blocks"] if blocks > 1 else []))]
        for key in (*keys, *names):
            _answered(lambda key=key: self._store.delete_key(self._key(key)))  # type: ignore[misc]


class BoundedChannel:
    """A channel whose calls end in time; while it owes an answer, it is not asked again.

    Where a network is cut, torch's client does not come back at its timeout. A store that only stood still, as for a
    name server that does not answer, is there again after that.
    """

    def __init__(self, channel: StoreChannel) -> None:
        self.channel = channel
        self._is_answered: Callable[[], bool] | None = None

    def ask(self, call: Callable[[StoreChannel], _Result]) -> _Result:
        """Call the channel and return its result; raise ``ChannelLost`` if it fails or does not return in time."""
        if not self.channel.remote:
            return call(self.channel)
        if self._is_answered is not None and not self._is_answered():
            raise ChannelLost("an earlier call is still under way")
        made = submit(lambda: call(self.channel), "rankmesh-store")
        self._is_answered = made.done
        return answered_within(made, PATIENCE)


def _answered(call: Callable[[], _Result]) -> _Result:
    """Call a store and return its answer; raise ``ChannelLost`` if it has failed."""
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
