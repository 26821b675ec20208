"""One rank that is a process: what it runs, and the result that it leaves.

```
environment     RANK, WORLD_SIZE, ... as torchrun sets them
rank_test       pytest for one test, in which the plugin finds this rank
rank_function   one function of a file
```
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from rankmesh.core.private import write_whole
from rankmesh.launch.local import output_to
from rankmesh.launch.table import torchrun_variables
from rankmesh.runtime.connect import connect
from rankmesh.sim.calls import users_trace
from rankmesh.sim.run import cut_by

if TYPE_CHECKING:
    import pytest

__all__ = ["Place", "RankTest", "Result", "current", "rank_function", "rank_test"]


class Result(TypedDict, total=False):
    """What one rank leaves: how it ended, why, when, the text of its report, and the pickled value of a function."""

    outcome: str
    reason: str
    text: str
    ended_at: float
    value: bytes


@dataclass(frozen=True)
class Place:
    """Where a rank is: its number, the size of the world, the folder that all share, and how long it may take."""

    rank: int
    size: int
    folder: str
    backend: str
    seconds: float

    def file(self, ending: str) -> Path:
        """Return a file of this rank."""
        return Path(self.folder) / f"{self.rank}.{ending}"


class RankTest:
    """The rank that this process is, while pytest runs its one test."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._worlds = 0
        self.failed_at = 0.0

    def run(self, test: Callable[..., None], spec: Any, wants_groups: bool) -> None:
        """Run the test on this rank, with a world for each call, as hypothesis makes many."""
        __tracebackhide__ = True
        self._worlds += 1
        with _world(self._place, str(self._worlds)):
            try:
                _call(test, spec if wants_groups else 1, ())
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


def _call(function: Callable[..., object], spec: Any, args: Sequence[object]) -> object:
    __tracebackhide__ = True
    plan = cut_by(spec)
    if plan is None:
        return function(*args)
    with connect(plan) as groups:
        return function(groups, *args)


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
    import pytest

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
    """Return how one rank ended. Whether a pass was expected is for the process that knows how all ranks ended."""
    if report.skipped and hasattr(report, "wasxfail"):
        return "xfailed"
    return "passed" if report.failed and str(report.longrepr).startswith("[XPASS(strict)]") else str(report.outcome)


def rank_function(
    place: Place, environment: Mapping[str, str], file: str, name: str, spec: Any, args: Sequence[object]
) -> None:
    """Call one function of a file on this rank, and leave its value or its error."""
    with _at(place, environment):
        result: Result = {}
        try:
            with _world(place, "1"):
                try:
                    result = {"outcome": "passed", "value": pickle.dumps(_call(_load(file, name), spec, args))}
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
