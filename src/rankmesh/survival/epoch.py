"""Epochs: the parts of a job between two changes of its members, by number and by the agreement that each follows.

>>> from rankmesh.survival.epoch import Epoch
>>> first = Epoch()
>>> first.after("members 0 and 1 go on"), first.after("members 0 and 2 go on")
(Epoch(1-677425d90672), Epoch(1-17385e8ed25d))
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

__all__ = ["Epoch"]


@dataclass(frozen=True)
class Epoch:
    """An epoch; two of one ``number`` may follow where the store of a round is lost, so ``agreed`` tells them apart.

    As a string it is a name that no other epoch has, in the store and in messages.
    """

    number: int = 0
    agreed: str = ""

    def after(self, outcome: str) -> Epoch:
        """Return the next epoch, by the outcome of the round that ended this one."""
        return Epoch(self.number + 1, sha256(outcome.encode()).hexdigest()[:12])

    def __str__(self) -> str:
        return f"{self.number}-{self.agreed}" if self.agreed else f"{self.number}"

    def __repr__(self) -> str:
        return f"Epoch({self})"

    @classmethod
    def read(cls, name: object) -> Epoch:
        """Return the epoch that a message names. Raises ``ValueError`` for any other text."""
        number, _, agreed = str(name).partition("-")
        return cls(int(number), agreed)
