"""Megatron's own tests on eight forked ranks of the CPU: ``python as_megatron.py FOLDER``.

```
FOLDER/test_parallel_state/test_parallel_state.py      what is run over Megatron's modules, then over the drop-ins
FOLDER/test_parallel_state/its-own/RANK.json           how each test ended on a rank
FOLDER/test_parallel_state/drop-ins/RANK.json
```

It stands on the path by itself, since ``tests`` is Megatron's here, and puts in the place of Megatron's
``test_utilities``, which imports its training loop, what its tests of process groups use of it. One process imports
Megatron, and forks the ranks of every file; ``install`` comes between the two sides.
"""

import ast
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import stand_ins
import torch
import torch.distributed as dist

stand_ins.triton()
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self

RANKS, LIMIT = 8, 300.0
_SECONDS = timedelta(seconds=30)


class Utils:
    """A world, and a parallel state in it."""

    rank, world_size, inited = -1, RANKS, False

    @staticmethod
    def initialize_distributed():
        """The world of all ranks."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_SECONDS)
            dist.barrier()
        Utils.inited = True

    @staticmethod
    def initialize_model_parallel(tensor=1, pipeline=1, virtual=None, **how):
        """A new parallel state; sizes may be named as Megatron names them."""
        sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual}
        named = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
        Utils.destroy_model_parallel()
        Utils.initialize_distributed()
        _state().initialize_model_parallel(**{**named, **how})

    @staticmethod
    def destroy_model_parallel():
        """No parallel state, on all ranks."""
        if Utils.inited:
            dist.barrier()
            _state().destroy_model_parallel()
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)  # Megatron's own leaves each with a thread of gloo's
            Utils.inited = False


def _state():
    from megatron.core import parallel_state

    return parallel_state


class Endings:
    """How each test ended, written as it ends: a rank that hangs in a later one is killed."""

    def __init__(self, file):
        self.seen, self._file = {}, file

    def pytest_runtest_logreport(self, report):
        """The first part of a test that did not pass says how it ended."""
        if self.seen.get(report.nodeid, "passed") == "passed":
            text = report.longreprtext.splitlines()[-1:] if report.failed else []
            self.seen[report.nodeid] = ": ".join([report.outcome, *text])
        if report.when == "teardown":
            self._file.write_text(json.dumps(self.seen), encoding="utf-8")


def prepare(files):
    """Everything in place before the first test is read, and imported before ranks are forked."""
    utilities = ModuleType("tests.unit_tests.test_utilities")
    utilities.Utils = Utils
    sys.modules[utilities.__name__] = utilities
    for name in ("new_group", "new_subgroups_by_enumeration"):
        over_gloo(dist, name)
        setattr(dist.distributed_c10d, name, getattr(dist, name))  # torch's own are these now
    for name in sorted({name for file in files for name in imported(file)}):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if not hasattr(dist, "ProcessGroupNCCL"):  # a test puts its own in place of it
        dist.ProcessGroupNCCL = None


def imported(file):
    """The modules that a file takes from Megatron and its examples."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in getattr(node, "names", ())]
        yield from (name for name in names if str(name).startswith(("megatron.", "examples.")))


def put_drop_ins():
    """Ours in place of Megatron's modules, in whatever was imported."""
    from rankmesh.dialects.megatron import install

    install()


def over_gloo(owner, name):
    """Whatever makes groups makes gloo's where Megatron asks for NCCL's."""
    make = getattr(owner, name)

    def other(value):
        return "gloo" if value == "nccl" else value

    @functools.wraps(make)
    def made(*args, **how):
        return make(*map(other, args), **{token: other(value) for token, value in how.items()})

    setattr(owner, name, made)


def run(rank, tests, result):
    """The tests of a folder on one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    Utils.rank, endings = rank, Endings(result / f"{rank}.json")
    with (result / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    how = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", str(tests), "--timeout", "40"]
    Utils.initialize_distributed()  # in Megatron's runs an earlier file has
    with stand_ins.OnCpu():
        pytest.main([*how, "-p", "no:cacheprovider", "-p", "pytest_mock", str(tests)], plugins=[endings])
    os._exit(0)


def world(tests, result):
    """Fork the ranks of one file's tests, and wait for them."""
    result.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    forked = []
    for rank in range(RANKS):
        forked.append(os.fork())
        if forked[-1] == 0:
            try:
                run(rank, tests, result)
            finally:
                os._exit(1)
    end, left = time.monotonic() + LIMIT, set(forked)
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(folder):
    """Every file over Megatron's own modules, then over the drop-ins."""
    files = sorted(Path(folder).glob("*/test_*.py"))
    prepare(files)
    for side, begin in (("its-own", list), ("drop-ins", put_drop_ins)):
        begin()
        over_gloo(importlib.import_module("megatron.core.hyper_comm_grid").HyperCommGrid, "__init__")
        for file in files:
            world(file.parent, file.parent / side)


if __name__ == "__main__":
    main(sys.argv[1])
