"""``ranks`` runs a function of a test module on real processes, bounded from outside, leaving nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.limits import RESOLVER
from tests.sweeping import ALL

# How fast a machine is decides no test. What lands is tried on the same examples each time, what is written on others.
# A sweep of all (RANKMESH_TEST_SWEEP=all) draws more.
settings.register_profile(
    "rankmesh",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    max_examples=100 if ALL else 15,
)
settings.load_profile("rankmesh")

# No test compiles: importing megatron-core, which decorates functions with torch.compile, loads no compiler.
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
os.environ.update(NO_COMPILER)

# The stores of tests that run in this process ask for names, too.
for name, value in RESOLVER.items():
    os.environ.setdefault(name, value)

# Of import-linter, which `make lint` installs.
collect_ignore = ["parts_contract.py"]

SERVER = Path(__file__).with_name("forkserver.py")
REPOSITORY = Path(__file__).parents[1]
GRACE = 15


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its result or its traceback, its exit code (None: it hung), and its output."""

    rank: int
    code: int | None
    hung: bool
    log: str
    value: Any = None
    error: str | None = None
    traceback: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not self.hung and self.error is None and self.code in (0, None)

    def __str__(self) -> str:
        state = "hung" if self.hung else f"exit code {self.code}: {self.error}"
        return f"--- rank {self.rank}: {state}\n{self.traceback}\n{self.log[-1500:]}"


class Server:
    """The process that forks ranks; started at its first use, started again when it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def _start(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "MASTER_"))}
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=REPOSITORY,
                # Torch before 2.11 starts a pool of compilers, and a thread, when its compiler is loaded.
                env={**kept, **RESOLVER, **NO_COMPILER, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
                start_new_session=True,
            )
            theirs.close()
            self._connection = Connection(ours.detach())
        return self._connection

    def run(self, request: dict[str, Any]) -> list[Outcome]:
        """Run one request; every process of it is gone when this returns."""
        connection = self._start()
        try:
            connection.send(request)
            supervisor = self._receive(60)
            outcomes = self._receive(request["limit"] + GRACE)
        except BaseException:  # it could not load the test's module, and says why; or its answer is for nobody any more
            self.stop()
            raise
        assert alive(supervisor) == [], "a rank outlived its test"
        return [Outcome(**outcome) for outcome in outcomes]

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(seconds):
            self.stop()
            pytest.fail(f"the supervisor of the ranks did not answer within {seconds} s")
        return self._connection.recv()

    def stop(self) -> None:
        """End the server, and every session that it started."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        for child in _children(self._process.pid):
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


def _stats() -> list[tuple[int, str, int, int]]:
    """Process id, state, parent and session of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        found.append((int(path.parent.name), fields[0], int(fields[1]), int(fields[3])))
    return found


def alive(session: int) -> list[int]:
    """The ranks of a session that are still there; its leader has nothing but to be waited for."""
    return [pid for pid, state, _, local in _stats() if local == session and pid != session and state != "Z"]


def _children(parent: int) -> list[int]:
    return [pid for pid, state, local, _ in _stats() if local == parent and state != "Z"]


@pytest.fixture(scope="session")
def _server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def outcomes(_server):
    """Run a module-level function on ``size`` ranks; how each ended, whatever happened."""

    def run(size, function, *args, world="gloo", limit=200.0, timeout=60.0):
        module = Path(function.__code__.co_filename).resolve().relative_to(REPOSITORY).with_suffix("")
        return _server.run(
            {
                "size": size,
                "module": ".".join(module.parts),
                "function": function.__name__,
                "args": args,
                "world": world,
                "limit": limit,
                "timeout": timeout,
            }
        )

    return run


@pytest.fixture
def ranks(outcomes):
    """Run a module-level function on ``size`` ranks of a world; what each returned.

    The function gets a ``Rank`` (``forkserver.py``) and the arguments. A rank that raises, dies or hangs
    fails the test, with its traceback.
    """

    def run(size, function, *args, **how):
        ended = outcomes(size, function, *args, **how)
        bad = [outcome for outcome in ended if not outcome.ok]
        if bad:
            names = ", ".join(f"{outcome.rank}{' (hung)' if outcome.hung else ''}" for outcome in bad)
            pytest.fail(f"ranks {names} of {size} failed\n" + "\n".join(map(str, bad[:3])), pytrace=False)
        return [outcome.value for outcome in ended]

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked ``few`` the other parameters are nightly, and what is nightly is long.

    The files with the most long tests come first.
    """
    repeated = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            repeated[item.path, item.function].append(item)
    for group in repeated.values():
        kept = group[0].get_closest_marker("few").args[0]
        places = {round(place * (len(group) - 1) / max(1, kept - 1)) for place in range(kept)}
        for place, item in enumerate(group):
            if place not in places:
                item.add_marker(pytest.mark.nightly)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.long)
    long = Counter(item.path for item in items if item.get_closest_marker("long"))
    items.sort(key=lambda item: -long[item.path])
