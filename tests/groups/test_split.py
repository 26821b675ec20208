"""Worlds that are bound to a device, without one: which splits each rank would take part in."""

import random
from datetime import timedelta

import pytest
import torch

import rankmesh as rm
from rankmesh.errors import ConnectError
from rankmesh.groups import LiveGroups, torch_private
from rankmesh.groups.connect import _check_lazy, _check_world

CUDA = torch.device("cuda", 0)


def _world(rank, size, *, bound=True):
    return torch_private.World(rank, size, None, "cpu:gloo,cuda:nccl", timedelta(seconds=9), CUDA if bound else None)


def _splits(plan, rank, monkeypatch):
    """What one rank does to the world's communicator: the colour of each split, None where it declines."""
    done = []
    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "create", lambda _, **how: done.append((how["name"], tuple(how["ranks"]))))
        patch.setattr(torch_private, "decline_split", lambda _: done.append(None))
        patch.setattr("rankmesh.groups.live.alone", lambda **_: None)
        patch.setattr(torch_private, "nccl_options", lambda *_: None)
        patch.setattr(torch_private, "check_backend", lambda _: None)
        LiveGroups(plan, _world(rank, plan.world_size), 0, {}, timedelta(seconds=9)).create_all()
    return done


def _consistent(plan, monkeypatch):
    """Every rank takes part in equally many splits, and the members of a group split at the same one of them."""
    every = [_splits(plan, rank, monkeypatch) for rank in range(plan.world_size)]
    assert len({len(done) for done in every}) == 1, plan
    for step in zip(*every, strict=True):
        for rank, did in enumerate(step):
            if did is not None:
                assert rank in did[1]
                assert all(step[member] == did for member in did[1]), (plan, did)
    return len(every[0])


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "pp": 4, "ep": 2}, {"pp": 8}])
def test_every_rank_takes_part_in_every_split_of_megatrons_groups(monkeypatch, sizes):
    """16 ranks, none of them real: one split for each kind that does not share, the same on every rank."""
    plan = rm.recipes.megatron(16, **sizes)
    kinds = [names for names in plan.sharing if plan.groups(names[0]).size > 1]
    assert _consistent(plan, monkeypatch) == len(kinds)


def test_every_rank_takes_part_in_every_split_of_uneven_groups(monkeypatch):
    """200 random plans on 8 ranks, some of them outside the mesh: members split where the others decline."""
    source = random.Random(3)  # noqa: S311  - the same plans in every run
    for _ in range(200):
        mesh = rm.Mesh(a=2, b=source.choice([1, 2]), c=source.choice([1, 2]), offset=0)
        axes = ("a", "b", "c", "a-b", "b-c", "a-b-c")
        specs = [
            rm.GroupSpec(f"g{number}", source.choice(axes), share=source.random() < 0.7)
            for number in range(source.randint(1, 6))
        ]
        picked = [
            rm.GroupSpec(f"p{number}", "a-b-c", pick=source.sample(range(mesh.size), source.randint(1, mesh.size)))
            for number in range(source.randint(0, 3))
        ]
        _consistent(rm.Plan(mesh, [*specs, *picked], world_size=8), monkeypatch)


def test_a_world_that_is_not_bound_splits_nothing(monkeypatch):
    """16 ranks: nobody declines, as only members create."""
    monkeypatch.setitem(globals(), "CUDA", None)
    assert None not in _splits(rm.recipes.megatron(16, pp=4), 5, monkeypatch)


def test_lazy_groups_are_refused_where_all_ranks_split():
    """A lazy NCCL group in a bound world is refused by name; a lazy gloo group there, or NCCL elsewhere, is not."""
    lazy = rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp", lazy=True)])
    with pytest.raises(ConnectError, match="lazy group 'tp' in a world that is bound to cuda:0"):
        _check_lazy(lazy, _world(0, 2))
    _check_lazy(lazy, _world(0, 2, bound=False))
    _check_lazy(rm.Plan(rm.Mesh(tp=2), [rm.GroupSpec("tp", lazy=True, backend="gloo")]), _world(0, 2))


def test_a_plan_that_leaves_ranks_out_says_so_where_all_ranks_split():
    """Ranks that a plan leaves out would have to decline its splits; without world_size every rank is refused."""
    mesh, specs = rm.Mesh(tp=2), [rm.GroupSpec("tp")]
    with pytest.raises(ConnectError, match="world_size=4"):
        _check_world(rm.Plan(mesh, specs), _world(0, 4))
    _check_world(rm.Plan(mesh, specs, world_size=4), _world(0, 4))
    _check_world(rm.Plan(mesh, specs), _world(0, 4, bound=False))
