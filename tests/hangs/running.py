"""Runs a program that hangs: ranks forked from a process without threads, watched, and ended once a verdict was told.

``python -m tests.hangs.running FOLDER NAME...`` writes the recordings of these programs to FOLDER/NAME.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.limits import LONG
from tests.sockets import free_port

import rankmesh.debug.watch
import rankmesh.runtime
from rankmesh.backend import recorder
from rankmesh.debug.watch import requests
from rankmesh.rendezvous import UntilEnough

# Seconds that a call may take where there is no watch.
RUNS_OUT = 5.0
# Seconds for which a request waits for a rank that runs: all answer before, but one that holds the interpreter.
ANSWERS = 30.0
# gloo on the CPU, or nccl: then all ranks share what GPUs there are.
BACKEND = os.environ.get("HANGS_BACKEND", "gloo")
# What a program imports is loaded once, before its ranks are forked.
LOADED = {
    "megatron_core": ("megatron.core.parallel_state",),
    "nanotron": ("nanotron.parallel",),
    "device_mesh": ("torch.distributed.device_mesh",),
}
# These run in a network namespace of their own, which they take down.
SEPARATE = frozenset({"loses_the_network"})


def hang(name, folder, *, size, watched):
    """Run a program until its verdict is in the folder, or for long; then end it.

    Without ``watched`` there is no watch: calls run out of time, and each rank ends with what torch has recorded.
    """
    for module in ("tests.hangs.programs", "tests.hangs.timed_out", *LOADED.get(name, ())):
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"this process has {threads} threads; children of a fork may find locks held for ever")
    port = free_port()
    ranks = {rank: fork(_rank, name, Path(folder), rank, size, port, watched) for rank in range(size)}
    server = os.fork()
    if server == 0:
        _serve(port, size)
    try:
        _await(Path(folder) / "verdict.json", ranks)
    finally:
        for pid in (*ranks.values(), server):
            reap(pid)


def fork(body, *args):
    """The process that runs ``body``; it ends with status 1 where that raises."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body(*args)
        status = 0
    finally:
        os._exit(status)


def _serve(port, size):
    """The store, in a process that outlives every rank, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
    while store is not None:
        time.sleep(1)


def _rank(name, folder, rank, size, port, watched):
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    from tests.hangs import programs, timed_out

    program = getattr(programs if name in programs.HANGS else timed_out, name)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)
    if BACKEND == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    timeout = timedelta(seconds=40 if watched else RUNS_OUT)
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store, timeout=timeout)
    watch = _watch(folder, rank, size, store, watched) if watched else None
    try:
        program(rank)
        if BACKEND == "nccl":  # where a step would read its loss: until then a GPU's calls wait on the GPU alone
            torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        traceback.print_exc()
        if watch is not None:
            sys.last_value = error  # an error that is kept keeps its call under way, for gloo's recorder
    if watch is None:
        time.sleep(1)  # by then gloo has taken the calls that failed from the list of those under way
        (folder / f"trace_rank_{rank}").write_bytes(recorder.recorded()[0])
    else:
        watch.close()


def _watch(folder, rank, size, store, seconds):
    """A watch whose requests wait until each rank whose process runs has answered, however long that takes."""
    watch = rankmesh.debug.watch.start(folder, timeout=seconds)
    store.set(f"process/{rank}", str(os.getpid()))
    # All are watched before a program begins.
    processes = [int(store.get(f"process/{each}")) for each in range(size)]

    def all_answered(arrivals):
        return not any(_runs(processes[absent]) for absent in arrivals.absent)

    watch._pace.grace = ANSWERS
    requests.WaitPolicy = partial(UntilEnough, enough=all_answered)
    return watch


def _await(verdict, ranks):
    """Until a verdict was told, or every rank has ended, as gloo's do when one of them dies."""
    end = time.monotonic() + LONG
    while time.monotonic() < end and not verdict.exists() and any(map(_runs, ranks.values())):
        time.sleep(0.05)
    time.sleep(0.3)


def _runs(pid):
    """Whether a process runs; one that was stopped does not come to an end by itself."""
    state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return state not in "ZT"


def reap(pid):
    """Kill a child, whatever it does."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def in_a_separate_network(module, folder, name):
    """Whether this process has a network with nothing but the loopback; else another one runs the program in one."""
    if [interface for _, interface in socket.if_nameindex()] == ["lo"]:
        return True
    command = [sys.executable, "-m", module, folder, name]
    subprocess.run(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command], check=True)
    return False


def main():
    """Write the recordings of the named programs."""
    from tests.hangs import programs, timed_out

    folder, *names = sys.argv[1:]
    for name in names or sorted(programs.HANGS):
        if name in SEPARATE and not in_a_separate_network("tests.hangs.running", folder, name):
            continue
        started = time.monotonic()
        if name in timed_out.TIMED_OUT:
            hang(name, Path(folder) / name, size=timed_out.TIMED_OUT[name].size, watched=None)
        else:
            size = programs.HANGS[name].size
            # Sixteen ranks that share a GPU take seconds for a communicator.
            hang(name, Path(folder) / name, size=size, watched=15.0 if BACKEND == "nccl" and size > 8 else 3.0)
        print(f"{name} {time.monotonic() - started:.1f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
