"""Worlds that are bound to a device, without one: which splits each rank would take part in."""

import math
import random
from datetime import timedelta

import pytest
import torch

import rankmesh as rm
from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import Kind
from rankmesh.errors import ConnectError
from rankmesh.runtime.schedule import check_lazy, check_world, schedule

CUDA = torch.device("cuda", 0)


def _world(rank, size, *, bound=True):
    backend = "cpu:gloo,cuda:nccl"
    return DefaultGroup(rank, size, None, backend, timedelta(seconds=9), CUDA if bound else None)


def _splits(plans, rank, size, *, collective=False, bound=True):
    """What one rank does to the world's communicator: the group of each split, None where it declines."""
    local = {key: plan.of(rank) for key, plan in plans.items()}
    actions = [step.action for step in schedule(plans, local, _world(rank, size, bound=bound), collective=collective)]
    done = []
    for action in actions:
        if isinstance(action, Kind):
            done.append(None)
        elif collective or len(action.ranks) > 1:
            done.append((action.name, tuple(action.ranks)))
    return done


def _consistent(plans, *, collective=False):
    """Every rank takes part in equally many splits, and the members of a group split at the same one of them."""
    size = next(iter(plans.values())).world_size
    every = [_splits(plans, rank, size, collective=collective) for rank in range(size)]
    assert len({len(done) for done in every}) == 1, plans
    for step in zip(*every, strict=True):
        for rank, did in enumerate(step):
            if did is not None:
                assert rank in did[1]
                assert all(step[member] == did for member in did[1]), (plans, did)
    return len(every[0])


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "pp": 4, "ep": 2}, {"pp": 8}])
def test_every_rank_takes_part_in_every_split_of_megatrons_groups(sizes):
    """16 ranks, none of them real: one split for each kind that does not share, the same on every rank."""
    plan = rm.recipes.megatron(16, **sizes)
    kinds = [names for names in plan.sharing if plan.groups(names[0]).size > 1]
    assert _consistent({"": plan}) == len(kinds)


def _random_mesh(source, offset, most):
    sizes = [source.choice([1, 2, 3]) for _ in range(3)]
    while math.prod(sizes) > most:
        sizes[sizes.index(max(sizes))] -= 1
    return rm.Mesh(a=sizes[0], b=sizes[1], c=sizes[2], offset=offset)


def _random_specs(source, size):
    axes = ("a", "b", "c", "a-b", "b-c", "a-b-c")
    shared = [source.random() < 0.7 for _ in range(source.randint(1, 6))]
    picks = [source.sample(range(size), source.randint(1, size)) for _ in range(source.randint(0, 3))]
    return [
        *(rm.GroupSpec(f"g{number}", source.choice(axes), share=share) for number, share in enumerate(shared)),
        *(rm.GroupSpec(f"p{number}", "a-b-c", pick=pick) for number, pick in enumerate(picks)),
    ]


def test_every_rank_takes_part_in_every_split_of_a_job():
    """250 random jobs of 1 to 3 meshes, disjoint, colocated or apart, on 9 ranks, some of them in no mesh or group."""
    source = random.Random(3)  # noqa: S311  - the same jobs in every run
    for _ in range(250):
        left = _random_mesh(source, 0, source.choice([5, 8]))
        meshes = {"left": left}
        if source.random() < 0.6:
            meshes["right"] = _random_mesh(source, left.size, 9 - left.size)
        if source.random() < 0.5:
            meshes["twin"] = rm.Mesh(a=left.size, b=1, c=1)
        job = rm.Job(world_size=9, partial=True, **meshes)
        plans = rm.Plan.of_job(job, {name: _random_specs(source, mesh.size) for name, mesh in meshes.items()})
        _consistent(plans)


def test_a_world_that_is_not_bound_splits_nothing():
    """16 ranks: nobody declines, as only members create."""
    assert None not in _splits({"": rm.recipes.megatron(16, pp=4)}, 5, 16, bound=False)


def test_lazy_groups_are_refused_where_all_ranks_split():
    """A lazy NCCL group in a bound world is refused by name; a lazy gloo group there, or NCCL elsewhere, is not."""
    lazy = rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp", lazy=True)])
    with pytest.raises(ConnectError, match="group 'tp' is lazy, but the world is bound to cuda:0"):
        check_lazy(lazy, _world(0, 2))
    check_lazy(lazy, _world(0, 2, bound=False))
    check_lazy(rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp", lazy=True, backend="gloo")]), _world(0, 2))


def test_a_plan_that_leaves_ranks_out_says_so_where_all_ranks_split():
    """Ranks that a plan leaves out would have to decline its splits; without world_size every rank is refused."""
    mesh, specs = rm.Mesh(tp=2), [rm.GroupSpec("tp")]
    with pytest.raises(ConnectError, match="world_size=4"):
        check_world(rm.Plan(mesh, specs), _world(0, 4), collective=False)
    check_world(rm.Plan(mesh, specs, world_size=4), _world(0, 4), collective=False)
    check_world(rm.Plan(mesh, specs), _world(0, 4, bound=False), collective=False)


def test_a_collective_backend_makes_every_kind_by_all_ranks():
    """8 ranks, some in no group of a kind: every rank takes part in each kind that does not share, lazy ones too."""
    mesh = rm.Mesh(tp=2, dp=4)
    specs = [rm.GroupSpec("tp"), rm.GroupSpec("dp", lazy=True), rm.GroupSpec("ends", "dp", pick=[0, 3])]
    assert _consistent({"": rm.Plan(mesh, [*specs, rm.GroupSpec("again", "tp")])}, collective=True) == 3
