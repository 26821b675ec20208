"""``python -m tests.docs.forked 4 job.py ARG...``: ranks on this host, as torchrun starts them, but forked.

This process loads torch and what the script imports, once for all ranks.
"""

import ast
import gc
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed  # noqa: F401  - loaded before the fork
from tests.sockets import free_port

import rankmesh.runtime
import rankmesh.survival  # noqa: F401
from rankmesh.launch.table import torchrun_variables


def _load_imports(script):
    for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            importlib.import_module(node.module)


def _wait(ranks):
    """Return 1 if a rank failed, after ending the others, as torchrun does."""
    status = 0
    while ranks:
        pid, ended = os.wait()
        ranks.remove(pid)
        if ended and not status:
            status = 1
            for left in ranks:
                os.kill(left, signal.SIGTERM)
    return status


def main():
    """Fork the ranks, run the script on each, and exit with the status of all."""
    size, *sys.argv = sys.argv[1:]
    script, size = sys.argv[0], int(size)
    sys.path[0] = str(Path(script).parent)
    _load_imports(script)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"this process has {threads} threads; children of a fork may find locks held for ever")
    gc.freeze()
    port, ranks = free_port(), set()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ |= torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port)
            runpy.run_path(script, run_name="__main__")
            return
        ranks.add(pid)
    sys.exit(_wait(ranks))


if __name__ == "__main__":
    main()
