"""The side channel: where the ranks of a round leave arrivals, texts and one outcome for each other.

```
StoreChannel     a torch store: TCP (both servers), File, Hash, the store of simulated ranks; a PrefixStore of any
FolderChannel    a folder that the ranks share
```

A channel holds no state of a round: every method names the key that it works on. What each does is described here once;
a transport says what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rankmesh.errors import AgreementError

__all__ = ["LARGEST", "LARGEST_EACH", "LARGEST_LIST", "Channel", "ChannelLost", "foreign"]

# Bytes of one value: a store with libuv takes no more at once. Of the texts of all ranks under one key: of a world of
# any size, or for each rank where that is more.
LARGEST, LARGEST_LIST, LARGEST_EACH = 2**23, 2**25, 2**11


class ChannelLost(RuntimeError):
    """The channel does not answer: whoever serves it is gone, or the way to it is cut."""


class Channel(Protocol):
    """What a round needs of a transport; every method raises ``ChannelLost`` where the channel has failed."""

    @property
    def remote(self) -> bool:
        """Whether a call may never return, as over a network that is cut."""

    def again(self) -> Channel:
        """Return a channel of these keys over another connection: a call that was given up still occupies this one."""

    def arrive(self, key: str, participants: Sequence[int], rank: int, *, asks: bool = True) -> bool:
        """Add a participant to a set, once; return whether that completes the set, where it ``asks``."""

    def absent(self, key: str, participants: Sequence[int]) -> list[int]:
        """Return the participants that are not in a set."""

    def post(self, key: str, rank: int, text: str) -> None:
        """Add a text of a rank, one line without a newline."""

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        """Return the texts of each rank, in its order; the more ``writers`` there are, the more bytes are read."""

    def tick(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; return its new value."""

    def advance(self, key: str, number: int) -> None:
        """Raise a number by one from ``number``: once, whoever asks for it."""

    def first(self, key: str, text: str) -> str:
        """Write a text if there is none; return the text that is there then."""

    def announce(self, key: str, text: str) -> str:
        """Like ``first``, and wake the ranks that wait for the key."""

    def write(self, key: str, text: str) -> None:
        """Write a text; it wakes those that wait for the key."""

    def read(self, key: str) -> str | None:
        """Return the text under a key, None where there is none."""

    def wait(self, key: str, seconds: float) -> bool:
        """Wait at most ``seconds`` for a text under a key; return whether there is one."""

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        """Remove keys, and sets of participants, whether they are there or not."""


def foreign(key: str, what: str) -> AgreementError:
    """Return the error for a value that no rank has written."""
    return AgreementError(
        f"{key!r} holds {what}; another program writes under rankmesh's keys; give the job a store of its own", key=key
    )
