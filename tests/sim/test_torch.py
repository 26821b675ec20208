import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from rankmesh import sim
from rankmesh.testing.strategies import plans

# torch 2.13 gave these two their names.
_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_scatter = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd


def _functional():
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.full((size,), rank + 1.0, requires_grad=True)
    gathered = _gather(x, 0, world)
    (gathered * torch.arange(float(size * size))).sum().backward()
    parts = _scatter(torch.ones(size, requires_grad=True) * rank, "sum", 0, world)
    swapped = functional.all_to_all_single_autograd(x.detach(), None, None, world)
    whole = functional.all_reduce(x.detach(), "max", world)
    output = functional.broadcast(x.detach(), 1, world)
    return [tensor.tolist() for tensor in (x.grad, parts, swapped, whole, output)]


def test_functional_collectives_and_their_gradients():
    """3 ranks: functional collectives reach the simulator through torch's C++, and gradients flow back."""
    expected = []
    for rank in range(3):
        grad = [sum(1.0 * (3 * rank + column) for _ in range(3)) for column in range(3)]
        expected.append([grad, [3.0], [1.0, 2.0, 3.0], [3.0] * 3, [2.0] * 3])
    assert sim.run(_functional, 3) == expected


def _differentiable():
    x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    (differentiable.all_reduce(x) ** 2).sum().backward()
    return x.grad.tolist()


def test_differentiable_collectives():
    """3 ranks: the gradient of (sum of x)^2, summed over the ranks, is 3 * 2 * 6."""
    assert sim.run(_differentiable, 3) == [[36.0, 36.0]] * 3


def _tensors(groups):
    mesh = groups.device_mesh("dp", "tp")
    whole = torch.arange(32.0).reshape(4, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    product = sharded @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    turned = product.redistribute(mesh, [Replicate(), Shard(1)])
    return (
        torch.equal(sharded.full_tensor(), whole),
        torch.equal(turned.full_tensor(), whole @ whole.t()),
        any(isinstance(placement, Partial) for placement in product.placements),
        (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")),
    )


@pytest.mark.parametrize("again", range(2))
def test_device_meshes_and_distributed_tensors(again):
    """4 ranks: DTensor over the plan's own groups; each rank has its own coordinate, also in a second run."""
    found = sim.run(_tensors, "tp=2,dp=2")
    assert [rank[:3] for rank in found] == [(True, True, True)] * 4
    assert [rank[3] for rank in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def _mesh(groups):
    return groups.device_mesh("dp", "tp")


def test_meshes_of_two_ranks_are_not_equal():
    """4 ranks: torch keeps what it computed for a mesh, so no rank's mesh may be taken for another's."""
    meshes = sim.run(_mesh, "tp=2,dp=2")
    assert len(set(meshes)) == 4
    assert all(mesh == mesh for mesh in meshes)


def _starts_itself():
    dist.init_process_group("nccl")
    subgroup, _ = dist.new_subgroups(2)
    number = torch.ones(1)
    dist.all_reduce(number, group=subgroup)
    backend = dist.get_backend()
    dist.destroy_process_group()
    return float(number), backend, dist.is_initialized()


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
def test_a_program_that_starts_its_own_world():
    """4 ranks: init_process_group meets the other ranks without an address, whatever backend it names."""
    assert sim.run(_starts_itself, 4, initialise=False) == [(2.0, "nccl", False)] * 4


def _all_groups(groups):
    wrong = []
    for name, group in groups.items():
        number = torch.tensor([dist.get_rank(), 1])
        dist.all_reduce(number, group=group.pg)
        if number.tolist() != [sum(group.ranks), group.size]:
            wrong.append(name)
    return wrong


@settings(max_examples=15, deadline=None)
@given(plans(max_size=12), st.one_of(st.just("deterministic"), st.integers(0, 99)))
def test_every_group_of_any_plan(plan, order):
    """Random plans, with views, picks, levels and options, in random orders: every group all-reduces exactly."""
    assert sim.run(_all_groups, plan, order=order) == [[]] * plan.world_size


def _single(groups):
    return type(groups["pp"].pg).__name__, type(groups["tp"].pg).__name__


def test_groups_of_one_rank_stay_local():
    """2 ranks: a group of one rank is the library's own local group, others are simulated."""
    assert sim.run(_single, "tp=2,pp=1") == [("SingleRankGroup", "SimulatedGroup")] * 2
