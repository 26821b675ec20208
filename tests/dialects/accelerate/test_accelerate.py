from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.dialects import dry
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.dialects.accelerate import device_mesh, plan
from rankmesh.errors import LayoutError, PlanError

ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
JOINED = {"dp": ORDER[:2], "dp_shard_cp": ORDER[1:3], "dp_cp": ORDER[:3]}


def theirs(sizes):
    """The DeviceMesh that accelerate builds: active dimensions in its order, and its flattened ones."""
    active = [axis for axis in ORDER if sizes[f"{axis}_size"] > 1]
    mesh = init_device_mesh("cpu", tuple(sizes[f"{axis}_size"] for axis in active), mesh_dim_names=tuple(active))
    joined = {name: tuple(axis for axis in axes if axis in active) for name, axes in JOINED.items()}
    for name, axes in joined.items():
        if axes:
            mesh[axes]._flatten(name)
    return mesh, [*active, *(name for name, axes in joined.items() if axes)]


def _live(me, sizes):
    with rm.connect(plan(**sizes)) as groups:
        before = registries()
        mesh = device_mesh(groups)
        assert registries() == before
        peer, names = theirs({**dict.fromkeys((f"{axis}_size" for axis in ORDER), 1), **sizes})
        dry.compare_meshes(mesh, peer, names)
        for name in names:
            totals = [torch.tensor([me.rank + 1]) for _ in range(2)]
            for total, one in zip(totals, (mesh, peer), strict=True):
                dist.all_reduce(total, group=one[name].get_group())
            assert torch.equal(*totals)
        assert groups["dp_cp"].pg is mesh["dp_cp"].get_group()
        return groups.report().communicators


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "communicators"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}, 4),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, 6),
        ({"dp_shard_size": 4, "sp_size": 2}, 2),
    ],
)
def test_eight_ranks(ranks, sizes, communicators):
    """8 ranks: collectives over every dimension as torch's, no group made for the mesh, equal rank sets shared."""
    assert ranks(8, _live, sizes) == [communicators] * 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"cp_size": 2, "sp_size": 2}, "cp is 2 and sp is 2"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "with shards, not with replicas alone"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "with shards, not with replicas alone"),
        ({}, "sizes are all 1"),
        ({"tp_size": 0}, "size of axis 'tp' is 0"),
        ({"tp_size": 2.0}, "size of axis 'tp' is 2.0"),
        ({"pp_size": 2}, "'pp_size' is not a size"),
    ],
)
def test_refusals(sizes, message):
    """What accelerate refuses is a ValueError here too; an unknown size and no size above 1 are refused as well."""
    with pytest.raises((PlanError, LayoutError), match=message) as raised:
        plan(**sizes)
    assert isinstance(raised.value, ValueError)


def test_a_config_or_sizes():
    """Not both, and nothing that has no sizes."""
    config = SimpleNamespace(tp_size=2)
    assert plan(config) == plan(tp_size=2)
    for bad, sizes in ((config, {"tp_size": 2}), (7, {}), ("tp_size=2", {})):
        with pytest.raises(PlanError, match="cannot be read together"):
            plan(bad, **sizes)


def test_sizes_of_the_environment(monkeypatch):
    """A size that is not given, or None, is what accelerate's launcher put into the environment."""
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert plan(dp_shard_size=2).mesh == rm.Mesh(tp=4, dp_shard=2)
    assert plan(SimpleNamespace(dp_shard_size=2, tp_size=None)).mesh == rm.Mesh(tp=4, dp_shard=2)
    assert plan(dp_shard_size=2, tp_size=1).mesh == rm.Mesh(dp_shard=2)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "four")
    with pytest.raises(PlanError, match="PARALLELISM_CONFIG_TP_SIZE='four'"):
        plan(dp_shard_size=2)
