"""A port that is free, and what a process holds: sockets and threads."""

import contextlib
from pathlib import Path

from bench.processes import free_port

__all__ = ["descriptors", "free_port", "kept"]


def descriptors():
    """What this process has open, a name a descriptor; another thread may close one while they are read."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(path.readlink().name)
    return names


def kept():
    """How many sockets and threads this process has."""
    return sum(name.startswith("socket:") for name in descriptors()), len(list(Path("/proc/self/task").iterdir()))
