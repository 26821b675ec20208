"""Megatron's own tests on eight forked ranks of the CPU: ``python as_megatron.py FOLDER [install]``.

It stands on the path by itself, since ``tests`` is Megatron's here, and puts in the place of Megatron's
``test_utilities``, which imports its training loop, what its tests of process groups use of it. Each rank writes how
its tests ended to ``FOLDER/RANK.json``; ``install`` puts the drop-ins in place before any test is read.
"""

import contextlib
import importlib
import json
import os
import signal
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

RANKS, LIMIT = 8, 880.0
_SECONDS = timedelta(seconds=30)


class OnCpu(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The call, with another device."""
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


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
        _state().destroy_model_parallel()
        Utils.initialize_distributed()
        _state().initialize_model_parallel(**{**named, **how})

    @staticmethod
    def destroy_model_parallel():
        """No parallel state, on all ranks."""
        if Utils.inited:
            dist.barrier()
            _state().destroy_model_parallel()
            Utils.inited = False


def _state():
    from megatron.core import parallel_state

    return parallel_state


class Endings:
    """How each test ended, for where the tests of ours read it."""

    def __init__(self):
        self.seen = {}

    def pytest_runtest_logreport(self, report):
        """The first part of a test that did not pass says how it ended."""
        if self.seen.get(report.nodeid, "passed") == "passed":
            text = report.longreprtext.splitlines()[-1:] if report.failed else []
            self.seen[report.nodeid] = ": ".join([report.outcome, *text])


def prepare(drop_ins):
    """Everything in place before the first test is read, and imported before ranks are forked."""
    utilities = ModuleType("tests.unit_tests.test_utilities")
    utilities.Utils = Utils
    sys.modules[utilities.__name__] = utilities
    for name in ("parallel_state", "hyper_comm_grid", "process_groups_config", "tensor_parallel.layers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"megatron.core.{name}")
    if drop_ins:
        from rankmesh.dialects.megatron import install

        install()
    over_gloo(importlib.import_module("megatron.core.hyper_comm_grid").HyperCommGrid)
    if not hasattr(dist, "ProcessGroupNCCL"):  # a test puts its own in place of it
        dist.ProcessGroupNCCL = None


def over_gloo(grid):
    """A class of grids that makes gloo groups where Megatron's examples ask for NCCL's."""
    make = grid.__init__

    def made(self, shape, dim_names, rank_offset=0, backend=None):
        make(self, shape, dim_names, rank_offset, "gloo" if backend == "nccl" else backend)

    grid.__init__ = made


def run(rank, folder):
    """The tests of the folder on one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    Utils.rank, endings = rank, Endings()
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    how = [
        "-q",
        "--noconftest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "--timeout",
        "40",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_mock",
    ]
    with OnCpu():
        pytest.main([*how, str(folder)], plugins=[endings])
    (folder / f"{rank}.json").write_text(json.dumps(endings.seen), encoding="utf-8")
    os._exit(0)


def main(folder, *drop_ins):
    """Fork the ranks, and wait for them."""
    prepare(drop_ins)
    forked = []
    for rank in range(RANKS):
        forked.append(os.fork())
        if forked[-1] == 0:
            try:
                run(rank, Path(folder))
            finally:
                os._exit(1)
    end, left = time.monotonic() + LIMIT, set(forked)
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
