"""Guard: compares replicas at run time, and reports the first difference.

```
step 100      each rank makes one digest a set of replicas; one reduction over all ranks starts
step 101      its result is there, so nobody waits: equal, or Diverged on every rank
```

Values that a program names, for ``sum``, are compared in a second reduction, after the first has shown that all ranks
name the same values.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rankmesh.core.axes import integer
from rankmesh.core.sharding import Sharding
from rankmesh.core.strided import IntArray
from rankmesh.errors import Diverged, PlanError, in_words, quoted
from rankmesh.guard.digest import combined, digests
from rankmesh.guard.everyone import Everyone, gathered, results
from rankmesh.guard.explain import explained
from rankmesh.guard.model_state import CurrentTensors, model_state
from rankmesh.guard.replicas import ReplicaKind, kinds_of, replica_kinds
from rankmesh.runtime.live import LiveGroups
from rankmesh.transfer.live.shards import local, problem_of, shards_of

__all__ = ["Guard"]

Action = Literal["raise", "warn"] | Callable[[Diverged], object]

_log = logging.getLogger("rankmesh.guard")


@dataclass
class _Values:
    """The arguments of ``sum`` and ``finite`` in one step, by name: axes and value; the origin of a value.

    The origin is 0 for a finite value; for another one 1, or, where this rank's input is known, 2 if that is finite, 3
    if it is not.
    """

    sums: dict[str, tuple[str, Tensor | None]] = field(default_factory=dict)
    origins: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[list[str]]:
        """The sums with their axes, alike on ranks that named the same in whatever order."""
        return sorted([name, axes] for name, (axes, _) in self.sums.items())

    def digests(self, rank: int, device: torch.device) -> list[Tensor]:
        """Two digests that are equal on all ranks and to each other if ranks named the same and all is finite."""
        names = torch.tensor(int.from_bytes(sha256(repr(self.names).encode()).digest()[:7], "big"), device=device)
        finite = [origin.to(device) == 0 for origin in self.origins.values()]
        return [names, names + (~torch.stack(finite).all() * (1 + rank) if finite else 0)]


@dataclass(frozen=True)
class _Comparison:
    """A comparison under way: its step, tensors by kind, this rank's digests by number of the kind, and the result.

    ``values`` are the step's values, which the last slot compares.
    """

    step: int
    tensors: Mapping[str, Tensor]
    kinds: Sequence[ReplicaKind]
    digests: Mapping[int, Tensor]
    differ: Callable[[], list[int]]
    values: _Values


class Guard:
    """Compares replicas of tensors, and reduced values, between the ranks that must hold equal ones.

    ``tensors`` has this rank's shards by name. ``shardings`` has the sharding of every tensor of the job and is equal
    on every rank: ranks with the same shard are replicas. Every rank of ``groups.plan`` creates a guard and calls
    ``step`` in each step, which compares every ``every`` steps. ``action="raise"`` raises ``Diverged`` on every rank,
    ``"warn"`` logs it, and a function as ``action`` receives it and may raise.

    Raises ``PlanError`` for a tensor that is missing or does not have the shape and dtype of its shard.

    >>> import rankmesh as rm
    >>> from rankmesh import sim
    >>> def train(groups):
    ...     weight = torch.ones(4)
    ...     guard = rm.Guard(groups, {"w": weight}, {"w": rm.Sharding(groups.plan.mesh, shape=(4,))})
    ...     if groups.rank == 2:
    ...         weight[3] = 5
    ...     try:
    ...         guard.check()
    ...     except rm.Diverged as error:
    ...         return error.tensor, error.ranks, error.box, error.expected, error.got
    >>> sim.run(train, "dp=3")[0]
    ('w', (2,), ((3, 4),), 1.0, 5.0)
    """

    def __init__(
        self,
        groups: LiveGroups,
        tensors: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        *,
        every: int = 100,
        action: Action = "raise",
    ) -> None:
        results(groups, lambda: _check(groups, tensors, shardings, every, action), "Guard()")
        self._every, self._action = int(every), action
        self._groups, self._tensors, self._shardings = groups, tensors, shardings
        local = tensors.local if isinstance(tensors, CurrentTensors) else ()
        self._kinds = replica_kinds({name: one for name, one in shardings.items() if name not in local})
        self._everyone = Everyone(groups)
        self._equal_at: int | None = None
        self._digests: Mapping[int, Tensor] = {}
        self._values, self._step = _Values(), 0
        self._pending: deque[_Comparison] = deque()
        # By kind, of tensors or of sums, the last step at which each set was equal; -1 for none.
        self._since: dict[tuple[object, ...], IntArray] = {}

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        groups: LiveGroups,
        *,
        replicated: str | None = None,
        every: int = 100,
        action: Action = "raise",
    ) -> Guard:
        """Return a guard of a model's parameters and persistent buffers, and of its optimizer's state.

        A DTensor has its sharding. Plain tensors are compared over the axes ``replicated`` (``"dp-cp"``), by default
        over all. What BatchNorm has seen is not compared: only ``SyncBatchNorm`` keeps it equal. An optimizer that has
        no state yet creates it here, for each parameter that requires a gradient, even if it never gets one; no hook of
        its ``step`` runs. Every rank of the plan calls this with its own part of the model.
        """
        return cls(groups, *model_state(model, optimizer, groups, replicated), every=every, action=action)

    @property
    def equal_at(self) -> int | None:
        """The last step at which all tensors were found equal; None if there was none."""
        return self._equal_at

    @property
    def digests(self) -> dict[str, int]:
        """The digest of each compared tensor of this rank, by name, at the last check whose result is known."""
        return {
            name: value
            for number, values in self._digests.items()
            for name, value in zip(self._kinds[number].names, values.tolist(), strict=True)
        }

    # -- what a program calls -----------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Read the result of the last check, and start a check every ``every`` steps.

        Raises ``Diverged`` if the last check found a difference. Every rank calls it with the same step.
        """
        values, self._values, self._step = self._values, _Values(), step
        for _ in range(len(self._pending)):
            self._look()
        if step % self._every == 0:
            self._begin(step, self._kinds, self._tensors, values)

    def check(self, step: int | None = None) -> None:
        """Compare now, and wait for the result; every rank calls it. ``step`` is by default the last one."""
        values, self._values = self._values, _Values()
        self._step = self._step if step is None else step
        self._begin(self._step, self._kinds, self._tensors, values)
        while self._pending:
            self._look()

    def sum(self, name: str, value: float | Tensor | None, over: str) -> None:
        """Check that a value, which the program has reduced over these axes (``"dp-cp"``), is equal on their ranks.

        Every rank of the plan calls it before ``step``, with None if the rank does not have the value.
        """
        self._groups.plan.mesh.groups(over)  # raises for axes that the mesh does not have
        given = _tensor(value)
        if given is not None and given.numel() != 1:
            raise PlanError(f"guard.sum({name!r}) was given {list(given.shape)} numbers; give one", name=name)
        self._values.sums[name] = over, None if given is None else given.double().clone()

    def finite(self, name: str, value: Tensor | float | None, given: Tensor | float | None = None) -> None:
        """Check that a value contains neither NaN nor Inf; ``given`` is what this rank put in before it was reduced.

        If a value is not finite, the error names the ranks whose ``given`` is not finite; if there are none, the ranks
        that have such a value. A rank without a value passes None, or does not call it.
        """
        here, before = _tensor(value), _tensor(given)
        if here is not None:
            bad = (~torch.isfinite(here).all()).long()
            self._values.origins[name] = bad if before is None else bad * (2 + (~torch.isfinite(before).all()).long())

    def close(self) -> None:
        """Destroy the guard's groups; results that were not read are dropped."""
        self._pending.clear()
        self._everyone.close()

    # -- a comparison -------------------------------------------------------------------------------------------

    def _begin(self, step: int, kinds: Sequence[ReplicaKind], tensors: Mapping[str, Tensor], values: _Values) -> None:
        rank, device, slots = self._groups.rank, self._everyone.device, []
        found: dict[int, Tensor] = {}
        for number, kind in enumerate(kinds):
            if (slot := kind.slot(rank)) is not None and kind.names[0] in tensors:
                slots.append(slot)
                found[number] = digests([local(tensors[name]) for name in kind.names], device)
        last = kinds[-1].slots.stop if kinds else 0
        given = [combined(one, device) for one in found.values()] + values.digests(rank, device)
        differ = self._everyone.compare(last + 1, [*slots, last, last], torch.stack(given))
        self._pending.append(_Comparison(step, tensors, kinds, found, differ, values))

    def _look(self) -> None:
        """Look at the oldest result."""
        if not self._pending:
            return
        one = self._pending.popleft()
        differ = one.differ()
        last = one.kinds[-1].slots.stop if one.kinds else 0
        if last in differ:
            differ.remove(last)
            self._look_at_values(one)
        if one.values.sums:
            self._begin_sums(one)
        if one.kinds is self._kinds:
            self._digests = one.digests
            self._equal_at = self._equal_at if differ else one.step
        since = self._since_of(one, differ)
        if differ:
            self._act(self._diverged(one, since))

    def _since_of(self, one: _Comparison, differ: Sequence[int]) -> dict[int, int | None]:
        """Return the last step at which the sets that differ were equal, by slot; the others are equal at this one."""
        found: dict[int, int | None] = {}
        for kind in one.kinds:
            key = one.kinds is self._kinds, kind.names, kind.sets.shape
            steps = self._since.setdefault(key, np.full(len(kind.sets), -1))
            places = [kind.slots.index(slot) for slot in differ if slot in kind.slots]
            before = steps[places]
            steps[:] = one.step
            steps[places] = before
            found |= {kind.slots[at]: None if step < 0 else int(step) for at, step in zip(places, before, strict=True)}
        return found

    def _diverged(self, one: _Comparison, since: Mapping[int, int | None]) -> Diverged:
        """Return the error of the largest set that differs, which shows the minority best; the sets by slot."""
        found = [(number, slot) for number, kind in enumerate(one.kinds) for slot in since if slot in kind.slots]
        number, slot = max(found, key=lambda each: (one.kinds[each[0]].sets.shape[1], -each[1]))
        kind = one.kinds[number]
        mine = one.digests.get(number) if self._groups.rank in kind.ranks(slot) else None
        shardings = self._shardings if one.kinds is self._kinds else {}
        return explained(self._everyone, one.tensors, shardings, kind.names, mine, one.step, since[slot])

    # -- values -------------------------------------------------------------------------------------------------

    def _begin_sums(self, one: _Comparison) -> None:
        sums = sorted(one.values.sums.items())
        kinds = kinds_of({(name,): self._groups.plan.mesh.groups(axes).array for name, (axes, _) in sums})
        tensors = {name: value for name, (_, value) in sums if value is not None}
        self._begin(one.step, kinds, tensors, _Values())

    def _look_at_values(self, one: _Comparison) -> None:
        """Ranks named other sums, or a value is not finite."""
        origins = {name: int(origin) for name, origin in one.values.origins.items()}
        by_rank = gathered(self._groups, [one.values.names, origins])
        first = min(by_rank)
        others = [rank for rank, (names, _) in by_rank.items() if names != by_rank[first][0]]
        if others:
            raise PlanError(
                f"guard.sum() named {_named(by_rank[others[0]][0])} on {in_words(others)} at step {one.step}, and "
                f"{_named(by_rank[first][0])} on rank {first}; name the same on every rank of the plan, with None "
                "where a rank has no value",
                ranks=tuple(others),
            )
        for name in sorted({name for _, found in by_rank.values() for name in found}):
            if bad := {rank: found[name] for rank, (_, found) in by_rank.items() if found.get(name)}:
                self._act(_not_finite(name, bad, one.step))

    def _act(self, error: Diverged) -> None:
        if callable(self._action):
            self._action(error)
        elif self._action == "raise":
            self._pending.clear()
            raise error
        elif self._groups.rank == self._groups.plan.mesh.rank_range.rank(0):
            _log.warning("rankmesh: %s", error)


