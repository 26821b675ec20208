"""Dry worlds: one process plays one rank of a world that is not there."""

import itertools
from contextlib import contextmanager

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from tests.sweeping import ALL
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.meshes import forget_meshes

PROPERTIES = settings(
    max_examples=40 if ALL else 15, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def begin(rank, size):
    """Start the fake world of ``size`` ranks as ``rank`` sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextmanager
def world(rank, size):
    """The fake world of ``size`` ranks as ``rank`` sees it."""
    begin(rank, size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def members(pg):
    """Global ranks of a process group, in order."""
    return list(dist.get_process_group_ranks(pg))


def compare_meshes(ours, peer, names):
    """Ours has the dimensions of the peer's, their order and their ranks, and the group and place of each name."""
    assert ours.mesh_dim_names == peer.mesh_dim_names
    assert torch.equal(ours.mesh, peer.mesh)
    for name in names:
        assert members(ours[name].get_group()) == members(peer[name].get_group()), name
        assert ours[name].get_local_rank() == peer[name].get_local_rank()


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
