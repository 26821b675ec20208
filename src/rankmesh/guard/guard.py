"""Guard: compares at run time what ranks must hold alike, and says where it differs first.

```
step 100      each rank makes one digest a set of replicas; one reduction over all ranks starts
step 101      its result is there, so nobody waits: equal, or Diverged on every rank
```

One slot a set has the least digest in it, another the least complement: they fit together if all digests are equal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor

from rankmesh.core.axes import integer
from rankmesh.core.sharding import Sharding
from rankmesh.errors import Diverged, PlanError, quoted
from rankmesh.guard.digest import combined, digests
from rankmesh.guard.everyone import NOTHING, Everyone, Reduced
from rankmesh.guard.explain import Difference, explained, minority
from rankmesh.guard.model_state import model_state
from rankmesh.guard.replicas import group_of, replica_kinds
from rankmesh.runtime.live import LiveGroups
from rankmesh.transfer.live.shards import local, problem_of, shards_of

__all__ = ["Guard", "guard_among"]

Action = Literal["raise", "warn"] | Callable[[Diverged], object]

_log = logging.getLogger("rankmesh.guard")


@dataclass
class _Values:
    """What ``sum`` and ``finite`` were given in one step, by name: axes and value; the origin of a value.

    The origin is 0 for a finite value, 1 for one that was made on this rank, 2 for one that arrived.
    """

    sums: dict[str, tuple[str, Tensor | None]] = field(default_factory=dict)
    finite: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """Equal on ranks that gave the same names, in whatever order."""
        names = sorted([(name, axes) for name, (axes, _) in self.sums.items()]) + sorted(self.finite)
        return int.from_bytes(sha256(repr(names).encode()).digest()[:7], "big")


@dataclass
class _Check:
    """A check under way: its step, what this rank compares, and the reduction."""

    step: int
    digests: Mapping[int, Tensor]
    values: _Values
    reduced: Reduced


@dataclass
class _ValueCheck:
    """A check of the values of a step, whose names are known to be the same on every rank."""

    step: int
    values: _Values
    reduced: Reduced


class Guard:
    """Notices that ranks which must hold the same hold something else: replicas, and values that are reduced.

    ``tensors`` are this rank's shards by name and ``shardings`` those of all tensors of the job, alike on every rank,
    as ``job.hold`` takes them; shardings say which ranks hold the same. Every rank of ``groups.plan`` makes one, and
    calls ``step`` in each step; every ``every`` steps that compares. ``action``: ``"raise"`` raises ``Diverged`` on
    every rank, ``"warn"`` logs it, and a callable gets it and decides by what it raises.

    Raises ``PlanError`` for a tensor that is missing or has not the shape and dtype of its shard.

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
        self._start(groups, tensors, shardings, every, action, None)

    def _start(
        self,
        groups: LiveGroups,
        tensors: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        every: int,
        action: Action,
        everyone: Everyone | None,
    ) -> None:
        if action not in ("raise", "warn") and not callable(action):
            raise PlanError(f"action={quoted(action)} is none; give 'raise', 'warn', or a function of the error")
        self._every, self._action = integer(every, "every", least=1), action
        self._plan, self._rank = groups.plan, groups.rank
        shards = shards_of(shardings, self._rank)
        if problem := _problem(groups, tensors, shardings) or problem_of(tensors, shardings, shards, "tensor"):
            raise PlanError(f"rank {self._rank}: Guard() was given a wrong shard: {problem}")
        self._tensors, self._shardings = tensors, shardings
        self._kinds = replica_kinds(shardings)
        self._size = sum(kind.count for kind in self._kinds)
        slots = [kind.slot(self._rank) for kind in self._kinds]
        # The kinds of which this rank holds something, each with the slot of its set.
        self._mine = {number: slot for number, slot in enumerate(slots) if slot is not None}
        self._everyone = Everyone(groups) if everyone is None else everyone
        self._equal_at: int | None = None
        self._digests: Mapping[int, Tensor] = {}
        self._values, self._step = _Values(), 0
        self._pending: deque[_Check | _ValueCheck] = deque()
        # By slot the last step at which all were equal.
        self._since: dict[int, int] = {}

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
        """A guard of the parameters and persistent buffers of a model, and of what its optimizer keeps.

        DTensors say how they are sharded. Plain tensors are replicated over the axes ``replicated`` (``"dp-cp"``), by
        default over all; along the other axes each is compared with nobody's. State that an optimizer makes at its
        first step is made now. Every rank of the plan calls it, each with its own part of the model.
        """
        everyone = Everyone(groups)
        tensors, shardings = model_state(model, optimizer, groups, everyone, replicated)
        return guard_among(everyone, groups, tensors, shardings, every=every, action=action)

    @property
    def equal_at(self) -> int | None:
        """The last step at which everything was found equal; None if there was none."""
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
        """The program has done a step: look at the last check, and begin one every ``every`` steps.

        Raises ``Diverged`` for what that check found. Every rank calls it with the same step.
        """
        for _ in range(len(self._pending)):
            self._look()
        self._step = step
        if step % self._every == 0:
            self._begin(step)
        self._values = _Values()

    def check(self, step: int | None = None) -> None:
        """Compare now, and wait for the result; every rank calls it. ``step`` is by default the last one."""
        self._step = self._step if step is None else step
        self._begin(self._step)
        self._values = _Values()
        while self._pending:
            self._look()

    def sum(self, name: str, value: float | Tensor | None, over: str) -> None:
        """The value is one that this rank believes to be reduced over these axes (``"dp-cp"``): equal on those ranks.

        Every rank of the plan names it before ``step``, with None where it has no value.
        """
        self._plan.mesh.groups(over)  # raises for axes that the mesh does not have
        given = _tensor(value)
        if given is not None and given.numel() != 1:
            raise PlanError(f"guard.sum({name!r}) was given {list(given.shape)} numbers; give one", name=name)
        self._values.sums[name] = over, None if given is None else given.double().clone()

    def finite(self, name: str, value: Tensor | float | None, given: Tensor | float | None = None) -> None:
        """The value has no NaN and no Inf; ``given`` is what it was computed of on this rank.

        Where it is not finite, the error names the lowest rank whose ``given`` was: there it was made. Elsewhere it
        arrived through a collective. Every rank of the plan names it before ``step``, with None where it has no value.
        """
        here, before = _tensor(value), _tensor(given)
        origin = None
        if here is not None:
            bad = ~torch.isfinite(here).all()
            arrived = torch.zeros_like(bad) if before is None else ~torch.isfinite(before).all()
            origin = bad.long() * (1 + arrived.long())
        self._values.finite[name] = origin

    def close(self) -> None:
        """Destroy what the guard has made; results that nobody has looked at are dropped."""
        self._pending.clear()
        self._everyone.close()

    # -- a check ------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        device, size = self._everyone.device, self._size
        of_kind = {
            number: digests([local(self._tensors[name]) for name in self._kinds[number].names], device)
            for number in self._mine
        }
        where = torch.tensor([*self._mine.values(), 2 * size], dtype=torch.int64)
        found = torch.stack(
            [combined(one, device) for one in of_kind.values()] + [torch.tensor(self._values.digest, device=device)]
        )
        where = torch.cat([where, where + torch.where(where == 2 * size, 1, size)])
        reduced = self._everyone.reduce(2 * size + 2, (where, torch.cat([found, ~found])))
        self._pending.append(_Check(step, of_kind, self._values, reduced))

    def _look(self) -> None:
        """Look at the oldest result."""
        if not self._pending:
            return
        check = self._pending.popleft()
        found = check.reduced.values()
        if isinstance(check, _ValueCheck):
            self._look_at_values(check, found)
            return
        size = self._size
        if found[2 * size] != ~found[2 * size + 1]:
            raise PlanError(
                f"guard.sum() or guard.finite() named other values on some ranks than on others at step {check.step}; "
                "name the same on every rank of the plan, with None where a rank has no value"
            )
        differ = [slot for slot in range(size) if found[slot] != ~found[size + slot]]
        if check.values.sums or check.values.finite:
            self._begin_values(check)
        self._digests = check.digests
        if not differ:
            self._equal_at = check.step
        since = {slot: self._since.get(slot) for slot in differ}
        self._since |= dict.fromkeys(set(range(size)).difference(differ), check.step)
        if differ:
            self._act(self._diverged(check, since))

    def _diverged(self, check: _Check, since: Mapping[int, int | None]) -> Diverged:
        """The error of the largest set that differs, which tells best who is in the minority; the sets by slot."""
        found = [(self._kind_of(slot), slot) for slot in since]
        number, slot = max(found, key=lambda one: (len(self._kinds[one[0]].ranks(one[1])), -one[1]))
        kind = self._kinds[number]
        ranks = kind.ranks(slot)
        mine = check.digests[number] if self._rank in ranks else None
        difference = explained(self._everyone, self._tensors, self._shardings, kind.names, ranks, mine)
        return _error(difference, group_of(self._plan, ranks), check.step, since[slot])

    def _kind_of(self, slot: int) -> int:
        return next(number for number, kind in enumerate(self._kinds) if slot < kind.offset + kind.count)

    # -- values -------------------------------------------------------------------------------------------------

    def _begin_values(self, check: _Check) -> None:
        given: dict[int, int] = {}
        size = 0
        for _, (axes, value) in sorted(check.values.sums.items()):
            groups = self._plan.mesh.groups(axes)
            if value is not None:
                bits = _bits(value)
                slot = size + 2 * groups.index_of(self._rank)
                given |= {slot: bits, slot + 1: ~bits}
            size += 2 * len(groups)
        for _, origin in sorted(check.values.finite.items()):
            if origin is not None and int(origin):
                given[size + int(origin) - 1] = self._rank
            size += 2
        self._pending.append(_ValueCheck(check.step, check.values, self._everyone.reduce(size, given)))

    def _look_at_values(self, check: _ValueCheck, found: list[int]) -> None:
        size = 0
        for name, (axes, value) in sorted(check.values.sums.items()):
            groups = self._plan.mesh.groups(axes)
            for number in range(len(groups)):
                low, high = found[size + 2 * number : size + 2 * number + 2]
                if low != NOTHING and low != ~high:
                    self._act(self._sum_differs(name, value, check.step, tuple(groups[number])))
            size += 2 * len(groups)
        for name in sorted(check.values.finite):
            made, arrived = found[size : size + 2]
            if made != NOTHING or arrived != NOTHING:
                self._act(_not_finite(name, made, arrived, check.step))
            size += 2

    def _sum_differs(self, name: str, value: Tensor | None, step: int, ranks: tuple[int, ...]) -> Diverged:
        given = self._everyone.gather(ranks, None if value is None else _bits(value))
        values = {rank: one for rank, one in zip(ranks, given, strict=True) if one != NOTHING}
        odd, right, wrong = minority(values)
        found = Difference(name, odd, None, 0, _double(values[right]), _double(values[wrong]), tied=right in odd)
        return _error(found, group_of(self._plan, ranks), step, None)

    def _act(self, error: Diverged) -> None:
        if callable(self._action):
            self._action(error)
        elif self._action == "raise":
            self._pending.clear()
            raise error
        elif self._rank == self._plan.mesh.rank_range.rank(0):
            _log.warning("rankmesh: %s", error)


def guard_among(
    everyone: Everyone,
    groups: LiveGroups,
    tensors: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    *,
    every: int = 1,
    action: Action = "raise",
) -> Guard:
    """Return a guard that reduces over a process group that exists."""
    guard = Guard.__new__(Guard)
    guard._start(groups, tensors, shardings, every, action, everyone)
    return guard


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


def _bits(value: Tensor) -> int:
    return int(value.cpu().reshape(1).view(torch.int64))


def _double(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64))


def _not_finite(name: str, made: int, arrived: int, step: int) -> Diverged:
    rank = made if made != NOTHING else arrived
    how = "it was made there" if made != NOTHING else "it arrived through a collective on every rank that has it"
    return Diverged(
        f"{quoted(name)} has NaN or Inf on rank {rank} at step {step}; {how}",
        tensor=name,
        ranks=(rank,),
        step=step,
        local=made != NOTHING,
    )


def _error(found: Difference, group: str, step: int, since: int | None) -> Diverged:
    return Diverged(
        found.sentence(group, step, since),
        step=step,
        since=since,
        tensor=found.name,
        ranks=found.ranks,
        group=group,
        box=found.box,
        count=found.count,
        expected=found.expected,
        got=found.got,
        tied=found.tied,
    )
