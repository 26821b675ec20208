"""Exchange: what all ranks give under one name, merged on its way to one of them, over the job's store.

```
rank    gives an entry under a name                                  an append to the key of its part of the ranks
part    its first rank to give merges the entries, and gives them    one read: of 64 ranks, or the square root
root    the first part to give merges all parts                      one read
```

Nobody waits for a rank: an entry that is not given within ``patience`` is left out. An entry has a value by item, and
merged ones the ranks of each value as ranges (start, stop, step):

>>> merged([{"w": {"7": [[0, 1, 1]]}}, {"w": {"7": [[1, 2, 1]], "5": [[2, 3, 1]]}}])
{'w': {'7': [[0, 2, 1]], '5': [[2, 3, 1]]}}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from math import isqrt
from typing import Any

from rankmesh.core.grouped import grouped
from rankmesh.core.ranges import ranges, ranks_in
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel

__all__ = ["Exchange", "Merged", "connected", "merged"]

# Ranks as ranges, by value, by item.
Merged = Mapping[str, Mapping[str, list[list[int]]]]
# Ranks of a part, at least; and how long the store may take to answer.
_PART, _STORE = 64, timedelta(seconds=5)


def connected(store: Any, key: str) -> BoundedChannel:
    """Connect to the world's store once more, within a limit, for keys that begin with ``key``."""
    if store is None:
        raise ChannelLost("the world has no store; use gloo or nccl")

    def clone(_: StoreChannel) -> StoreChannel:
        again = store.clone()
        again.set_timeout(_STORE)
        return StoreChannel(again, key)

    return BoundedChannel(BoundedChannel(StoreChannel(store, key)).ask(clone))


def merged(entries: Iterable[Merged]) -> dict[str, dict[str, list[list[int]]]]:
    """Return what all of these have."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    for item, several in grouped(pair for entry in entries for pair in entry.items()).items():
        values = grouped(pair for each in several for pair in each.items())
        found[item] = {value: ranges(sorted(ranks_in(chain.from_iterable(listed)))) for value, listed in values.items()}
    return found


@dataclass
class _Led:
    """A key that this rank reads when ``expected`` have given, or at the ``end``; ``root``: for all ranks."""

    name: str
    expected: int
    end: float
    root: bool


class Exchange:
    """The exchanges of one rank; ``concluded`` gets the name and the merged entries on the rank that is the root.

    ``look`` is to be called now and then, by the thread that calls ``give``; ``patience`` is in seconds.
    """

    def __init__(
        self,
        channel: StoreChannel,
        rank: int,
        size: int,
        concluded: Callable[[str, Merged], None],
        patience: float = 10.0,
    ) -> None:
        self._channel, self._rank, self._size, self._concluded = channel, rank, size, concluded
        self._part = max(_PART, isqrt(size - 1) + 1)
        self._parts = -(-size // self._part)
        self._patience = patience
        self._led: dict[str, _Led] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank waits for entries of others."""
        return bool(self._led)

    def give(self, name: str, entry: Mapping[str, str]) -> None:
        """Give this rank's values by item; each rank gives one entry under a name."""
        part = self._rank // self._part
        expected = min(self._part, self._size - part * self._part)
        mine = {item: {value: [[self._rank, self._rank + 1, 1]]} for item, value in entry.items()}
        self._give(f"{name}/{part}", mine, _Led(name, expected, self._patience, self._parts == 1))

    def _give(self, key: str, entry: Merged, led: _Led) -> None:
        self._channel.post(key, self._rank, json.dumps(entry, separators=(",", ":")))
        if self._channel.tick(f"{key}/given", 1) == 1:
            led.end += time.monotonic()
            self._led[key] = led

    def look(self) -> None:
        """Merge what all have given, or those that did in time."""
        for key, led in list(self._led.items()):
            if self._channel.tick(f"{key}/given", 0) < led.expected and time.monotonic() < led.end:
                continue
            del self._led[key]
            posted = self._channel.posted(key, self._part)
            self._channel.delete([key, f"{key}/given"])
            entries = merged(json.loads(text) for texts in posted.values() for text in texts)
            if led.root:
                self._concluded(led.name, entries)
            else:  # parts may wait as long as this one
                self._give(f"{led.name}/root", entries, _Led(led.name, self._parts, 2 * self._patience, root=True))
