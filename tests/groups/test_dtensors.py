"""DTensors as shardings, against what their ranks really hold."""

from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.transfer import brute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend import dtensors
from rankmesh.backend.fake_world import fake_world
from rankmesh.errors import LayoutError


def _placed(shape, placements):
    """Whether each rank's DTensor holds what its sharding says."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    placed = distribute_tensor(whole, mesh, placements)
    sharding = dtensors.sharding_of(placed)
    expected = torch.tensor(brute.local(sharding, dist.get_rank())).float()
    return torch.equal(placed.to_local(), expected.reshape(placed.to_local().shape)), sharding.cut


def test_dtensors_of_any_placement():
    """6 simulated ranks: shards of either axis or both, even and uneven, on one dimension or two."""
    cases = [
        ((12, 4), [Shard(0), Replicate()], ("dp", None)),
        ((7, 5), [Replicate(), Shard(1)], (None, "tp")),
        ((7, 5), [Shard(1), Shard(0)], ("tp", "dp")),
        ((12, 4), [Shard(0), Shard(0)], ("dp-tp", None)),
        ((7, 2), [Shard(0), Shard(-2)], ("dp-tp", None)),
    ]
    for shape, placements, cut in cases:
        assert sim.run(_placed, 6, shape, placements) == [(True, cut)] * 6


def test_dtensors_round_trip():
    """Every cut of every axis in every order: placements of it, a DTensor with them, and the same sharding again."""
    mesh, shape, known = rm.Mesh(tp=2, dp=3, pp=2), (24, 36), set()
    with fake_world(0, 12):
        device_mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
        for axes, places in product(permutations(("tp", "dp", "pp")), product((None, 0, 1), repeat=3)):
            names = ["-".join(axis for axis, place in zip(axes, places, strict=True) if place == d) for d in (0, 1)]
            one = rm.Sharding(mesh, tuple(name or None for name in names), shape)
            placements, local = one.to_dtensor(device_mesh), torch.empty(one.of(0).shape)
            how = {"run_check": False, "shape": torch.Size(shape), "stride": (36, 1)}
            assert rm.Sharding.from_dtensor(DTensor.from_local(local, device_mesh, placements, **how)) == one
            known.add(one.cut)
    assert len(known) == 1 + 6 + 3 * 6 + 24


def test_what_a_dtensor_cannot_say_is_named():
    """Positions, parts, padding, and a mesh of other axes."""
    with fake_world(0, 4):
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        for option, value in (("at", {"pp": 1}), ("parts", (6, 2)), ("padded", {0: 10})):
            with pytest.raises(LayoutError, match=f"a DTensor has cuts only, and this sharding has {option}="):
                rm.Sharding(rm.Mesh(tp=2, pp=2), ("tp",), (8,), **{option: value}).to_dtensor(device_mesh)
        with pytest.raises(LayoutError, match="make the DeviceMesh of the same ranks and axes"):
            rm.Sharding(rm.Mesh(tp=4), ("tp",), (8,)).to_dtensor(device_mesh)


def _fully_sharded(me):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    made = {name: dtensors.sharding_of(tensor) for name, tensor in model.named_parameters()}
    good = {}
    for name, tensor in model.named_parameters():
        numbers = torch.from_numpy(brute.local(made[name], dist.get_rank()))
        good[name] = torch.equal(tensor.to_local(), whole[name].reshape(-1)[numbers])
    return good, {name: sharding.cut for name, sharding in made.items()}


def test_fsdp_over_tensor_parallelism(ranks):
    """4 ranks, gloo: FSDP2's strided shards are cut by tp first, then by dp."""
    for good, cuts in ranks(4, _fully_sharded):
        assert all(good.values()), good
        assert cuts["0.weight"] == ["tp-dp", None]
        assert cuts["1.weight"] == ["dp", "tp"]


def test_partial_dtensors_and_meshes_with_holes_are_refused():
    """Elements that are sums are nowhere; a mesh of ranks 0 and 2 is part of another."""
    with pytest.raises(LayoutError, match=r"placement .* does not say where"):
        dtensors._dim(SimpleNamespace(), 2)
    holes = SimpleNamespace(mesh=torch.tensor([0, 2]), mesh_dim_names=("dp",), ndim=1)
    with pytest.raises(LayoutError, match=r"gaps between its ranks \[0, 2\]"):
        dtensors.mesh_of(holes)
