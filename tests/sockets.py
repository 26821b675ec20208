"""A port that is free, and what a process holds: descriptors and threads."""

import contextlib
import os
import socket
import threading
from pathlib import Path

from bench.processes import free_port

__all__ = ["connected", "descriptors", "free_port", "holdings", "kept", "named", "served_once", "threads"]


def descriptors():
    """What this process has open, a name a descriptor; another thread may close one while they are read."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(path.readlink().name)
    return names


def kept():
    """How many descriptors and threads this process has, but for the one that waits for the next bounded call."""
    return len(descriptors()), threads()


def threads():
    """How many threads this process has, but for the one that waits for the next bounded call."""
    idle = any(one.name == "rankmesh-idle" for one in threading.enumerate())
    return len(list(Path("/proc/self/task").iterdir())) - idle


def holdings():
    """The descriptors and threads of this process, by what tells them from later ones."""
    return {*descriptors(), *(path.name for path in Path("/proc/self/task").iterdir())}


def served_once():
    """Serve a store, once: the library below it keeps a pipe for the process."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def named():
    """For a test that fails: both ends of each socket of this process, its other descriptors, its threads' names."""
    threads = {one.native_id: one.name for one in threading.enumerate()}
    tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    others = [name for name in descriptors() if not name.startswith("socket:")]
    ends = [ends for one in _sockets() if (ends := _ends(one))]
    return [ends, others, [threads.get(task, "not of Python") for task in tasks]]


@contextlib.contextmanager
def connected(apart_from):
    """The TCP connections of this process, but for those from or to some ports."""
    with contextlib.ExitStack() as opened:
        found = []
        for descriptor in _sockets():
            with contextlib.suppress(OSError):  # it was closed meanwhile, or listens
                one = opened.enter_context(socket.socket(fileno=os.dup(descriptor)))
                if one.family == socket.AF_UNIX or one.type != socket.SOCK_STREAM:
                    continue
                if not {one.getsockname()[1], one.getpeername()[1]} & {*apart_from}:
                    found.append(one)
        yield found


def _sockets():
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.readlink().name.startswith("socket:"):
                yield int(path.name)


def _ends(descriptor):
    """Both ends of a socket; None where it was closed meanwhile."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        ends = [
            str(one.getsockname()[:2]),
            "listens" if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else "",
        ]
        with contextlib.suppress(OSError):
            ends[1] = str(one.getpeername()[:2])
        return ends
    return None
