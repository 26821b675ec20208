"""Run a function on many ranks inside this process.

>>> import torch, torch.distributed as dist
>>> def total():
...     number = torch.tensor(dist.get_rank())
...     dist.all_reduce(number)
...     return int(number)
>>> run(total, 4)
[6, 6, 6, 6]

With a plan, every rank gets its live groups first:

>>> def members(groups):
...     return groups["dp"].ranks
>>> run(members, "tp=2,dp=2")
[(0, 2), (1, 3), (0, 2), (1, 3)]
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch

from rankmesh.backend import torch_threads
from rankmesh.core.axes import integer
from rankmesh.core.grouped import grouped
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.source import read_plan
from rankmesh.errors import PlanError, first_line, in_words, quoted
from rankmesh.runtime.connect import connect
from rankmesh.sim.calls import raise_site
from rankmesh.sim.channel import Observer
from rankmesh.sim.failures import DivergenceError, HungRank, RanksFailed
from rankmesh.sim.process import Process
from rankmesh.sim.scheduler import Abandoned, Order
from rankmesh.sim.simulation import RankContext, Simulation
from rankmesh.sim.watchdog import hooks, watch

__all__ = ["LIMIT", "cut_by", "quiet_torch", "run", "with_groups"]

Ranks = int | str | Mesh | Plan

# 4,096 ranks that agree once take 13 s of processor time and 0.5 GB; 8,192 took 26 s and 0.9 GB.
LIMIT = 4096
# Failures that differ, in one message.
_SHOWN = 16


def run(
    function: Callable[..., object],
    ranks: Ranks,
    *args: object,
    order: Order = "deterministic",
    timeout: float = 10.0,
    seed: int = 0,
    modules: Iterable[str | ModuleType] = (),
    ranks_per_node: int | None = None,
    backend: str = "gloo",
    initialise: bool = True,
    return_exceptions: bool = False,
    observer: Observer | None = None,
    lose: Mapping[int, int] | None = None,
) -> list[Any]:
    """Call ``function`` on every rank of a simulated world, and return what each returned, by rank.

    Args:
        function: the program of one rank.
        ranks: the size of the world, or a plan, a mesh, or a SPEC such as ``"tp=2,dp=2"``. With a plan the groups are
            connected, and ``function`` gets the rank's ``LiveGroups`` before ``args``.
        args: further arguments of ``function``, the same for every rank.
        order: ``"deterministic"`` (default), or a seed: then any rank may run next, at every call.
        timeout: seconds that one rank may run without a call that lets others run (default 10); not those in which it
            has no core, on a machine with other work.
        seed: the seed of torch, random and numpy, whose generators are each rank's own (default 0).
        modules: modules, or their names, whose globals are each rank's own (default none).
        ranks_per_node: sets LOCAL_RANK and LOCAL_WORLD_SIZE. Default None: all ranks are on one node.
        backend: the name that ``torch.distributed.get_backend()`` returns (default gloo).
        initialise: False if ``function`` calls ``init_process_group`` itself, with any backend (default True).
        return_exceptions: True: the list has an error in place of its rank's value (default False).
        observer: sees every collective, also in groups of one rank, and may change it (``sim.channel.Observer``).
        lose: ranks that end as if their processes were killed in a job that goes on (``rm.survive``), each with the
            step whose ``commit`` it does not survive. Ranks with the same step end at once, a spare when any rank
            commits that step. The result of a lost rank is None.

    Raises ``RanksFailed``, whose cause is the first failure. Ranks that cannot go on get a ``DivergenceError``.
    """
    __tracebackhide__ = True  # in a report of pytest: the failure of the rank has its place
    plan = cut_by(ranks)
    size = integer(ranks, "ranks", least=1) if plan is None else plan.world_size
    if size > LIMIT:
        raise PlanError(
            f"{size} ranks are more than the {LIMIT} that can be simulated, each a thread of half a megabyte; simulate "
            "a smaller world of the same axes, or one rank of this one, dry: init_process_group with the backend "
            "'fake', then connect",
            ranks=size,
            limit=LIMIT,
        )
    per_node = size if ranks_per_node is None else integer(ranks_per_node, "ranks_per_node", least=1)
    losses = _losses(lose or {}, size)
    process = Process(size, seed, per_node, modules)
    simulation = Simulation(size, order, backend, process, observer)
    simulation.lose.update(losses)
    threads_before = torch.get_num_threads()

    def program() -> object:
        if initialise:
            torch_threads.begin_world(size, backend, simulation.store)
        return with_groups(plan, function, args)

    with hooks.in_use(), torch_threads.registries_by_thread(), process.adopting_imports():
        try:
            watch(simulation, [_thread(simulation, rank, program) for rank in range(size)], timeout)
        finally:
            torch.set_num_threads(threads_before)
    for rank, error in simulation.left_over().items():
        simulation.failures.setdefault(rank, error)
    if not simulation.failures and simulation.lose:
        raise _not_lost(simulation.lose)
    if return_exceptions:
        return [simulation.failures.get(rank, simulation.values.get(rank)) for rank in range(size)]
    if simulation.failures:
        raise _failed(simulation)
    return [simulation.values[rank] for rank in range(size)]


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's own log, in which it repeats each error of a collective."""
    logger = logging.getLogger("c10d-NullHandler-default")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)


