"""What ``rm.init`` costs beside ``torch.distributed.init_process_group``: worlds of gloo ranks, one after the other.

A rank is a process that makes worlds by turns; the first of each side is apart, as some things are done once. A time is
that of the call: of the clock, and of the processor with the threads that it starts. Run as
``python -m bench.init [RANKS [PAIRS]]``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

import rankmesh as rm
from bench.processes import run_ranks
from bench.report import load
from bench.results import Sample, by_round, taken, turns
from rankmesh.launch.table import torchrun_variables

__all__ = ["measured"]

SIDES = ("torch", "rankmesh")


def _worlds(rank: int, size: int, ports: list[int]) -> dict[str, Any]:
    """Make worlds by turns on one rank: what the calls took, by side."""
    found: dict[str, list[Sample]] = {side: [] for side in SIDES}
    for side, port in zip(turns(len(ports) // 2, SIDES), ports, strict=True):
        os.environ |= torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port)
        initialise = rm.init if side == "rankmesh" else dist.init_process_group
        made: list[Any] = []
        found[side].append(taken(lambda: made.append(initialise("gloo"))))  # noqa: B023
        dist.barrier()
        end = dist.destroy_process_group if made == [None] else made[0].close
        end()
    return {"found": found}


def measured(size: int = 2, pairs: int = 20) -> dict[str, object]:
    """Measure pairs of worlds by turns; milliseconds a rank by side: by the clock, and of the processor."""
    vars(rm)["init"] = rm.init  # loaded before the fork
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * pairs)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    reports = run_ranks(size, lambda rank: _worlds(rank, size, ports), limit=120).checked()
    sides = {}
    for side in SIDES:
        both = by_round(reports, side, "wall"), by_round(reports, side, "processor", fmean)
        sides[side] = {
            name: [round(median(values[part]) * 1e3, 2) for values in both]
            for name, part in (("first", slice(1)), ("later", slice(1, None)))
        }
    return {"ranks": size, "pairs": pairs, "load": load(), **sides}


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:]))))  # noqa: T201