def _check(
    groups: LiveGroups, tensors: Mapping[str, Tensor], shardings: Mapping[str, Sharding], every: int, action: Action
) -> None:
    if action not in ("raise", "warn") and not callable(action):
        raise PlanError(f"action must be 'raise', 'warn' or a function of the error, not {quoted(action)}")
    integer(every, "every", least=1)
    shards = shards_of(shardings, groups.rank)
    if problem := _problem(groups, tensors, shardings) or problem_of(tensors, shardings, shards, "tensor"):
        raise PlanError(f"rank {groups.rank}: Guard() was given a wrong shard: {problem}")


def _problem(groups: LiveGroups, tensors: Mapping[str, Tensor], shardings: Mapping[str, Sharding]) -> str:
    for name, sharding in shardings.items():
        if sharding.mesh != groups.plan.mesh:
            return f"the sharding of {name!r} is on {sharding.mesh}, not on the plan's mesh {groups.plan.mesh}"
    extra = sorted(set(tensors) - set(shardings))
    return f"tensor {extra[0]!r} has no sharding; give one" if extra else ""


def _tensor(value: Tensor | float | None) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value if value is None else local(value)
    return torch.tensor(float(value), dtype=torch.float64)


def _named(sums: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{name!r} over {axes}" for name, axes in sums) or "nothing"


def _not_finite(name: str, origins: Mapping[int, int], step: int) -> Diverged:
    """Return the error of a value that is not finite on these ranks, by its origin on each."""
    local = [rank for rank, origin in origins.items() if origin == 3]
    single = len(origins) == 1 and 2 in origins.values()
    if local:
        others = [rank for rank in origins if rank not in local]
        how = f"{in_words(local)} put it in" + (f", and it reached {in_words(others)}" if others else "")
    elif single:
        how = "it was made there, of finite input"
    elif set(origins.values()) == {2}:
        how = "each of them put a finite value in: it overflowed where these were combined"
    else:
        how = "to learn which rank it comes from, pass given=, what each rank has before values are reduced"
    return Diverged(
        f"{quoted(name)} has NaN or Inf on {in_words(origins)} at step {step}; {how}",
        tensor=name,
        ranks=tuple(local or origins),
        step=step,
        local=bool(local) or single,
    )
