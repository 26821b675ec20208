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
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankmesh.core.grouped import grouped
from rankmesh.core.sharding import Sharding
from rankmesh.debug.doctor.recording import recording_of
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.errors import Diverged, PlanError, RecordingError, in_words, quoted
from rankmesh.guard.digest import combined, digests
from rankmesh.guard.everyone import gathered
from rankmesh.guard.guard import Guard
from rankmesh.guard.replicas import replica_kinds
from rankmesh.runtime.live import LiveGroups
from rankmesh.survival.agreement import Suspicion
from rankmesh.survival.state import EpochState
from rankmesh.transfer.live.shards import local

__all__ = ["Guarding", "are_equal", "check_copies", "replica_digests"]

_log = logging.getLogger("rankmesh.survival")

# What to do where copies differ at the beginning.
_SEED = "seed every rank equally, or say over which axes plain tensors are replicated, such as replicated='dp'"


def check_copies(groups: LiveGroups, tensors: Mapping[str, Tensor], shardings: dict[str, Sharding]) -> None:
    """Compare copies once. Raises ``PlanError``, on every rank, where they differ."""
    guard = Guard(groups, tensors, shardings)
    try:
        guard.check()
    except Diverged as error:
        raise PlanError(f"{error.message}: it is not a copy; {_SEED}", name=error.tensor) from error
    finally:
        guard.close()


def replica_digests(state: EpochState, step: int) -> dict[str, int]:
    """Return this rank's digest, in its snapshot of a step, of each set of replicas that it is in."""
    tensors, device = state.snapshots[step].tensors, torch.device("cpu")
    kinds = replica_kinds({name: one for name, one in state.shardings.items() if name not in state.local})
    places = ((kind, kind.slot(state.rank)) for kind in kinds)
    return {
        str(slot): int(combined(digests([tensors[name] for name in kind.names], device), device))
        for kind, slot in places
        if slot is not None
    }


def are_equal(found: Iterable[Mapping[str, int]]) -> bool:
    """Return whether all replicas are equal, by each rank's digests; not where a set has a single one left to compare.

    >>> are_equal([{"0": 7}, {"0": 7}, {}]), are_equal([{"0": 7}]), are_equal([{"0": 7}, {"0": 8}])
    (True, False, False)
    """
    by_set = grouped(item for of_rank in found for item in of_rank.items())
    return all(len(values) > 1 and len({*values}) == 1 for values in by_set.values())


class Guarding:
    """The guard of one epoch; ``suspicion`` is why its steps are repeated, None if they are not.

    ``found``    why the steps of the next epoch are
    ``failure``  why there is no next epoch
    ``faulty``   the ranks whose machines are at fault; ``verdict`` says why
    """

    def __init__(
        self,
        groups: LiveGroups,
        tensors: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        every: int,
        suspicion: Suspicion | None,
    ) -> None:
        self._guard = Guard(groups, tensors, shardings, every=every, action=self._note)
        self._groups, self._tensors = groups, tensors
        # What checks have found, with this rank's digests at them.
        self._errors: list[tuple[Diverged, Mapping[str, int]]] = []
        # When the checks since the last one that found all equal began, in nanoseconds, by step.
        self._began: dict[int, int] = {}
        self.suspicion = suspicion
        self.found: Suspicion | None = None
        self.failure: Diverged | None = None
        self.faulty: tuple[int, ...] = ()
        self.verdict = ""

    def _note(self, error: Diverged) -> None:
        self._errors.append((error, self._guard.digests))

    @property
    def equal_at(self) -> int | None:
        """The last commit at which all ranks were found equal."""
        return self._guard.equal_at

    @property
    def open(self) -> Suspicion | None:
        """The suspicion with which the next epoch goes on if this one ends now."""
        return self.found or self.suspicion

    def start(self, step: int) -> None:
        """Compare what is held at the beginning of an epoch. Sets ``failure``: there is nothing to go back to."""
        self._began[step] = time.time_ns()
        self._guard.check(step)
        for error, _ in self._errors[:1]:
            self.failure = error if step else Diverged(f"{error.message}; {_SEED}", **error.values)

    def close(self) -> None:
        """Destroy what the guard has made."""
        self._guard.close()

    def commit(self, step: int, *, last: bool = False) -> bool:
        """Look at the last check and begin another; at the ``last`` commit wait for its result. Whether the epoch ends.

        Sets ``found`` where all go back, ``failure`` for what the program did, and ``faulty`` where the repeated steps
        show it.
        """
        before, back = self.suspicion, self.equal_at or 0  # the beginning of the epoch, if nothing later
        self._began = {one: began for one, began in self._began.items() if one >= back} | {step: time.time_ns()}
        if last:
            self._guard.check(step)
        else:
            self._guard.step(step)
        if self._errors:
            error, digests = self._errors[0]
            what = error.step, error.tensor, tuple(error.ranks)
            suspicion = Suspicion(*what, back, error.tied, first=digests)
            if before is None:
                self.found = suspicion
            else:
                self.failure = Diverged(f"{error.message}; {self._again(error, before, suspicion)}", **error.values)
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

    def _again(self, error: Diverged, before: Suspicion, now: Suspicion) -> str:
        """Describe what is known of an error after the steps were repeated."""
        found = gathered(self._groups, [now.step == before.step and now.first == before.first, self._collective(error)])
        if (now.tensor, now.ranks) != (before.tensor, before.ranks):
            return f"before the steps were repeated, {quoted(before.tensor)} differed on {in_words(before.ranks)}"
        text = "it did so before the steps were repeated, too: the program does it"
        rank = now.ranks[0]
        if call := found[rank][1]:
            text += f"; the last collective of as many elements before it was {call} on rank {rank}"
        if all(same for same, _ in found.values()):
            return f"{text}; all numbers were the same both times, so `rankmesh compare` can look for the line"
        return f"{text}; its numbers were others than before, so `rankmesh compare` may not reproduce it"

    def _collective(self, error: Diverged) -> str:
        """Return this rank's last recorded call with as many elements as its tensor, in steps that differ, or ""."""
        if error.tensor not in self._tensors:
            return ""
        tensor, rank = local(self._tensors[error.tensor]), self._groups.rank
        size, dtype = tensor.numel(), str(tensor.dtype).removeprefix("torch.")
        try:
            kept = recording_of(Recorder().document("diverged", ended=True), rank)
        except RecordingError:  # a format of another torch
            return ""
        since, until = min(self._began.values()), self._began[error.step]
        for row in np.flatnonzero((since < kept.created) & (kept.created < until))[::-1].tolist():
            call = kept.signatures[kept.signature[row]]
            facts: dict[str, Any] = {"sizes": (), **call.signature}
            if size in facts["sizes"] and dtype in facts["dtypes"]:
                site = kept.sites[kept.site[row]] if kept.site[row] >= 0 else ""
                return f"{call} over {kept.groups[kept.group[row]].desc}{site and f' at {site}'}"
        return ""
