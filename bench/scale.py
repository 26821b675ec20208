"""Scale: as many real store clients as a large job has ranks, each with the operations of its rank, on one server.

```
server     one TCPStore                                       a process of its own
clients    N TCPStore clients, a thread each                  in a few processes
ours       the meeting of `connect` itself, then what its communicators ask of the store when they are first used
theirs     for each group of Megatron-Core, in its order:     NCCL: one identifier     gloo: each member's address
```

A job as Megatron-Core has it by default: NCCL groups, and gloo counterparts of the data-parallel ones. NCCL and gloo
are not there; what they would read and write is. The time is from a gate, which opens when all clients are connected,
until the last one is through. A side that has not finished by the limit is stopped: the operations done by then are the
result.

Torch's server asks for the name of every client's host. Where ::ffff:127.0.0.1 has none and DNS does not answer, each
connection takes a tenth of a second: give it a line in the hosts file before ten thousand of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.dry import dry_sizes
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.plan import Plan
from rankmesh.core.rank_range import RankRange
from rankmesh.core.recipes.megatron_core import megatron
from rankmesh.core.saved import contents

__all__ = ["ours", "replay", "theirs"]

_PROCESSES = 4
# How many clients of one process connect at a time: the rest of the queue of a socket is the system's.
_CONNECTING = 64
_STACK = 256 << 10
_LONG = timedelta(minutes=30)
# What NCCL's identifier and gloo's address take, in bytes.
_IDENTIFIER, _PLACE = "i" * 128, "a" * 160

Operate = Callable[[str, Callable[[], Any]], Any]


class _Counted:
    """A store client that counts: each operation is one more of its rank."""

    def __init__(self, store: Any, done: Any, rank: int) -> None:
        self._store, self._done, self._rank = store, done, rank

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*given: Any) -> Any:
            result = operation(*given)
            self._done[self._rank] += 1
            return result

        return counted


# -- what a rank does ---------------------------------------------------------------------------------------------


def ours(store: Any, rank: int, mine: LocalGroups, fields: Mapping[str, Any], world: int) -> None:
    """The agreement of ``connect``, and what its communicators ask of the store."""
    from rankmesh.backend.gloo import EAGER_SIZE
    from rankmesh.runtime.agreement import PlanProposal, agree

    made = mine.communicators
    gloo = [group for group in made if group.options.backend == "gloo"]
    seconds = _LONG.total_seconds()
    agreement = agree(store, PlanProposal(rank, world, RankRange(0, world), fields), seconds)
    for group in gloo:
        store.set(_key(group, rank), _PLACE)
        if group.size <= EAGER_SIZE:
            store.multi_get([_key(group, member) for member in group.ranks])
    agreement.complete(seconds, seconds)
    for group in made:
        if group.options.backend != "gloo":
            _identify(store, group)
    for group in gloo:  # an all-reduce talks to the neighbours of a ring
        if group.size > EAGER_SIZE:
            for neighbour in {group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]}:
                _find(store, _key(group, neighbour))


def theirs(store: Any, rank: int, mine: LocalGroups, fields: Mapping[str, Any], world: int) -> None:
    """Each group by itself: NCCL's identifier, or gloo's addresses of all members, one after the other."""
    for group in mine.values():
        if group.options.backend == "gloo":
            store.set(_key(group, rank), _PLACE)
            for member in group.ranks:
                _find(store, _key(group, member))
        elif group.size > 1:
            _identify(store, group)


def _identify(store: Any, group: LocalGroup) -> None:
    """NCCL's identifier of a communicator: the first member makes it, the others read it."""
    key = f"{group}/identifier"
    if group.rank == 0:
        store.set(key, _IDENTIFIER)
    else:
        store.get(key)


def _find(store: Any, key: str) -> None:
    """Gloo waits for an address, then reads it."""
    store.wait([key], _LONG)
    store.get(key)


def _key(group: LocalGroup, rank: int) -> str:
    return f"{group}/gloo/{rank}"


SIDES: Mapping[str, Callable[..., None]] = {"ours": ours, "theirs": theirs}


# -- processes ----------------------------------------------------------------------------------------------------


