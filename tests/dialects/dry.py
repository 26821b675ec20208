"""Dry worlds: one process plays one rank of a world that is not there."""

import itertools
from contextlib import contextmanager

import torch.distributed as dist
from hypothesis import HealthCheck, settings
from tests.sweeping import ALL
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.meshes import forget_meshes

# Run inside a rank's process: no database beside it, and no clock.
PROPERTIES = settings(
    max_examples=40 if ALL else 15, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@contextmanager
def world(rank, size):
    """The fake world of ``size`` ranks as ``rank`` sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def members(pg):
    """Global ranks of a process group, in order."""
    return list(dist.get_process_group_ranks(pg))


def row_of(rank, groups):
    """The one list of ``groups`` that has ``rank``."""
    (row,) = [list(map(int, group)) for group in groups if rank in list(group)]
    return row


def enumerated(order, sizes, kinds):
    """Every group of each kind, by a count through the axes, slowest first; ``kinds``: the axes that vary inside."""
    groups = {kind: {} for kind in kinds}
    for rank, place in enumerate(itertools.product(*(range(sizes[axis]) for axis in order))):
        for kind, varying in kinds.items():
            fixed = tuple(at for axis, at in zip(order, place, strict=True) if axis not in varying)
            groups[kind].setdefault(fixed, []).append(rank)
    return {kind: list(rows.values()) for kind, rows in groups.items()}
