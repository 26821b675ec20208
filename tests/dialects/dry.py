"""Dry worlds: one process plays one rank of a world that is not there."""

from contextlib import contextmanager

import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.meshes import forget_meshes

# Run inside a rank's process: no database beside it, and no clock.
PROPERTIES = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


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
