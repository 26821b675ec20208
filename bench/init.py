"""What ``rm.init`` costs beside ``torch.distributed.init_process_group``: worlds of gloo ranks, one after the other.

A rank is a process that makes worlds by turns; the first of each side is apart, as some things are done once. A time is
that of the call: of the clock, and of the processor with the threads that it starts. Run as
``python -m bench.init [RANKS [PAIRS]]``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch.distributed as dist

import rankmesh as rm

__all__ = ["measured"]

SIDES = ("torch", "rankmesh")
Times = list[tuple[str, float, float]]


def _rank(rank: int, size: int, ports: Sequence[int], done: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}
    times: Times = []
    for number, port in enumerate(ports):
        side = SIDES[(number + number // 2) % 2]
        os.environ["MASTER_PORT"] = str(port)
        wall, processor = time.perf_counter(), time.process_time()
        me = rm.init("gloo") if side == "rankmesh" else dist.init_process_group("gloo")
        times.append((side, time.perf_counter() - wall, time.process_time() - processor))
        dist.barrier()
        if me is None:
            dist.destroy_process_group()
        else:
            me.close()
    done.send(times)


def measured(size: int = 2, pairs: int = 20) -> dict[str, object]:
    """Measure pairs of worlds by turns; milliseconds a rank by side: by the clock, and of the processor."""
    vars(rm)["init"] = rm.init  # loaded before the fork
    context, ends = multiprocessing.get_context("fork"), [multiprocessing.Pipe(duplex=False) for _ in range(size)]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * pairs)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    ranks = [
        context.Process(target=_rank, args=(rank, size, ports, ends[rank][1]), daemon=True) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    found: list[Times] = [end.recv() if end.poll(120) else [] for end, _ in ends]
    worlds = list(zip(*found, strict=True))
    rows = {side: [[times[1:] for times in world] for world in worlds if world[0][0] == side] for side in SIDES}
    return {"ranks": size, "pairs": pairs, "load": os.getloadavg()[0]} | {
        side: {"first": _milliseconds(times[:1]), "later": _milliseconds(times[1:])} for side, times in rows.items()
    }


def _milliseconds(worlds: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the medians over worlds: of the slowest rank's clock, and of the processor's time of a rank."""
    walls = [max(wall for wall, _ in ranks) for ranks in worlds]
    processors = [statistics.fmean(processor for _, processor in ranks) for ranks in worlds]
    return [round(statistics.median(column) * 1e3, 2) for column in (walls, processors)]


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))  # noqa: T201
