"""Ranks that are processes: started, waited for, ended, and their results in one report.

The processes are forked from multiprocessing's fork server, which loads torch once and has no threads; a fork of the
process that runs pytest would take along whatever its threads held at that moment.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankmesh.sim.run import cut_by
from rankmesh.testing.rank_process import (
    FunctionResult,
    PhaseReport,
    Place,
    TestResult,
    rank_function,
    rank_test,
)

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["run_function", "run_test"]

# Seconds for all to start, for the others to end once one has failed, and between two looks.
_START, _AFTER_FAILURE, _LOOK = 60.0, 5.0, 0.02
_SHOWN = 2000


def run_test(item: pytest.Function, size: int, backend: str, seconds: float) -> None:
    """Run one test with pytest on each rank; ``pytest.fail`` with the report of the ranks that failed."""
    __tracebackhide__ = True
    _check_devices(backend, size)
    with tempfile.TemporaryDirectory(prefix="rankmesh-test-") as folder:
        arguments = [*_arguments(item, folder), f"{item.path}::{item.nodeid.partition('::')[2]}"]
        left, logs = _run(rank_test, size, folder, backend, seconds, str(item.config.invocation_params.dir), arguments)
    results: dict[int, TestResult] = {rank: json.loads(data) for rank, data in left.items()}
    reports = {rank: _deciding(result["reports"]) for rank, result in results.items()}
    _check_skipped(size, {rank: result["failed_at"] for rank, result in results.items()}, reports)
    failed = {rank: report for rank, report in reports.items() if report["outcome"] == "failed"}
    if failed or len(results) < size:
        first = min(failed, key=lambda rank: results[rank]["failed_at"], default=None)
        lines = [] if first is None else [f"rank {first} of {size} failed ({backend}):", failed[first]["text"]]
        for rank in range(size):
            if rank not in results:
                lines.append(f"rank {rank} did not end within {seconds:g} s\n{logs[rank][-_SHOWN:]}")
            elif rank in failed and rank != first:
                lines.append(f"rank {rank} failed too: {failed[rank]['reason'].splitlines()[0]}")
        pytest.fail("\n".join(lines), pytrace=False)


def _check_skipped(size: int, ended: Mapping[int, float], reports: Mapping[int, PhaseReport]) -> None:
    """Skip where the first rank that did not pass was skipped; its effect on the other ranks is no failure."""
    __tracebackhide__ = True
    others = [rank for rank, report in reports.items() if report["outcome"] != "passed"]
    if len(reports) < size or not others:
        return
    first = min(others, key=lambda rank: ended[rank])
    everywhere = all(report["outcome"] == reports[first]["outcome"] for report in reports.values())
    reason = f"on {'every rank' if everywhere else f'rank {first}'}: {reports[first]['reason']}"
    if reports[first]["outcome"] == "skipped":
        pytest.skip(reason)
    if reports[first]["outcome"] == "xfailed":
        pytest.xfail(reason)


def _deciding(reports: Sequence[PhaseReport]) -> PhaseReport:
    """The report that decides how a test ended: the first that is not a pass."""
    why = "the rank found no test to run"
    nothing: PhaseReport = {"when": "setup", "outcome": "failed", "text": why, "reason": why}
    return next((report for report in reports if report["outcome"] != "passed"), reports[0] if reports else nothing)


def run_function(
    function: Callable[..., Any], spec: Any, args: Sequence[Any], backend: str, seconds: float
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
        left, logs = _run(rank_function, size, folder, backend, seconds, file, name, plan or size, tuple(args))
    # The pickles were written by processes that this one has started.
    results: dict[int, FunctionResult] = {rank: pickle.loads(data) for rank, data in left.items()}  # noqa: S301
    bad = [rank for rank in range(size) if "value" not in results.get(rank, {})]
    if bad:
        failed = {rank: results.get(rank, {"error": "did not end", "text": logs[rank][-_SHOWN:]}) for rank in bad}
        first = min(bad, key=lambda rank: failed[rank].get("failed_at", float("inf")))
        others = [f"rank {rank} failed too: {failed[rank]['error'].splitlines()[0]}" for rank in bad if rank != first]
        head = f"rank {first} of {size} failed ({backend}): {failed[first]['error']}"
        pytest.fail("\n".join([head, failed[first]["text"], *others]), pytrace=False)
    return [pickle.loads(results[rank]["value"]) for rank in range(size)]  # noqa: S301


def _check_devices(backend: str, size: int) -> None:
    if backend == "nccl":
        import torch

        from rankmesh.runtime.devices import ranks_share

        here = torch.cuda.device_count()
        if here < (1 if ranks_share() else size):
            pytest.skip(f"{size} ranks need {size} GPUs with nccl; {here} are here")


def _arguments(item: pytest.Function, folder: str) -> list[str]:
    """The command line of this run for one test: without its paths, its other workers, and what writes files."""
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
    target: Callable[..., None], size: int, folder: str, backend: str, seconds: float, *rest: Any
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Start a target on each rank, and wait: the result that each left, and its output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rankmesh.testing.rank_process", "pytest", "hypothesis"])
    places = [Place(rank, size, folder, backend, seconds) for rank in range(size)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    processes = [context.Process(target=target, args=(place, environment, *rest), daemon=True) for place in places]
    for process in processes:
        process.start()
    _wait(processes, places, seconds)
    left = {place.rank: place.file("result").read_bytes() for place in places if place.file("result").exists()}
    return left, {place.rank: _text(place.file("log")) for place in places}


def _wait(processes: Sequence[BaseProcess], places: Sequence[Place], seconds: float) -> None:
    """Wait until all have ended; kill those that do not end in time, which is short once one has failed."""
    end, failed = time.monotonic() + _START + seconds, False
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if not failed and any(_has_failed(process, place) for process, place in zip(processes, places, strict=True)):
            failed, end = True, min(end, time.monotonic() + _AFTER_FAILURE)
        time.sleep(_LOOK)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _has_failed(process: BaseProcess, place: Place) -> bool:
    """Whether a rank died without a result, or left one of a failure."""
    if not place.file("result").exists():
        return process.exitcode is not None
    return b'"failed"' in place.file("result").read_bytes()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
