"""The pytest plugin: tests that run on every rank of a world.

```python
@pytest.mark.ranks("tp=2,dp=2")
def test_gradients(groups):                    # runs on each of 4 ranks, `groups` are that rank's LiveGroups
    ...

@pytest.mark.ranks(8, orders=10)               # a plain world; once in order, then nine times in random orders
def test_anything(tmp_path): ...

def test_values(ranks):                        # a function on ranks; what each returned
    assert ranks(work, 4) == [0, 1, 2, 3]

@pytest.mark.same_result(layouts=["tp=2", "dp=2", "tp=2,dp=2"])
def test_loss(groups):                         # sim.compare: what it sees is the same on one process and everywhere
    sim.see("loss", train(groups))
```

```
--rankmesh=sim     ranks are threads of this process (the default)
--rankmesh=gloo    ranks are processes on this machine
--rankmesh=nccl    ranks are processes with a GPU each; tests that need more GPUs than there are skip
```

A mark takes a number of ranks, a SPEC, a Mesh or a Plan, and options of ``rankmesh.sim.run`` (``order``, ``timeout``,
``modules``, ``seed``, ``ranks_per_node``), which processes do not need. Fixtures of a simulated test are made once and
shared by its ranks; with processes each rank makes its own.
"""

from __future__ import annotations

import inspect
import sys
import unittest
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from rankmesh.sim.run import Ranks
    from rankmesh.testing.processes import RankTest

__all__: list[str] = []

_Test = Callable[..., object]

MODES = ("sim", "gloo", "nccl")
_OPTIONS = frozenset({"order", "orders", "timeout", "modules", "seed", "ranks_per_node"})
_OF_COMPARISON = frozenset({"tolerance", "seconds", "timeout", "modules", "seed"})


class _NotOnRanks(AttributeError):
    """A use of a rank's groups outside ranks; hypothesis, which asks every value for hooks, sees none."""


