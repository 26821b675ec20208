"""Bugs of peers that leave something behind, or take too much along."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.registries import registries

PLAN = rm.recipes.megatron(8, tp=2, pp=2)


def _forgets(cycles):
    """Groups as globals that are set to None, as destroy_model_parallel does."""
    counts = []
    for _ in range(cycles):
        groups = [dist.new_group(list(group)) for kind in PLAN.kinds.values() for group in kind]
        groups.clear()
        counts.append(registries()["pg_map"])
    return counts


def _closes(cycles):
    counts = []
    for _ in range(cycles):
        with rm.connect(PLAN) as groups:
            number = torch.ones(1)
            dist.all_reduce(number, group=groups["tp"].pg)
        counts.append(sum(registries().values()))
    return counts


def test_groups_that_are_only_forgotten():
    """8 ranks: forgotten groups pile up, a set for each cycle; after close() the registries are as they were."""
    for counts in sim.run(_forgets, 8, 3):
        assert counts[1] - counts[0] == counts[2] - counts[1] > 5
    for counts in sim.run(_closes, 8, 3):
        assert len(set(counts)) == 1


def _destroys_an_axis(ours):
    if ours:
        with rm.connect(rm.recipes.axes(rm.Mesh(dp=4))) as groups:
            dist.all_reduce(torch.ones(1), group=groups["dp"].pg)
    else:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        dist.destroy_process_group(mesh.get_group("dp"))
    return dist.is_initialized()


def test_an_axis_that_is_the_world():
    """4 ranks: a DeviceMesh axis over all ranks is the world: destroying it destroys everything; ours is its own."""
    assert sim.run(_destroys_an_axis, 4, False) == [False] * 4
    assert sim.run(_destroys_an_axis, 4, True) == [True] * 4