def replay(side: str, world: int, limit: float) -> dict[str, Any]:
    """All ranks of one side: seconds until all are through, None at the limit; operations, and how many were done."""
    plan = _plan(world)
    fork = multiprocessing.get_context("fork")
    done, through = fork.RawArray("q", world), fork.RawArray("d", world)
    ready, gate = fork.Semaphore(0), fork.Event()
    gc.collect()
    gc.freeze()
    with _running() as running:
        reader, writer = fork.Pipe(duplex=False)
        running.append(_start(fork, _serve, world, writer))
        port = reader.recv()
        for part in range(_PROCESSES):
            ranks = range(part, world, _PROCESSES)
            running.append(_start(fork, _clients, side, plan, ranks, port, done, through, ready, gate))
        for _ in range(world):
            if not ready.acquire(timeout=300):
                raise TimeoutError(f"not all of {world} clients are connected: none in 300 s")
        started = time.monotonic()
        gate.set()
        while time.monotonic() - started < limit and not all(through):
            time.sleep(0.02)
        finished = all(through)
        return {
            "seconds": max(through) - started if finished else None,
            "through": sum(1 for when in through if when),
            "operations": sum(done),
            "expected": max(sum(done), _expected(side, plan)),
            "busiest": max(done),
            "limit": limit,
        }


def _expected(side: str, plan: Plan) -> int:
    """The operations of all ranks, where some were stopped: of every member, its own address and two for each."""
    if side == "ours":
        return 0
    total = 0
    for spec in plan.specs:
        groups = plan.groups(spec.name)
        ranks = len(groups) * groups.size
        if spec.options.backend == "gloo":
            total += ranks * (1 + 2 * groups.size)
        elif groups.size > 1:
            total += ranks
    return total


def _plan(world: int) -> Plan:
    sizes = dry_sizes(world)
    return megatron(world, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp, gloo=True)


@contextmanager
def _running() -> Iterator[list[Any]]:
    running: list[Any] = []
    try:
        yield running
    finally:
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            process.join()


def _start(fork: Any, work: Callable[..., None], *given: Any) -> Any:
    process = fork.Process(target=work, args=given, daemon=True)
    process.start()
    return process


def _serve(world: int, port: Any) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

    _allow_descriptors(world + 100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LONG)
    port.send(store.port)
    signal.pause()


def _clients(side: str, plan: Plan, ranks: range, port: int, done: Any, through: Any, ready: Any, gate: Any) -> None:
    """One thread for each of these ranks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

    _allow_descriptors(len(ranks) + 100)
    threading.stack_size(_STACK)
    # Each thread that waits for the interpreter would else ask for it a hundred times a second.
    sys.setswitchinterval(60)
    fields, open_here, connecting = contents(plan), threading.Event(), threading.Semaphore(_CONNECTING)

    def run(rank: int) -> None:
        mine = plan.of(rank)
        with connecting:
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_LONG)
        ready.release()
        open_here.wait()
        SIDES[side](_Counted(store, done, rank), rank, mine, fields, plan.world_size)
        through[rank] = time.monotonic()

    for rank in ranks:
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    gate.wait()
    open_here.set()
    signal.pause()


def _allow_descriptors(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


# -- the command --------------------------------------------------------------------------------------------------


def _measured(sizes: list[int], rounds: int, limit: float) -> dict[str, Any]:
    import torch.distributed

    import rankmesh.runtime  # noqa: F401  - before the first fork, as torch

    found: dict[str, Any] = {}
    for world in sizes:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side, done in runs.items():
                if done and done[-1]["seconds"] is None:
                    continue  # once past the limit is enough
                done.append(replay(side, world, limit))
                print(f"{world:,} clients, {side}: {done[-1]}", file=sys.stderr, flush=True)  # noqa: T201
        found[str(world)] = runs
    return {
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "load": list(os.getloadavg())},
        "torch": torch.__version__,
        "rounds": rounds,
        "clients": found,
    }


def _main(message: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", default="1024,10240", help="how many, multiples of 1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one side may take")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("scale.json"))
    given = parser.parse_args(message)
    # torch says of each client that nobody knows its host's name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    found = _measured([int(size) for size in given.clients.split(",")], given.rounds, given.limit)
    given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for world, runs in found["clients"].items():
        for side, done in runs.items():
            seconds = [run["seconds"] for run in done if run["seconds"] is not None]
            shown = f"{statistics.median(seconds):.2f} s" if seconds else f"not finished after {given.limit:g} s"
            print(f"{int(world):,} clients, {side}: {shown}, {done[0]['operations']:,} operations")  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1:])
