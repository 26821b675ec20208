"""How summaries of all ranks get to the rank that logs: a file for each rank of a host, a tree of hosts in the store.

```
ranks of a host   ── RANK.slow ──>  its first rank   ── slow/9 ──>  host 1  ── slow/1 ──>  host 0, with rank 0
window ends       0 s               0.4 s                           0.8 s                  1.2 s
```

Each host merges what the hosts below it have left since it last looked: clocks of hosts may differ.
"""

from __future__ import annotations

import time
from contextlib import suppress

from rankmesh.debug.slow.summary import Summary, merged
from rankmesh.debug.watch.host import HostRanks
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel

__all__ = ["HOSTS", "HostTree", "key"]

# Where hosts take their numbers, and where each leaves its summary.
HOSTS = "slow/hosts"
# Hosts below another one, and seconds in which those below have left their summaries.
_BELOW, _MOMENT = 8, 0.4
# How often a host looks for the ranks that reported before, and are late now.
_TRIES = 4


class HostTree:
    """The summaries of this rank and of those below it."""

    def __init__(self, rank: int, host: HostRanks, store: BoundedChannel) -> None:
        self._rank, self._host, self._store = rank, host, store
        self._number, self._hosts = 0 if rank == 0 else -1, 0
        self._taken = dict[int, str]()
        self._here, self._tries = 0, 0
        self.due = float("inf")
        self.bytes = 0

    def put(self, window: int, summary: Summary) -> None:
        """Leave this rank's summary of a window; ``due`` is when ``take`` has to be called, on any clock of seconds."""
        self._host.report(f"{window} {summary.to_text()}")
        self.due = time.monotonic() + _MOMENT * (1 + _depth(self._hosts) - _depth(max(0, self._number)))

    def take(self, window: int) -> Summary | None:
        """Merge the summaries of this host's ranks and of the hosts below; return them on rank 0, None on others."""
        self.due, self._tries = float("inf"), self._tries + 1
        texts = [text.partition(" ") for text in self._host.reports()]
        here = [Summary.from_text(text) for number, _, text in texts if number == str(window)]
        if not here:
            return None
        if len(here) < self._here and self._tries < _TRIES:
            self.due = time.monotonic() + _MOMENT
            return None
        self._here, self._tries = len(here), 0
        try:
            below = self._store.ask(self._below)
        except ChannelLost:
            return None
        whole = merged([*here, *map(Summary.from_text, below)])
        if self._rank == 0:
            return whole
        text = f"{window} {whole.to_text()}"
        self.bytes += len(text)
        with suppress(ChannelLost):
            self._store.ask(lambda channel: channel.write(key(self._number), text))
        return None

    def close(self) -> None:
        """Delete this host's summary from the store."""
        if self._number > 0:
            with suppress(ChannelLost):
                self._store.ask(lambda channel: channel.delete([key(self._number)]))

    def _below(self, channel: StoreChannel) -> list[str]:
        """Return the new summaries of the hosts below; the first time, take a number."""
        if self._number < 0:
            self._number = channel.tick(HOSTS, 1)
        self._hosts = channel.tick(HOSTS, 0)
        first, found = _BELOW * self._number + 1, list[str]()
        for number in range(first, min(first + _BELOW, self._hosts + 1)):
            window, _, text = (channel.read(key(number)) or "").partition(" ")
            if text and self._taken.get(number) != window:
                self._taken[number] = window
                found.append(text)
        return found


def key(number: int) -> str:
    """Return where a host leaves its summary."""
    return f"slow/{number}"


def _depth(number: int) -> int:
    """Return how many hosts are above the host of a number.

    >>> [_depth(number) for number in (0, 1, 8, 9, 72, 73)]
    [0, 1, 1, 2, 2, 3]
    """
    return 0 if number == 0 else 1 + _depth((number - 1) // _BELOW)
