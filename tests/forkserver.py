"""Starts ranks for tests: a process without threads that has loaded torch, and forks.

```
pytest ── request ──> server ── fork ──> supervisor (a session of its own) ── fork ──> rank 0 .. n-1
       <── results ──────────────────────┘ ends the ranks that are not done in time
```

The parent of the ranks has neither threads nor a store: a lock that a thread holds at the fork stays locked
in the child. So rank 0 serves the store, on a socket of the supervisor, until all others have ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor

import rankmesh.runtime  # noqa: F401  - loaded before the fork, once for all ranks, as is what torch loads late
from rankmesh.errors import RankmeshError
from rankmesh.launch.table import torchrun_variables

REPOSITORY = Path(__file__).parents[1]


class Rank:
    """What a test's function gets on each rank: who it is, the store, and the world."""

    def __init__(self, rank, size, port, socket_fd, timeout):
        self.rank, self.size, self.port, self.timeout = rank, size, port, timeout
        serves = {"master_listen_fd": socket_fd} if rank == 0 else {}
        self.store = self._open(is_master=rank == 0, **serves)

    def _open(self, **how):
        limit = timedelta(seconds=self.timeout)
        return dist.TCPStore("127.0.0.1", self.port, self.size, wait_for_workers=False, timeout=limit, **how)

    def world(self, backend="gloo", *, prefix="world", rank=None, size=None, timeout=None):
        """Initialise the default group over the store, under a prefix of its own."""
        dist.init_process_group(
            backend,
            rank=self.rank if rank is None else rank,
            world_size=size or self.size,
            store=dist.PrefixStore(prefix, self.store),
            timeout=timedelta(seconds=timeout or self.timeout),
        )

    def launched(self, port=None):
        """Set what torchrun sets, and wait for all ranks; without a ``port`` of its own the store is the test's."""
        local = {"local_rank": self.rank, "local_world_size": self.size}
        os.environ.update(torchrun_variables(self.rank, self.size, **local, port=port or self.port))
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        if port is None:
            os.environ.update(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_USE_AGENT_STORE="True")
        self.meet("all are launched, and have reached the store of the test")

    def meet(self, name, size=None):
        """Wait for all ranks, through the store alone."""
        if self.store.add(f"meet/{name}", 1) == (size or self.size):
            self.store.set(f"met/{name}", "yes")
        self.store.wait([f"met/{name}"], timedelta(seconds=self.timeout))

    @staticmethod
    def resources():
        """Open descriptors, threads but for the one that waits for the next call to a store, resident memory in KiB."""
        from tests.sockets import threads  # a rank finds it; the server is a script outside of the package

        time.sleep(0.1)  # a thread that has ended is in the process for a moment
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        values = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threads(),
            "memory": int(values["VmRSS"].split()[0]),
        }

    @staticmethod
    def error(kind, call, *args, **kwargs):
        """The error of this kind that the call must raise, as plain data, and the seconds that it took."""
        started = time.perf_counter()
        try:
            call(*args, **kwargs)
        except kind as error:
            values = dict(error.values) if isinstance(error, RankmeshError) else {}
            seconds = time.perf_counter() - started
            return {"kind": type(error).__name__, "message": str(error), "seconds": seconds, **values}
        raise AssertionError(f"{call} raised no {kind}")


def _rank_main(rank, request, port, socket_fd, folder, release):
    # Whatever torch and gloo have to say is shown only when the test fails.
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    torch.set_num_threads(1)
    try:
        me = Rank(rank, request["size"], port, socket_fd if rank == 0 else None, request["timeout"])
        if request["world"]:
            me.world(request["world"])
            me.meet("the world is complete")  # gloo still connects to a rank that would leave at once
        module = importlib.import_module(request["module"])
        result = {"value": getattr(module, request["function"])(me, *request["args"])}
        text = json.dumps(result)
    except BaseException as error:  # noqa: BLE001  - whatever it was, the test hears of it
        text = json.dumps({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
    part = folder / f"{rank}.part"
    part.write_text(text, encoding="utf-8")
    part.rename(folder / f"{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    if rank == 0:
        os.read(release, 1)  # the store lives here: until the supervisor has seen all others end
    os._exit(0)


def _supervise(request, connection):
    """Send this process's id, fork the ranks, wait, end those that hang, and send the result of each."""
    os.setsid()
    # From here, not from the server, which a busy machine may hold up until after the results.
    connection.send(os.getpid())
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    release, hold = os.pipe()
    pids = {}
    for rank in range(request["size"]):
        pid = os.fork()
        if pid == 0:
            os.close(hold)
            _rank_main(rank, request, listener.getsockname()[1], listener.detach(), folder, release)
        pids[rank] = pid
    listener.close()
    codes = _wait(pids, folder, hold, time.monotonic() + request["limit"])
    connection.send([_outcome(folder, rank, codes[rank]) for rank in pids])
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _wait(pids, folder, hold, end):
    """The exit code of each rank: negative for a signal, None for one that hung."""
    codes, kept = {}, True
    while len(codes) < len(pids) and time.monotonic() < end:
        for rank in set(pids) - set(codes):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if kept and set(pids) - set(codes) <= {0} and (0 in codes or (folder / "0.json").exists()):
            os.close(hold)
            kept = False
        time.sleep(0.002)
    for rank in set(pids) - set(codes):
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
        codes[rank] = None
    if kept:
        os.close(hold)
    return codes


def _outcome(folder, rank, code):
    outcome = {"rank": rank, "code": code, "log": ""}
    with suppress(OSError):
        outcome["log"] = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")[-4000:]
    with suppress(OSError, ValueError):
        outcome |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    # Rank 0 waits for the others, with its result written: it did not hang.
    outcome["hung"] = code is None and "value" not in outcome and "error" not in outcome
    return outcome


def serve(connection):
    """Answer requests, one after the other, until the other end closes."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        # The test's module is loaded here, once, so that ranks inherit it.
        if request["module"] not in sys.modules:
            importlib.import_module(request["module"])
            # A collection in a rank would visit, and so copy, every page of what was imported before the fork.
            gc.collect()
            gc.freeze()
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            raise RuntimeError(f"the server has {threads} threads; children of a fork may find locks held for ever")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _supervise(request, connection)
                code = 0
            finally:
                os._exit(code)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    # Not this folder: a test may be named like a module.
    sys.path[0] = str(REPOSITORY)
    sys.modules["tests.forkserver"] = sys.modules["__main__"]
    serve(Connection(int(sys.argv[1])))
