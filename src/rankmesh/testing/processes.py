"""Ranks that are processes: started, waited for, ended, and their results in one report.

The processes are forked from multiprocessing's fork server, which loads torch once and has no threads; a fork of the
process that runs pytest would take along whatever its threads held at that moment.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from rankmesh.launch.local import wait
from rankmesh.sim.run import cut_by
from rankmesh.testing.rank_process import Place, Result, rank_function, rank_test

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["run_function", "run_test"]

# Seconds for all to start, and for the others to end once one has failed.
_START, _AFTER_FAILURE = 60.0, 5.0
_SHOWN = 2000


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
        results = _run(rank_function, size, folder, backend, seconds, file, name, plan or size, tuple(args))
    _check_failed(results, backend)
    return [pickle.loads(results[rank]["value"]) for rank in range(size)]  # noqa: S301


def _check_devices(backend: str, size: int) -> None:
    if backend == "nccl":
        import torch

        from rankmesh.runtime.devices import ranks_share

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
    context.set_forkserver_preload(["rankmesh.testing.rank_process", "pytest", "hypothesis"])
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
    """Return what a rank left, None so far; processes that this one has started wrote the pickle."""
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
