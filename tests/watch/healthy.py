"""Programs of 2 ranks, most of which do not hang: ``healthy.py PROGRAM RANK FILE``, where the ranks meet by the file.

They know nothing of rankmesh, but for ``inits``.
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def _world(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def _step():
    dist.all_reduce(torch.ones(4))


def again(rank, file):
    """Three worlds in turn, each with a group that is destroyed before its world."""
    for turn in range(3):
        _world(rank, f"{file}{turn}")
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)
        _step()
        dist.destroy_process_group()


def hangs_in_another_world(rank, file):
    """Two worlds that create their groups in different orders; rank 1 makes no call of the second one's world."""
    for turn in range(2):
        _world(rank, f"{file}{turn}")
        pair, single = (dist.new_group(ranks) for ranks in ([0, 1], [1])[:: 1 - 2 * turn])
        if turn:
            pair, single = single, pair
        for _ in range(3):
            dist.all_reduce(torch.ones(4), group=pair)
        if rank == 1:
            dist.all_reduce(torch.ones(4), group=single)
        if turn:
            if rank == 1:
                time.sleep(60)
            _step()
        dist.destroy_process_group()


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        return torch.tensor(float(place))


def loads(rank, file):
    """A DataLoader with forked workers, which end while the world lives."""
    _world(rank, file)
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(_Numbers(), batch_size=4, num_workers=2):
            dist.all_reduce(batch)
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    _step()


def _spawned(rank, file):
    _world(rank, file)
    _step()
    dist.destroy_process_group()


def spawns(rank, file):
    """Ranks that torch.multiprocessing spawns, by the first process."""
    if rank == 0:
        torch.multiprocessing.spawn(_spawned, (file,), nprocs=2)


def inits(rank, file):
    """A program of rankmesh that records itself."""
    import rankmesh as rm
    from rankmesh.runtime.world import World

    _world(rank, file)
    with rm.init(record="elsewhere"):
        assert len(World.current().diagnosing) == 1
        _step()
    dist.destroy_process_group()


def fails(rank, file):
    """Rank 1 ends by an error while rank 0 waits for it."""
    _world(rank, file)
    _step()
    if rank == 1:
        raise RuntimeError("a wrong batch")
    _step()


def exits(rank, file):
    """Each rank ends with a status of its own."""
    _world(rank, file)
    _step()
    sys.exit(3 + rank)


def waits(rank, file):
    """Rank 1 is in a process of its own for a while; the first line says that it is."""
    _world(rank, file)
    _step()
    if rank == 1:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        subprocess.run(("sleep", "6"), check=True)
    _step()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