def _losses(lose: Mapping[int, int], size: int) -> dict[int, int]:
    """Return which rank is lost at which step."""
    found = {integer(rank, "rank of lose", least=0): integer(step, "step", least=0) for rank, step in lose.items()}
    if found and max(found) >= size:
        raise PlanError(
            f"lose names rank {max(found)}, and {size} ranks are simulated, 0 to {size - 1}; give one of these",
            rank=max(found),
            ranks=size,
        )
    return found


def _not_lost(lose: Mapping[int, int]) -> PlanError:
    rank, step = next(iter(lose.items()))
    return PlanError(
        f"lose={{{rank}: {step}}}: the job ended before rank {rank} was lost, since nobody committed step {step}; give "
        "a step that job.commit() is called with, in rm.survive()",
        rank=rank,
        step=step,
    )


def cut_by(ranks: Ranks) -> Plan | None:
    """Return the plan that these ranks are cut by; None for a plain number of them."""
    if isinstance(ranks, Plan | Mesh | str):
        return read_plan(ranks)
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise PlanError(f"{quoted(ranks)} is not a number of ranks; give one, a SPEC, a Mesh or a Plan", received=ranks)
    return None


def with_groups(plan: Plan | None, function: Callable[..., object], args: Sequence[object]) -> object:
    """Call a function on this rank, before its arguments with the live groups of a plan if there is one."""
    __tracebackhide__ = True
    if plan is None:
        return function(*args)
    with connect(plan) as groups:
        return function(groups, *args)


def _rank(simulation: Simulation, rank: int, program: Callable[[], object]) -> None:
    """Run one rank, from its start to its end, on a thread of its own."""
    context = RankContext(simulation, rank, torch_threads.RankWorld())
    context.enter()
    scheduler = simulation.scheduler
    try:
        scheduler.await_start(rank)
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)
        simulation.values[rank] = program()
        simulation.ends[rank] = "has returned"
    except Abandoned:
        simulation.ends[rank] = "was lost" if rank in scheduler.lost else "was given up"
    except BaseException as error:  # noqa: BLE001  - whatever it was, the caller gets it
        simulation.failures[rank] = error
        simulation.ends[rank] = f"has raised {_sentence(error)}"
    finally:
        if rank in scheduler.lost:  # what its program did of it is nobody's
            simulation.failures.pop(rank, None)
            simulation.values[rank] = None
        torch_threads.end_world(context.world)
        scheduler.end(rank)


def _thread(simulation: Simulation, rank: int, program: Callable[[], object]) -> threading.Thread:
    def body() -> None:
        with suppress(Abandoned):  # raised once more while the rank was ending
            _rank(simulation, rank, program)

    return threading.Thread(target=body, name=f"rank {rank}", daemon=True)


def _sentence(error: BaseException) -> str:
    kind, first, site = type(error).__name__, first_line(error), raise_site(error)
    return (kind if first == kind else f"{kind}: {first}") + (f", at {site}" if site else "")


def _failed(simulation: Simulation) -> RanksFailed:
    """Return one error for all ranks: what failed first in full, then a line for each other failure."""
    failures = simulation.failures
    by_failure = grouped(
        ((type(error), str(error).removeprefix(f"rank {rank}: ")), rank) for rank, error in failures.items()
    )
    (kind, text), first = next(iter(by_failure.items()))
    cause = failures[min(first)]
    site = raise_site(cause)
    where = "" if site is None or isinstance(cause, DivergenceError | HungRank) else f"\n  at {site}"
    lines = [f"{in_words(first)} of {simulation.size} failed: {kind.__name__}: {text}{where}"]
    for (kind, _), ranks in [*by_failure.items()][1:_SHOWN]:
        follows = issubclass(kind, DivergenceError | HungRank)
        lines.append(f"then {in_words(ranks)}: {kind.__name__ if follows else _sentence(failures[ranks[0]])}")
    error = RanksFailed("\n".join(lines), failures=dict(failures), returned=dict(simulation.values))
    error.__cause__ = cause
    return error
