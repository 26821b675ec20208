"""Guarding: what a job does when ranks that must hold the same do not.

```
it differs           all go back to the last commit at which they were equal, and repeat the steps
it differs again     the program did it: the job ends with Diverged
it is equal          the steps are repeated once more, as one machine's fault may have changed all ranks' numbers
    the same         a machine did it: the ranks that differed are left out
    others           the program is not deterministic, so nothing is known: nobody is left out
```
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rankmesh.core.sharding import Sharding
from rankmesh.errors import Diverged, PlanError, in_words, quoted
from rankmesh.guard.everyone import gathered
from rankmesh.guard.guard import Guard
from rankmesh.runtime.live import LiveGroups

__all__ = ["Guarding", "Suspicion", "check_copies"]

_log = logging.getLogger("rankmesh.survival")

# What to do where copies differ at the beginning.
_SEED = "seed every rank equally, or say over which axes plain tensors are replicated, such as replicated='dp'"


def check_copies(groups: LiveGroups, tensors: dict[str, Tensor], shardings: dict[str, Sharding]) -> None:
    """Compare copies once. Raises ``PlanError``, on every rank, where they differ."""
    guard = Guard(groups, tensors, shardings)
    try:
        guard.check()
    except Diverged as error:
        raise PlanError(f"{error.message}: it is no copy; {_SEED}", name=error.tensor) from error
    finally:
        guard.close()


@dataclass(frozen=True)
class Suspicion:
    """A difference whose steps are repeated: its step, the tensor, the ranks that differed, and where all go back to.

    ``tied``: these are both sides of a difference between two halves. ``repeat`` is 1 or 2. ``first`` are the digests
    that this rank had at that step the first time, ``second`` those of the first repeat; None where it was not there.
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
    def data(self) -> dict[str, Any]:
        """Return the fields that all ranks share, as plain data."""
        names = ("step", "tensor", "ranks", "back", "tied", "repeat")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, data: Mapping[str, Any], mine: Suspicion | None) -> Suspicion:
        """The suspicion of plain data; ``mine`` if it is that one, with this rank's digests."""
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


class Guarding:
    """The guard of one epoch; ``suspicion`` is why its steps are repeated, None if they are not.

    ``found`` is why those of the next one are. ``faulty`` are the ranks whose machines are at fault, and ``verdict``
    says why.
    """

    def __init__(
        self,
        groups: LiveGroups,
        tensors: dict[str, Tensor],
        shardings: dict[str, Sharding],
        every: int,
        suspicion: Suspicion | None,
    ) -> None:
        self._errors: list[Diverged] = []
        self._guard = Guard(groups, tensors, shardings, every=every, action=self._errors.append)
        self._groups = groups
        self.suspicion = suspicion
        self.found: Suspicion | None = None
        self.faulty: tuple[int, ...] = ()
        self.verdict = ""

    @property
    def equal_at(self) -> int | None:
        """The last commit at which all ranks were found equal."""
        return self._guard.equal_at

    def start(self, step: int) -> None:
        """Compare what is held at the beginning of an epoch. Raises ``Diverged``: there is nothing to go back to."""
        self._guard.check(step)
        if self._errors:
            error = self._errors[0]
            raise Diverged(f"{error.message}; {_SEED}", **error.values)

    def close(self) -> None:
        """Destroy what the guard has made."""
        self._guard.close()

    def commit(self, step: int, *, last: bool = False) -> bool:
        """Look at the last check and begin another; at the ``last`` commit wait for its result. Whether all go back.

        Sets ``found`` then, and ``faulty`` where the repeated steps show it. Raises ``Diverged`` for what the program
        did.
        """
        if last:
            self._guard.check(step)
        else:
            self._guard.step(step)
        before = self.suspicion
        if self._errors:
            error = self._errors.pop()
            if before is not None:
                raise Diverged(f"{error.message}; {_again(error, before)}", **error.values)
            back = self.equal_at or 0  # the beginning of the epoch, if nothing later
            what = error.step, error.tensor, tuple(error.ranks)
            self.found = Suspicion(*what, back, error.tied, first=self._guard.digests)
            return True
        if before is None or self.equal_at is None or self.equal_at < before.step:
            return False
        if before.repeat == 1:
            self.found = replace(before, repeat=2, second=self._guard.digests)
            return True
        self.suspicion = None
        self._conclude(before)
        return False

    def meet(self) -> None:
        """Wait until all ranks know the same: the first that ends the epoch would cut the others short."""
        gathered(self._groups, None)

    def _conclude(self, of: Suspicion) -> None:
        """Both repeats are equal on all ranks: whose numbers were wrong the first time?"""
        digests = self._guard.digests
        is_new = None in (of.first, of.second)
        found = gathered(self._groups, None if is_new else [of.first != of.second, of.second != digests])
        wrong = {rank for rank, (differs, _) in found.items() if differs}
        suspects = wrong.intersection(of.ranks) if of.tied else {*of.ranks}
        what = f"{quoted(of.tensor)} differed on {in_words(of.ranks)} at step {of.step}, and not after two repeats"
        if len(found) < self._groups.plan.mesh.size:
            why = "a rank is new since, so nothing is known of the cause"
        elif any(changed for _, changed in found.values()):
            why = "these gave different numbers: the program is not deterministic, and nothing is known of the cause"
        elif not suspects or (of.tied and len(suspects) == len(of.ranks)):
            why = "one of these machines is at fault, and nothing tells which"
        else:
            self.faulty = tuple(sorted(suspects))
            self.verdict = f"{what}: the machine of {in_words(suspects)} is at fault"
            return
        if self._groups.rank == min(found, default=self._groups.rank):
            _log.warning("rankmesh: %s; %s: nobody is left out", what, why)


def _again(error: Diverged, before: Suspicion) -> str:
    if (error.tensor, tuple(error.ranks)) == (before.tensor, before.ranks):
        return (
            "it did so before the steps were repeated, too: the program does it, and `rankmesh compare` finds the line"
        )
    return f"before the steps were repeated, {quoted(before.tensor)} differed on {in_words(before.ranks)}"
