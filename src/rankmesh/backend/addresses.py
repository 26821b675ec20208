"""Addresses: where the ranks listen for the groups that connect at once, told before any of these is made.

```
rank 1   "1 host 0200a50f7f000001 0=1 3=9"     in the text of its block, 16 ranks to a text
           |  |    |                |
         rank host socket           of each group, by its step of the schedule: the number of its first pair
```

On one gloo device the pairs of a group are numbered on from those of the group before. So who knows a rank's groups
knows all these numbers: a rank tells them once, for all plans of the job, and making its groups asks the store for
nothing more. A block is one key, so a rank reads a few texts however many members its groups have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankmesh.core.rank_range import RankRange
from rankmesh.errors import AgreementError
from rankmesh.rendezvous.store import JobStore

__all__ = ["Address", "Addresses"]

_BLOCK = 16


@dataclass(frozen=True)
class Address:
    """Where one rank listens: its host's name, the bytes of its socket's address, the number of its first pair."""

    host: str
    socket: bytes
    first: int


@dataclass(frozen=True)
class Addresses:
    """The texts of the ranks of ``span`` at one meeting, under ``key``."""

    store: JobStore
    key: str
    span: RankRange

    def tell(self, rank: int, host: str, socket: bytes, firsts: Mapping[int, int]) -> None:
        """Write where this rank listens, and the number of the first pair of each of its groups, by step."""
        numbers = " ".join(f"{step}={first}" for step, first in firsts.items())
        self.store.append(self._text(rank), f"{rank} {host} {socket.hex()} {numbers}")

    def read(self, members: Mapping[int, Sequence[int]]) -> dict[int, list[Address]]:
        """By step, the addresses of the members of a group; ``AgreementError`` where one of them has told none."""
        wanted = {rank for ranks in members.values() for rank in ranks}
        texts = sorted({self._text(rank) for rank in wanted})
        told = {}
        for line in (line for text in self.store.texts(texts) for line in text.splitlines()):
            rank, _, rest = line.partition(" ")
            told[rank] = rest
        return {step: [_address(told, rank, step, self.key) for rank in ranks] for step, ranks in members.items()}

    def keys_of(self, rank: int) -> list[str]:
        """The keys that this rank deletes when all have made their groups: the first of a block deletes its text."""
        return [self._text(rank)] if (rank - self.span.offset) % _BLOCK == 0 else []

    @property
    def keys(self) -> Iterable[str]:
        """Every key there may be."""
        return (self._text(rank) for rank in self.span.members[::_BLOCK])

    def _text(self, rank: int) -> str:
        return f"{self.key}/{(rank - self.span.offset) // _BLOCK}"


def _address(told: Mapping[str, str], rank: int, step: int, key: str) -> Address:
    try:
        host, socket, *numbers = told[str(rank)].split(" ")
        firsts = dict(number.split("=") for number in numbers)
        return Address(host, bytes.fromhex(socket), int(firsts[str(step)]))
    except (KeyError, ValueError):
        raise AgreementError(
            f"received no address of rank {rank} for step {step} under {key!r}; another program writes under "
            "rankmesh's keys; give the job a store of its own",
            key=key,
            rank=rank,
        ) from None
