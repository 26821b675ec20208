"""Ranks that are processes: started, waited for, ended, and their results in one report.

```
this process    run_test, run_function    starts the ranks, waits, and reports what they left
rank            rank_test                 pytest for one test, in which the plugin finds this rank
                rank_function             one function of a file; RANK, WORLD_SIZE, ... are set as torchrun sets them
```

The processes are forked from multiprocessing's fork server, which loads torch once and has no threads; a fork of the
process that runs pytest would take along whatever its threads held at that moment.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
import torch.distributed as dist

from rankmesh.core.plan import Plan
from rankmesh.core.private import write_whole
from rankmesh.launch.local import output_to, wait
from rankmesh.launch.table import torchrun_variables
from rankmesh.runtime.devices import ranks_share
from rankmesh.sim.calls import users_trace
from rankmesh.sim.run import Ranks, cut_by, with_groups

__all__ = ["RankTest", "current", "rank_function", "rank_test", "run_function", "run_test"]

# Seconds for all to start, and for the others to end once one has failed.
_START, _AFTER_FAILURE = 60.0, 5.0
_SHOWN = 2000


class Result(TypedDict, total=False):
    """Results of one rank: how it ended, why, when, the text of its report, and the pickled value of a function."""

    outcome: str
    reason: str
    text: str
    ended_at: float
    value: bytes


@dataclass(frozen=True)
class Place:
    """Place of a rank: its number, the size of the world, the folder that all share, and how long it may take."""

    rank: int
    size: int
    folder: str
    backend: str
    seconds: float

    def file(self, ending: str) -> Path:
        """Return a file of this rank."""
        return Path(self.folder) / f"{self.rank}.{ending}"


def run_test(item: pytest.Function, size: int, backend: str, seconds: float) -> None:
    """Run one test with pytest on each rank; ``pytest.fail`` with the report of the ranks that failed."""
    __tracebackhide__ = True
    _check_devices(backend, size)
    with tempfile.TemporaryDirectory(prefix="rankmesh-test-") as folder:
        arguments = [*_arguments(item, folder), f"{item.path}::{item.nodeid.partition('::')[2]}"]
        folder_of_run = str(item.config.invocation_params.dir)
        results = _run(rank_test, size, folder, backend, seconds, folder_of_run, arguments)
    _check_skipped(results)
    _check_failed(results, backend)


def _check_skipped(results: Mapping[int, Result]) -> None:
    """Skip where the first rank that did not pass was skipped; its effect on the other ranks is not a failure."""
    __tracebackhide__ = True
    others = [rank for rank, result in results.items() if result["outcome"] != "passed"]
    if not others or any(results[rank]["outcome"] == "lost" for rank in others):
        return
    first = min(others, key=lambda rank: results[rank]["ended_at"])
    everywhere = all(result["outcome"] == results[first]["outcome"] for result in results.values())
    reason = f"on {'every rank' if everywhere else f'rank {first}'}: {results[first]['reason']}"
    if results[first]["outcome"] == "skipped":
        pytest.skip(reason)
    if results[first]["outcome"] == "xfailed":
        pytest.xfail(reason)


def _check_failed(results: Mapping[int, Result], backend: str) -> None:
    """Fail with the report of the rank that failed first, and a line for each other one."""
    __tracebackhide__ = True
    failed = [rank for rank, result in results.items() if result["outcome"] in ("failed", "lost")]
    if failed:
        first = min(failed, key=lambda rank: results[rank]["ended_at"])
        head = f"rank {first} of {len(results)} failed ({backend}): {_reason(results[first])}"
        lines = [head, results[first]["text"]]
        for rank in failed:
            if rank != first:
                lines.append(f"rank {rank} failed too: {_reason(results[rank])}")
                lines += [results[rank]["text"]] if results[rank]["outcome"] == "lost" else []
        pytest.fail("\n".join(lines), pytrace=False)


def _reason(result: Result) -> str:
    return next(iter(result["reason"].splitlines()), "")


def run_function(
    function: Callable[..., object], spec: Any, args: Sequence[object], backend: str, seconds: float
) -> list[Any]:
    """Run a function on each rank; what each returned. It and its arguments must be reachable from another process."""
    __tracebackhide__ = True
    plan = cut_by(spec)
    size = spec if plan is None else plan.world_size
    _check_devices(backend, size)
    name = function.__qualname__
    if "<" in name:
        raise pytest.UsageError(
            f"{name} cannot run on processes, which find functions of a module only; "
            "move it to the top of its file, or run it on simulated ranks"
        )
    with tempfile.TemporaryDirectory(prefix="rankmesh-test-") as folder:
        file = inspect.getsourcefile(function)
        results = _run(rank_function, size, folder, backend, seconds, file, name, plan, tuple(args))
    _check_failed(results, backend)
    return [pickle.loads(results[rank]["value"]) for rank in range(size)]  # noqa: S301


def _check_devices(backend: str, size: int) -> None:
    if backend == "nccl":
        here = torch.cuda.device_count()
        if here < (1 if ranks_share() else size):
            pytest.skip(f"{size} ranks need {size} GPUs with nccl; {here} are here")


def _arguments(item: pytest.Function, folder: str) -> list[str]:
    """Return the command line of this run for one test: without its paths, its other workers, and what writes files."""
    config = item.config
    kept = [
        argument
        for argument in map(str, config.invocation_params.args)
        if argument not in config.args and not argument.startswith(("--junit", "--rankmesh", "--cov"))
    ]
    kept += [f"--rootdir={config.rootpath}", *(["-c", str(config.inipath)] if config.inipath else [])]
    kept += ["-o", f"cache_dir={folder}/cache"]
    has = config.pluginmanager.hasplugin
    kept += ["-n", "0"] if has("xdist") else []
    kept += ["--no-cov"] if has("_cov") else []
    # Ranks that look for examples must find the same ones.
    return kept + (["--hypothesis-seed=0"] if has("hypothesispytest") else [])


def _run(
    target: Callable[..., None], size: int, folder: str, backend: str, seconds: float, *rest: object
) -> dict[int, Result]:
    """Start a target on each rank, and wait: the result that each left; of one that left none the end of its output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rankmesh.testing.processes", "hypothesis"])
    places = [Place(rank, size, folder, backend, seconds) for rank in range(size)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    processes = [context.Process(target=target, args=(place, environment, *rest), daemon=True) for place in places]
    for process in processes:
        process.start()

    def seconds_left() -> float:
        return _AFTER_FAILURE if any(map(_has_failed, processes, places)) else inf

    wait(processes, seconds_left, _START + seconds)
    return {place.rank: _left(place) or _lost(place) for place in places}


def _left(place: Place) -> Result | None:
    """Read a rank's results, None if there are none yet; processes that this one has started wrote the pickle."""
    file = place.file("result")
    return pickle.loads(file.read_bytes()) if file.exists() else None  # noqa: S301


def _lost(place: Place) -> Result:
    """Return the result of a rank that left nothing: no other can have failed later."""
    log = place.file("log")
    text = log.read_text(encoding="utf-8", errors="replace")[-_SHOWN:] if log.exists() else ""
    return {"outcome": "lost", "reason": f"did not end within {place.seconds:g} s", "text": text, "ended_at": inf}


def _has_failed(process: BaseProcess, place: Place) -> bool:
    """Return whether a rank died without a result, or left one of a failure."""
    result = _left(place)
    return process.exitcode is not None if result is None else result["outcome"] == "failed"


# -- in a rank ------------------------------------------------------------------------------------------------------


class RankTest:
    """The rank that this process is, while pytest runs its one test."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._worlds = 0
        self.failed_at = 0.0

    def run(self, test: Callable[..., None], spec: Ranks, wants_groups: bool) -> None:
        """Run the test on this rank, with a world for each call, as hypothesis makes many."""
        __tracebackhide__ = True
        self._worlds += 1
        with _world(self._place, str(self._worlds)):
            try:
                with_groups(cut_by(spec) if wants_groups else None, test, ())
            except BaseException as error:  # noqa: BLE001  - raised again, its traceback shortened
                # Taken before the world is destroyed: the other ranks fail then.
                self.failed_at = self.failed_at or time.time()
                raise error.with_traceback(users_trace(error)) from None


_current: RankTest | None = None


def current() -> RankTest | None:
    """Return the rank that this process is; None in a process that is none."""
    return _current


@contextmanager
def _world(place: Place, name: str) -> Iterator[None]:
    if place.backend == "nccl":
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    store = dist.FileStore(str(Path(place.folder) / f"store-{name}"), place.size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=place.seconds)
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)
    try:
        yield
        dist.barrier()  # a rank that has left is an error for those that still communicate with it
    finally:
        dist.destroy_process_group()


@contextmanager
def _at(place: Place, environment: Mapping[str, str]) -> Iterator[None]:
    """Make this process a rank: set its variables, and write its output to a file."""
    os.environ.clear()
    values = torchrun_variables(place.rank, place.size, local_rank=place.rank, local_world_size=place.size)
    os.environ.update({**environment, **values})
    output_to(place.file("log"))
    torch.set_num_threads(1)
    yield
    sys.stdout.flush()
    sys.stderr.flush()


def rank_test(place: Place, environment: Mapping[str, str], folder: str, arguments: Sequence[str]) -> None:
    """Run one test with pytest on this rank, and leave its first report that is not a pass, else its first."""
    global _current

    class Listener:
        """Keeps what pytest reports."""

        def __init__(self) -> None:
            self.results: list[Result] = []

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
            text = report.longreprtext if report.failed else ""
            self.results.append({"outcome": _outcome(report), "reason": reason, "text": text})

    with _at(place, environment):
        os.chdir(folder)
        _current, listener = RankTest(place), Listener()
        pytest.main(list(arguments), plugins=[listener])
        why = "the rank found no test to run"
        results = listener.results or [{"outcome": "failed", "reason": why, "text": why}]
        result = next((each for each in results if each["outcome"] != "passed"), results[0])
        result["ended_at"] = _current.failed_at or time.time()
        write_whole(place.file("result"), pickle.dumps(result))


def _outcome(report: pytest.TestReport) -> str:
    """Return the end of one rank. The process that knows all ends decides whether a pass was expected."""
    if report.skipped and hasattr(report, "wasxfail"):
        return "xfailed"
    return "passed" if report.failed and str(report.longrepr).startswith("[XPASS(strict)]") else str(report.outcome)


def rank_function(
    place: Place, environment: Mapping[str, str], file: str, name: str, plan: Plan | None, args: Sequence[object]
) -> None:
    """Call one function of a file on this rank, and leave its value or its error."""
    with _at(place, environment):
        result: Result = {}
        try:
            with _world(place, "1"):
                try:
                    result = {"outcome": "passed", "value": pickle.dumps(with_groups(plan, _load(file, name), args))}
                except BaseException as error:
                    result = _failure(error)
                    raise
        except BaseException as error:  # noqa: BLE001  - whatever it was, the caller reports it
            result = result if result.get("outcome") == "failed" else _failure(error)
        write_whole(place.file("result"), pickle.dumps(result))


def _failure(error: BaseException) -> Result:
    """Return an error as text, and when it happened: the other ranks fail when the world of this rank is destroyed."""
    text = "".join(traceback.format_exception(type(error), error, users_trace(error)))
    reason = f"{type(error).__name__}: {error}"
    return {"outcome": "failed", "reason": reason, "text": text, "ended_at": time.time()}


def _load(file: str, name: str) -> Callable[..., object]:
    """Return a function of a file, which need not be a module that can be imported by name."""
    loaded = importlib.util.spec_from_file_location(f"rankmesh_test_{Path(file).stem}", file)
    if loaded is None or loaded.loader is None:
        raise ImportError(f"{file!r} is not a Python file; name one")
    module = importlib.util.module_from_spec(loaded)
    sys.modules[loaded.name] = module
    loaded.loader.exec_module(module)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]