class _PerRank:
    """Stands for the value of the fixture `groups`, which each rank replaces by its own."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotOnRanks(
            "the fixture 'groups' is used outside ranks; groups exist on ranks only; "
            "mark the test: @pytest.mark.ranks('tp=2,dp=2'), and use them in the test itself"
        )


_PER_RANK = _PerRank()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line."""
    group = parser.getgroup("rankmesh", "tests on ranks")
    group.addoption("--rankmesh", choices=MODES, default="sim", help="what ranks are: threads, or processes")
    group.addoption("--rankmesh-order", default=None, help="a seed: simulated ranks run in a random order")
    group.addoption(
        "--rankmesh-timeout", type=float, default=None, help="seconds: a simulated rank without progress (default 10), "
        "the ranks of one test as processes (default 60)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers ``ranks`` and ``same_result``."""
    config.addinivalue_line(
        "markers", "ranks(spec, order=, orders=, timeout=, modules=, seed=): run the test on every rank of a world"
    )
    config.addinivalue_line(
        "markers",
        "same_result(layouts, tolerance=, seconds=, timeout=, modules=, seed=): what the test sees by sim.see must be "
        "the same on one process and under each layout",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse marked tests that would pass without running on ranks, and `groups` without a layout."""
    mark, compared = item.get_closest_marker("ranks"), item.get_closest_marker("same_result")
    if mark is not None and compared is not None:
        raise pytest.UsageError(
            f"{item.nodeid} has the marks ranks and same_result; a comparison runs it on ranks itself: remove ranks"
        )
    mark = mark or compared
    without_layout = mark is None or (mark is not compared and mark.args and isinstance(mark.args[0], int))
    if "groups" in _plugin_fixtures(item) and without_layout:
        raise pytest.UsageError(
            "the fixture 'groups' needs a layout, since groups are cut from axes; "
            "mark the test with its layout: @pytest.mark.ranks('tp=2,dp=2')"
        )
    if mark is None:
        return
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        why = "unittest calls it itself; make it a function, or a method of a plain class"
    elif inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        why = "a coroutine is not awaited on a rank; make it a plain function that calls asyncio.run"
    else:
        return
    raise pytest.UsageError(f"@pytest.mark.{mark.name} cannot run {item.nodeid}: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a marked test on ranks."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("same_result") or pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return (yield)
    make = _on_ranks if mark.name == "ranks" else _compared
    # Of a test of hypothesis, each example runs on ranks, not the search for examples.
    hypothesis = getattr(pyfuncitem.obj, "hypothesis", None) if mark.name == "ranks" else None
    holder, name = (pyfuncitem, "obj") if hypothesis is None else (hypothesis, "inner_test")
    original = getattr(holder, name)
    setattr(holder, name, make(pyfuncitem, original, mark))
    try:
        return (yield)
    finally:
        setattr(holder, name, original)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Without pytest's line on hidden frames: the failure of the rank shows what it did."""
    report = yield
    marked = item.get_closest_marker("ranks") or item.get_closest_marker("same_result")
    if marked or "ranks" in getattr(item, "fixturenames", ()):
        for trace, *_ in getattr(report.longrepr, "chain", ()):
            trace.extraline = None
    return report


def _read(mark: pytest.Mark, known: frozenset[str], about: str, name: str = "") -> tuple[Any, dict[str, Any]]:
    """Return the subject of a mark, which may be given as the option ``name``, and its other options."""
    options = dict(mark.kwargs)
    given = [*mark.args, *([options.pop(name)] if name in options else [])]
    if len(given) != 1 or set(options) - known:
        raise pytest.UsageError(
            f"@pytest.mark.{mark.name}{mark.args} with the options {sorted(mark.kwargs)} cannot be read; it takes "
            f"{about}, and the options {', '.join(sorted(known))}"
        )
    return given[0], options


def _per_rank(test: _Test, args: tuple[object, ...], funcargs: dict[str, object]) -> Callable[..., None]:
    """Return a test as a function of its rank's groups."""
    wanted = [name for name, value in funcargs.items() if value is _PER_RANK]

    def on_rank(groups: object = None) -> None:
        __tracebackhide__ = True
        test(*args, **{**funcargs, **dict.fromkeys(wanted, groups)})

    return on_rank


def _on_ranks(item: pytest.Function, test: _Test, mark: pytest.Mark) -> Callable[..., None]:
    config, (spec, options) = item.config, _read(mark, _OPTIONS, "one number of ranks, SPEC, Mesh or Plan")

    @wraps(test)
    def run(*args: object, **funcargs: object) -> None:
        __tracebackhide__ = True
        wanted = any(value is _PER_RANK for value in funcargs.values())
        on_rank = _per_rank(test, args, funcargs)
        this = _this_rank()
        if this is not None:
            this.run(on_rank, spec, wanted)
        elif config.getoption("rankmesh") == "sim":
            _simulate(config, on_rank, spec if wanted else _size(spec), options)
        else:
            from rankmesh.testing.processes import run_test

            run_test(item, _size(spec), config.getoption("rankmesh"), _seconds(config, options, 60.0))

    return run


def _compared(item: pytest.Function, test: _Test, mark: pytest.Mark) -> Callable[..., None]:
    """Return a test that compares what it sees under its layouts with one process."""
    layouts, options = _read(mark, _OF_COMPARISON, "layouts=['tp=2', 'dp=2']", "layouts")

    @wraps(test)
    def run(*args: object, **funcargs: object) -> None:
        __tracebackhide__ = True
        from rankmesh import sim

        with _short_report("deterministic", item.config.getoption("fulltrace")):
            result = sim.compare(_per_rank(test, args, funcargs), layouts, **options)
        if not result.same:
            pytest.fail(result.report(), pytrace=False)

    return run


def _this_rank() -> RankTest | None:
    """Return the rank that this process is, of a test that another process has started."""
    module = sys.modules.get("rankmesh.testing.processes")
    return None if module is None else module.current()


def _size(spec: Any) -> int:
    from rankmesh.sim.run import cut_by

    plan = cut_by(spec)
    return int(spec) if plan is None else plan.world_size


def _seconds(config: pytest.Config, options: dict[str, Any], default: float) -> float:
    given = config.getoption("rankmesh_timeout")
    return float(options.get("timeout", default) if given is None else given)


def _simulate(
    config: pytest.Config, function: Callable[..., object], spec: Ranks, options: dict[str, Any], *args: object
) -> list[object]:
    """Run on simulated ranks, in one order or several; what each rank returned at last."""
    __tracebackhide__ = True
    from rankmesh import sim
    from rankmesh.sim.run import quiet_torch

    rest = {name: value for name, value in options.items() if name not in ("order", "orders", "timeout")}
    rest["timeout"] = _seconds(config, options, 10.0)
    for order in _orders(config, options):
        with quiet_torch(), _short_report(order, config.getoption("fulltrace")):
            values = sim.run(function, spec, *args, order=order, **rest)
    return values


@contextmanager
def _short_report(order: int | str, in_full: bool) -> Iterator[None]:
    """Make the report of a failure short: the user's lines on the rank that failed first, then a line for each rank."""
    __tracebackhide__ = True
    from rankmesh.sim import RanksFailed
    from rankmesh.sim.calls import users_trace

    try:
        yield
    except RanksFailed as failed:
        cause = failed.__cause__
        if isinstance(cause, pytest.skip.Exception | pytest.xfail.Exception | pytest.exit.Exception):
            raise cause from None
        if cause is not None and not in_full:
            cause.__traceback__ = users_trace(cause) or cause.__traceback__
        if order != "deterministic":
            # Not a note: Python 3.10 has none.
            failed.message += f"\nin the random order {order}: --rankmesh-order={order}"
        raise


def _orders(config: pytest.Config, options: dict[str, Any]) -> list[int | str]:
    given = config.getoption("rankmesh_order")
    if given is not None and given != "deterministic" and not given.isdecimal():
        raise pytest.UsageError(f"--rankmesh-order={given} is not an order; give a seed, or 'deterministic'")
    if given is not None:
        return [int(given) if given.isdecimal() else given]
    first = options.get("order", "deterministic")
    return [first, *range(1, options.get("orders", 1))]


def _plugin_fixtures(item: pytest.Item) -> set[str]:
    """Return the fixtures of a test that are this plugin's: another may have the same name in a project."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return {name for name, found in definitions.items() if found and found[-1].func.__module__ == __name__}


# Of the session, as what they give is the same for every test: a function's own would be refused with @given.
@pytest.fixture(scope="session")
def groups() -> _PerRank:
    """Return the live groups of the rank on which a test with ``@pytest.mark.ranks("tp=2,dp=2")`` runs."""
    return _PER_RANK


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Run a function on ranks: ``ranks(function, 4, *args)``, or with a layout, whose groups are its first argument."""
    config = request.config

    def run(function: Callable[..., object], spec: Ranks, *args: object, **options: Any) -> list[Any]:
        __tracebackhide__ = True
        mode = config.getoption("rankmesh")
        if mode == "sim":
            return _simulate(config, function, spec, options, *args)
        from rankmesh.testing.processes import run_function

        return run_function(function, spec, args, mode, _seconds(config, options, 60.0))

    return run
