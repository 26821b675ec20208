"""Compare: one program under many layouts, against the same program on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock
from types import ModuleType

import torch

from rankmesh.errors import LayoutError, first_line, quoted
from rankmesh.runtime.live import LiveGroups
from rankmesh.sim.comparison.blame import find
from rankmesh.sim.comparison.layouts import Layout, LayoutLike, layouts_of, reference_of
from rankmesh.sim.comparison.result import Comparison
from rankmesh.sim.comparison.runner import Runner
from rankmesh.sim.comparison.session import Reference, Session
from rankmesh.sim.failures import DivergenceError, HungRank, RanksFailed

__all__ = ["compare"]

# Held while a comparison runs: torch's default dtype and its recording of backward passes are the process's.
_RUNNING = Lock()
# Kinds of divergence that a call on another group, or to another rank, may repair.
_DIVERGED = ("deadlock", "unmatched", "mismatch")


def compare(
    program: Callable[[LiveGroups], object],
    layouts: Iterable[LayoutLike],
    tolerance: float = 1e-6,
    *,
    seconds: float = 60.0,
    timeout: float = 30.0,
    seed: int = 0,
    modules: Iterable[str | ModuleType] = (),
) -> Comparison:
    """Run a program under every layout and compare what it sees with a run on one process.

    Args:
        program: SPMD code, called as ``program(groups)`` on every simulated rank, which calls ``sim.see``.
        layouts: SPECs, meshes or plans with the same kinds of group. An axis that a SPEC or a mesh lacks has size 1.
        tolerance: the largest difference, in units of a value's largest element (default 1e-6). Noisier values may
            differ by more, which the report states.
        seconds: for how long repairs are tried (default 60).
        timeout: seconds that one rank may run without a call that lets others run (default 30).
        seed: the seed of torch, random and numpy (default 0).
        modules: modules, or their names, whose globals are each rank's own (default none).

    torch's default dtype is float64 in the program where it runs with that, else what it is outside. Raises
    ``LayoutError`` for layouts that do not go together and for a program that sees nothing, ``RanksFailed`` where the
    program fails under a layout, and no change of a call repairs that.

    >>> import torch, torch.distributed as dist
    >>> from rankmesh import sim
    >>> def program(groups):
    ...     x = sim.random(groups, "x", (8, 4), ("dp", None))
    ...     total = x.sum()
    ...     dist.all_reduce(total, group=groups["tp"].pg)
    ...     sim.see("total", total)
    >>> result = compare(program, ["tp=2", "dp=2", "tp=2,dp=2"])
    >>> result.same, result.first.operation, result.first.group, result.first.repair
    (False, 'all-reduce', 'tp', ('group', 'dp'))
    """
    chosen = layouts_of(layouts)
    if not callable(program):
        raise LayoutError(f"{quoted(program)} is not a program; give a function that takes the groups of its rank")
    if not tolerance >= 0.0:
        raise LayoutError(f"tolerance is {quoted(tolerance)}; give a number from 0 on, such as 1e-6")
    options = {"timeout": timeout, "seed": seed, "modules": tuple(modules)}
    if not _RUNNING.acquire(blocking=False):
        raise LayoutError("another comparison runs in this process; wait for it, or compare in another process")
    try:
        runner = Runner(program, reference_of(chosen[0]), torch.float64, options)
        runner, reference, refused = _reference(runner, tolerance)
        sessions = {layout: Session(layout, reference) for layout in chosen}
        for session in sessions.values():
            _run(runner, session)
        return replace(_result(runner, reference, sessions, seconds), refused=refused)
    finally:
        _RUNNING.release()


def _reference(runner: Runner, tolerance: float) -> tuple[Runner, Reference, str]:
    """Return the values of one process, in float64 if the program runs with it as the default; else the reason."""
    refused = ""
    try:
        reference = runner.reference_values(tolerance)
    except RanksFailed as error:
        refused = first_line(next(iter(error.failures.values())))
        is_slow = any(isinstance(failure, HungRank) for failure in error.failures.values())
        if is_slow or torch.get_default_dtype() == runner.dtype:
            raise
        runner = Runner(runner.program, runner.reference, torch.get_default_dtype(), runner.options)
        reference = runner.reference_values(tolerance)
    if not reference.values:
        raise LayoutError("the program sees nothing on one process; call sim.see(name, tensor) in it")
    return runner, reference, refused


def _run(runner: Runner, session: Session) -> None:
    """Run the program; note the error if its ranks diverge, which a change of a call may repair."""
    try:
        runner.run(session)
    except RanksFailed as error:
        first = next(iter(error.failures.values()))
        if not isinstance(first, DivergenceError) or first.kind not in _DIVERGED:
            raise
        session.fail(error)


def _result(runner: Runner, reference: Reference, sessions: dict[Layout, Session], seconds: float) -> Comparison:
    failing = {layout: session for layout, session in sessions.items() if session.deviations}
    first = None
    if failing:
        firsts = {layout: min(session.deviations, key=reference.place) for layout, session in failing.items()}
        layout = min(failing, key=lambda one: (failing[one].failure is None, reference.place(firsts[one])))
        failure = failing[layout].failure
        difference = failing[layout].deviations[firsts[layout]]
        first = find(sessions, layout, difference, reference, runner, seconds)
        if failure is not None and first.repair is None:
            raise failure
        expected, got = _value(first.expected), _value(first.got)
        first = replace(first, expected=expected, got=got, failure="" if failure is None else failure.message)
    return Comparison(
        layouts=tuple(layout.name for layout in sessions),
        first=first,
        tolerance=reference.tolerance,
        dtype=str(runner.dtype).removeprefix("torch."),
        errors={layout.name: dict(session.worst) for layout, session in sessions.items()},
        differing={
            layout.name: list(dict.fromkeys(name for name, _ in session.deviations))
            for layout, session in sessions.items()
        },
        spread=reference.spread,
        raised=_raised(reference),
        others=sum(len(session.deviations) for session in failing.values()) - bool(failing),
    )


def _raised(reference: Reference) -> dict[str, float]:
    """Return the values whose noise allows more than the tolerance, in units of their largest element."""
    found: dict[str, float] = {}
    for (name, number), scale in reference.scales.items():
        allowed = reference.allowed((name, number))
        if scale.size and allowed > reference.tolerance * scale.size * 1.001:
            found[name] = max(found.get(name, 0.0), allowed / scale.size)
    return found


def _value(value: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Return a real tensor of one element as its number."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() else value
