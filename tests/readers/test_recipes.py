"""The recipes that only configs had need of, against rank lists written out by hand and by numpy."""

import numpy as np
import pytest

from rankmesh import PlanError
from rankmesh.core import recipes


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
        {"dp_shard": 4, "sp": 2, "tp": 2},
        {"dp_replicate": 4},
        {"tp": 8},
        {"dp_shard": 2, "cp": 3},
    ],
)
def test_accelerate_is_a_row_major_mesh(sizes):
    """The axes above one in Accelerate's order, outermost first, and the flattened groups that have an axis."""
    order = [name for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp") if name in sizes]
    grid = np.arange(np.prod([sizes[name] for name in order])).reshape([sizes[name] for name in order])
    plan = recipes.accelerate(**{"dp_shard": 1, **sizes})
    flattened = {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", "cp"),
        "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    }
    wanted = {name: (name,) for name in order} | {
        name: axes for name, axes in flattened.items() if set(axes) & set(order)
    }
    assert list(plan.kinds) == list(wanted)
    for name, axes in wanted.items():
        inside = [place for place, axis in enumerate(order) if axis in axes]
        outside = [place for place, axis in enumerate(order) if axis not in axes]
        size = int(np.prod([grid.shape[place] for place in inside]))
        expected = grid.transpose([*outside, *inside]).reshape(-1, size)
        assert sorted(plan.groups(name).tolist()) == sorted(expected.tolist())


def test_accelerate_keeps_one_axis_for_one_rank():
    """A world of one rank is a mesh of one replica."""
    assert recipes.accelerate(1).mesh.axes == {"dp_replicate": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "cp": 2, "sp": 2}, "one of the two ways"),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, "use dp_shard > 1"),
        ({"world_size": 8, "dp_shard": 2, "tp": 2}, "leave dp out"),
        ({}, "neither world_size nor dp"),
    ],
)
def test_accelerate_refuses_what_accelerate_refuses(sizes, message):
    """Replicas alone beside tensor parallelism, two ways to shard a sequence, a product that is not the world."""
    with pytest.raises(PlanError, match=message):
        recipes.accelerate(**sizes)


def test_deepspeed_groups():
    """AutoTP, ZeRO++ and MiCS on eight ranks: tp adjacent, partitions in blocks, replicas across the blocks."""
    plan = recipes.deepspeed(8, tp=2, hpz=4, mics=4)
    assert list(plan.kinds) == ["world", "dp", "tp", "hpz", "mics_shard", "mics_replicate"]
    assert plan.groups("tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.groups("dp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert plan.groups("hpz").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.groups("mics_replicate").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_deepspeed_experts():
    """AutoEP: experts over data-parallel ranks of one tp lane; with sequence parallelism, over adjacent ranks."""
    lanes = recipes.deepspeed(8, tp=2, ep=2)
    assert sorted(lanes.groups("ep").tolist()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(lanes.groups("edp").tolist()) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    adjacent = recipes.deepspeed(8, sp=2, ep=4)
    assert adjacent.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert adjacent.groups("sp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": 2}, {"hpz": 3}, {"mics": 16}, {"tp": 2, "ep": 8}])
def test_deepspeed_refuses(sizes):
    """Two inner axes at once, and partitions that do not divide the world."""
    with pytest.raises(PlanError):
        recipes.deepspeed(8, **sizes)
