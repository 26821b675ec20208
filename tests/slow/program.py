"""A job that knows nothing of rankmesh: ``program.py SECONDS FILE``; its ranks mostly sleep.

Pairs of ranks are tp, and the ranks of the same place among them dp, in two parts. A step computes for 300 ms. A line
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


def groups(rank, world):
    """The tp and the dp group of this rank."""
    half, mine = world // 2, {}
    ranks_of = {f"tp@dp{first // 2}": [first, first + 1] for first in range(0, world, 2)}
    for part in range(2):
        ranks_of |= {f"dp@tp{n},pp{part}": list(range(part * half + n, (part + 1) * half, 2)) for n in range(2)}
    for name, ranks in ranks_of.items():
        made = dist.new_group(ranks, group_desc=name)
        if rank in ranks:
            mine[name[:2]] = made
    return mine["tp"], mine["dp"]


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
        late, fault = file.read_text().split() if file.exists() else ("-1", "")
        mine = rank // 4 == int(late) if fault == "host" else rank == int(late)
        loader.next_batch(late=mine and fault == "input")
        layers = LAYERS * 2 if mine and fault == "layers" else LAYERS
        for _ in range(layers):
            time.sleep(STEP / LAYERS * (1.2 if mine and fault == "host" else 0.8 if rank in burns else 1))
        if rank in burns:
            burn(0.2 * STEP)
        dist.all_reduce(small, group=tp)
        dist.all_reduce(large, group=dp)
        go_on.fill_(float(time.time() < end))
        dist.broadcast(go_on, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
