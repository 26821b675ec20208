"""Suspicion: a difference between replicas that the guard has found, as long as its steps are repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankmesh.errors import in_words, quoted

__all__ = ["Suspicion"]


@dataclass(frozen=True)
class Suspicion:
    """A difference whose steps are repeated: its step, the tensor, the ranks that differed, and where all go back to.

    ``tied``: these are both sides of a difference between two halves. ``repeat`` is 1 or 2. ``first`` are the digests
    that this rank had at that step the first time, ``second`` in the first repeat; None if it was not a member then.
    """

    step: int
    tensor: str
    ranks: tuple[int, ...]
    back: int
    tied: bool
    repeat: int = 1
    first: Mapping[str, int] | None = field(default=None, compare=False)
    second: Mapping[str, int] | None = field(default=None, compare=False)

    @property
    def data(self) -> dict[str, object]:
        """Return the fields that all ranks share, as plain data."""
        names = ("step", "tensor", "ranks", "back", "tied", "repeat")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, data: Mapping[str, Any], mine: Suspicion | None) -> Suspicion:
        """Return a suspicion from plain data; ``mine`` if it is that one, with this rank's digests."""
        found = cls(**{**data, "ranks": tuple(data["ranks"])})
        return mine if mine is not None and mine == found else found

    def __str__(self) -> str:
        if self.repeat == 1:
            who = f"{quoted(self.tensor)} differs on {in_words(self.ranks)} at step {self.step}"
            return f"{who}; all ranks repeat the steps from {self.back} on"
        return (
            f"{quoted(self.tensor)} is equal at step {self.step} now; all ranks repeat the steps from {self.back} on "
            "once more, to learn whether they always give the same"
        )
