"""Rolls: which ranks of a span have come, one store operation a rank.

A counter of the store has 64 bits; each rank adds the bit that is its own, so the sum is the set of those that came.

```
span 0 .. 3      rank 0 adds 1, rank 2 adds 4, rank 3 adds 8       sum 13 = 1101      absent: rank 1
```

Above 62 ranks there is one counter for each 62 of them. Whoever completes a counter counts it, so the rank that
completes the last one knows that all have come: it is told so by its own operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.core.rank_range import RankRange
from rankmesh.errors import AgreementError
from rankmesh.rendezvous.store import JobStore

__all__ = ["Roll"]

# Counters are signed, and a bit is left for nobody.
_BITS = 62


@dataclass(frozen=True)
class Roll:
    """The ranks of ``span`` that have come, under one key of the store."""

    store: JobStore
    key: str
    span: RankRange

    def come(self, rank: int) -> bool:
        """Put a rank on the roll, once; whether all ranks of the span are on it by that."""
        block, bit = self._place(rank)
        if self.store.count(f"{self.key}/{block}", bit) != self._whole(block):
            return False
        return self._blocks == 1 or self.store.count(f"{self.key}/blocks", 1) == self._blocks

    def go(self, rank: int) -> None:
        """Take a rank from the roll again."""
        block, bit = self._place(rank)
        if self.store.count(f"{self.key}/{block}", -bit) + bit == self._whole(block) and self._blocks > 1:
            self.store.count(f"{self.key}/blocks", -1)

    def absent(self) -> list[int]:
        """The ranks that are not on the roll."""
        return [rank for block in range(self._blocks) for rank in self._absent(block)]

    def _absent(self, block: int) -> list[int]:
        came = self.store.count(f"{self.key}/{block}", 0)
        if not 0 <= came <= self._whole(block):
            raise AgreementError(
                f"received under '{self.key}/{block}' the number {came}, which is no set of ranks; another program "
                "writes under rankmesh's keys; give the job a store of its own",
                key=self.key,
            )
        start = self.span.offset + block * _BITS
        return [start + position for position in range(self._length(block)) if not came >> position & 1]

    @property
    def keys(self) -> list[str]:
        """Every key that the roll may have in the store."""
        counters = [f"{self.key}/{block}" for block in range(self._blocks)]
        return counters if self._blocks == 1 else [*counters, f"{self.key}/blocks"]

    @property
    def _blocks(self) -> int:
        return -(-self.span.size // _BITS)

    def _place(self, rank: int) -> tuple[int, int]:
        block, position = divmod(rank - self.span.offset, _BITS)
        return block, 1 << position

    def _length(self, block: int) -> int:
        return min(_BITS, self.span.size - block * _BITS)

    def _whole(self, block: int) -> int:
        return (1 << self._length(block)) - 1
