"""A job that knows nothing of rankmesh: ``program.py SECONDS FILE``; its ranks mostly sleep.

Pairs of ranks are tp, and two pairs of two hosts dp. A step computes for 300 ms. A line
``RANK FAULT`` in the file, if it is there, is what the program does worse from then on: ``input``, ``layers``.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP, LAYERS = 0.3, 4


class Loader:
    """Batches of a data set."""

    def next_batch(self, *, late):
        """A batch, sometimes from a slow disk."""
        if late:
            time.sleep(0.2 * STEP)


# The dp group of the two pairs of ranks of each host: no two groups are on the same hosts.
GROUPS = ("ab", "ac", "bd", "cd")


def groups(rank, world):
    """The tp and the dp group of this rank."""
    mine, dp = {}, {}
    for pair in range(world // 2):
        mine |= made("tp", f"dp{pair}", [2 * pair, 2 * pair + 1], rank)
        dp.setdefault(GROUPS[pair // 2 % 4][pair % 2], []).extend([2 * pair, 2 * pair + 1])
    for place, ranks in dp.items():
        mine |= made("dp", f"pp{place}", ranks, rank)
    return mine["tp"], mine["dp"]


def made(kind, place, ranks, rank):
    """A group by its kind, on its members."""
    group = dist.new_group(ranks, group_desc=f"{kind}@{place}")
    return {kind: group} if rank in ranks else {}


def now(file):
    """The rank and the fault in the file, which is made and removed meanwhile."""
    try:
        return file.read_text().split() or ("-1", "")
    except FileNotFoundError:
        return "-1", ""


def burn(seconds):
    """Compute for real."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def main():
    """Steps, until rank 0 has had enough."""
    end, file = time.time() + float(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp, dp = groups(rank, world)
    loader = Loader()
    small, large, go_on = torch.ones(64), torch.ones(int(os.environ.get("LARGE", "1000"))), torch.ones(1)
    burns = {int(one) for one in os.environ.get("BURNS", "").split(",") if one}
    sys.stdout.write(f"rank {rank} is {os.getpid()}\n")
    sys.stdout.flush()
    while go_on.item():
        late, fault = now(file)
        mine = rank == int(late)
        loader.next_batch(late=mine and fault == "input")
        layers = LAYERS * 2 if mine and fault == "layers" else LAYERS
        for _ in range(layers):
            time.sleep(STEP / LAYERS * (0.8 if rank in burns else 1))
        if rank in burns:
            burn(0.2 * STEP)
        dist.all_reduce(small, group=tp)
        dist.all_reduce(large, group=dp)
        go_on.fill_(float(time.time() < end))
        dist.broadcast(go_on, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
