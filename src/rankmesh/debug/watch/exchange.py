"""Exchange: what all ranks give under one name, merged on its way to one of them, over the job's store.

```
rank    gives an entry under a name                                  an append to the key of its part of the ranks
part    its first rank to give merges the entries, and gives them    one read: of 64 ranks, or the square root
root    a given rank, or the first part to give, merges all parts    one read
```

Nobody waits for a rank: an entry that is not given within ``patience`` is left out, and its rank told so. A result is
never made twice: who reads a key closes its counter first, which stays until all have counted, or for ten minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import isqrt
from typing import Any, Generic, TypeVar

from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel

__all__ = ["Exchange", "Form", "connected"]

_Entry = TypeVar("_Entry")
# Ranks of a part, at least; and how long the store may take to answer.
_PART, _STORE = 64, timedelta(seconds=5)
# What a closed counter has more, and for how many seconds it is kept for ranks that are late.
_CLOSED, _LATE = 1 << 32, 600.0


def connected(store: Any, key: str) -> BoundedChannel:
    """Connect to the world's store once more, within a limit, for keys that begin with ``key``."""
    if store is None:
        raise ChannelLost("the world has no store; use gloo or nccl")

    def clone(_: StoreChannel) -> StoreChannel:
        again = store.clone()
        again.set_timeout(_STORE)
        return StoreChannel(again, key)

    return BoundedChannel(BoundedChannel(StoreChannel(store, key)).ask(clone))


@dataclass(frozen=True)
class Form(Generic[_Entry]):
    """The functions that merge several entries into one, write one and read one."""

    merged: Callable[[Sequence[_Entry]], _Entry]
    to_text: Callable[[_Entry], str]
    from_text: Callable[[str], _Entry]


@dataclass
class _Key:
    """A key to which ``expected`` give, read when they have or ``seconds`` after the first; ``root``: of all ranks."""

    name: str
    key: str
    expected: int
    seconds: float
    root: bool

    @property
    def counter(self) -> str:
        return f"{self.key}/given"


class Exchange(Generic[_Entry]):
    """The exchanges of one rank. ``root`` is the rank that gets the results, None for whichever is first.

    ``look`` is to be called now and then, by the thread that calls ``give``; ``patience`` is in seconds.
    """

    def __init__(
        self,
        channel: StoreChannel,
        rank: int,
        size: int,
        form: Form[_Entry],
        *,
        root: int | None = None,
        patience: float = 10.0,
    ) -> None:
        self._channel, self._rank, self._size, self._form, self._root = channel, rank, size, form, root
        self._part = max(_PART, isqrt(size - 1) + 1)
        self._parts = -(-size // self._part)
        self._patience = patience
        # Keys that this rank reads, and counters that it has closed for others to count: until when.
        self._led, self._closed = dict[str, tuple[_Key, float]](), dict[str, float]()

    @property
    def leads(self) -> bool:
        """Return whether this rank waits for entries of others."""
        return bool(self._led)

    def give(self, name: str, entry: _Entry) -> bool:
        """Give this rank's entry under a name, once; return False if it is too late for the result."""
        self._forget()
        if self._rank == self._root:
            self._lead(self._root_of(name))
        return self._give(self._key(name, self._rank // self._part), entry)

    def _key(self, name: str, part: int) -> _Key:
        if self._parts == 1:
            return self._root_of(name)
        expected = min(self._part, self._size - part * self._part)
        return _Key(name, f"{name}/{part}", expected, self._patience, root=False)

    def _root_of(self, name: str) -> _Key:
        # Parts may take as long as one key.
        seconds, expected = (1 + (self._parts > 1)) * self._patience, self._size if self._parts == 1 else self._parts
        return _Key(name, f"{name}/root", expected, seconds, root=True)

    def _lead(self, key: _Key) -> None:
        self._led.setdefault(key.key, (key, time.monotonic() + key.seconds))

    def _give(self, key: _Key, entry: _Entry) -> bool:
        self._channel.post(key.key, self._rank, self._form.to_text(entry))
        given = self._channel.tick(key.counter, 1)
        if given > _CLOSED:
            self._delete(key, given)
            return False
        if given == 1 and (self._root is None or not key.root):
            self._lead(key)
        return True

    def _delete(self, key: _Key, given: int) -> bool:
        """Delete a key that is closed, and its counter once all have counted; return whether they have."""
        whole = given % _CLOSED == key.expected
        self._channel.delete([key.key, key.counter] if whole else [key.key])
        return whole

    def look(self) -> list[tuple[str, _Entry]]:
        """Merge what all have given, or those that did in time; return the names and entries of which this is root."""
        concluded = list[tuple[str, _Entry]]()
        for key, end in list(self._led.values()):
            if self._channel.tick(key.counter, 0) < key.expected and time.monotonic() < end:
                continue
            given = self._channel.tick(key.counter, _CLOSED)
            posted = self._channel.posted(key.key, self._part)
            del self._led[key.key]
            if not self._delete(key, given):
                self._closed[key.counter] = time.monotonic() + _LATE
            entry = self._form.merged([self._form.from_text(text) for texts in posted.values() for text in texts])
            if key.root:
                concluded.append((key.name, entry))
            else:
                self._give(self._root_of(key.name), entry)
        return concluded

    def _forget(self) -> None:
        over = [counter for counter, until in self._closed.items() if until <= time.monotonic()]
        self._channel.delete(over)
        for counter in over:
            del self._closed[counter]

    def close(self, *names: str) -> None:
        """Delete what this rank was to read or has closed, and all that is left of these names."""
        keys = [key for key, _ in self._led.values()]
        keys += [
            key for name in names for key in (self._root_of(name), *(self._key(name, n) for n in range(self._parts)))
        ]
        self._channel.delete({*self._closed, *(key.key for key in keys), *(key.counter for key in keys)})
        self._led.clear()
        self._closed.clear()
