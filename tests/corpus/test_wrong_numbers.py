"""Bugs of peers that give wrong numbers without a word: the naive code, and what its test or our groups make of it."""

from math import isclose, sqrt

import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh import sim
from rankmesh.errors import NotAMember, UnknownGroup


def wrong(function, ranks, *args, **how):
    """The first failure of a run that must fail."""
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(function, ranks, *args, **how)
    return caught.value.__cause__


# -- gradient norms: who counts an expert's gradient? --------------------------------------------------------------

TWO_EXPERTS = rm.recipes.megatron(2, tp=2, ep=2, etp=1)


def _norm(groups, owner_of_experts):
    """One dense parameter that all hold, and one expert on each rank, every gradient 1."""
    counted = torch.zeros(())
    counted += float(groups["tp"].is_first)
    counted += float(groups[owner_of_experts].is_first)
    dist.all_reduce(counted, group=groups["mp"].pg)
    assert isclose(sqrt(counted), sqrt(1 + dist.get_world_size())), f"norm is sqrt({int(counted)})"


def test_gradient_norm():
    """2 ranks, tp=2 ep=2 etp=1: counted by dense tp the norm is sqrt(2); by the experts' own tp it is sqrt(3)."""
    assert "norm is sqrt(2)" in str(wrong(_norm, TWO_EXPERTS, "tp"))
    sim.run(_norm, TWO_EXPERTS, "ep_tp")


# -- expert random numbers: whose stream does a rank resume? -------------------------------------------------------

EXPERTS = rm.recipes.megatron(8, tp=1, pp=2, ep=2)


def _resumes(groups, replicas):
    """Streams seeded by expert rank, advanced, saved once for each set of replicas, and restored."""
    stream = torch.Generator().manual_seed(1024 + 100 * groups["ep"].rank + groups["ep_tp"].rank)
    torch.rand(3, generator=stream)
    local = stream.get_state()
    saved = local.clone()
    dist.broadcast(saved, groups[replicas].root, group=groups[replicas].pg)
    stream.set_state(saved)
    assert torch.equal(stream.get_state(), local), f"expert {groups['ep'].rank} resumes another expert's stream"


def test_expert_random_numbers_on_resume():
    """8 ranks: replicas of dp_cp are not replicas for experts; those of the experts' own data group are."""
    assert "expert 1 resumes" in str(wrong(_resumes, EXPERTS, "dp_cp"))
    sim.run(_resumes, EXPERTS, "ep_dp")


# -- data loading: which sample is this rank's? --------------------------------------------------------------------

LONG = rm.recipes.megatron(8, tp=2, cp=2)


def _loads(groups, index):
    """Ranks that work on one sequence must load the same sample, the others different ones."""
    every = [None] * groups["tp_cp"].size
    dist.all_gather_object(every, groups[index].rank, group=groups["tp_cp"].pg)
    assert len(set(every)) == 1, f"one sequence of samples {sorted(set(every))}"
    others = [None] * groups["dp"].size
    dist.all_gather_object(others, groups[index].rank, group=groups["dp"].pg)
    assert sorted(others) == list(range(groups["dp"].size))


def test_data_loader_index():
    """8 ranks, tp=2 cp=2: indexed by dp_cp, the two halves of a sequence come from two samples; by dp they do not."""
    assert "one sequence of samples [0, 1]" in str(wrong(_loads, LONG, "dp_cp"))
    sim.run(_loads, LONG, "dp")


# -- a group that is None ------------------------------------------------------------------------------------------


def _attends(groups, group):
    """Attention over a sequence that cp cuts; its process group was never set, so it is None."""
    part = torch.full((1,), float(groups["cp"].rank))
    pg = None if group is None else groups[group].pg
    parts = [torch.empty(1) for _ in range(dist.get_world_size(pg))]
    dist.all_gather(parts, part, group=pg)
    assert torch.cat(parts).tolist() == [0.0, 1.0], f"{len(parts)} parts"


def test_context_group_none():
    """8 ranks, cp=2: None means the world, and runs; a handle has its group, and other names have no handle."""
    assert "8 parts" in str(wrong(_attends, LONG, None))
    sim.run(_attends, LONG, "cp")
    with pytest.raises(UnknownGroup):
        LONG.of(0)["context"]


def _asks_for_what_it_is_not_in(groups):
    if groups["pp"].rank == 1:
        with pytest.raises(NotAMember):
            groups["embd"]
        assert groups.get("embd") is None


def test_no_group_stands_for_another():
    """8 ranks, pp=4: a stage without embeddings gets an error for the embedding group, never None or the world."""
    sim.run(_asks_for_what_it_is_not_in, rm.recipes.megatron(8, pp=4))


def _placeholder():
    group = dist.new_group([0, 1])
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    return float(number)


def test_a_group_that_the_rank_is_not_in():
    """4 ranks: torch's placeholder makes a collective a no-op with a warning; the simulator refuses it by name."""
    failed = wrong(_placeholder, 4)
    assert (failed.kind, failed.rank) == ("outside", 2)


# -- positions -----------------------------------------------------------------------------------------------------

PERMUTED = rm.Plan(rm.Mesh(tp=2, dp=2, rank_map=[3, 1, 2, 0]), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])


def _position(groups, ours):
    here = PERMUTED.mesh.coordinate(dist.get_rank())
    pg = groups["tp"].pg
    if not ours:
        pairs = [dist.new_group(list(group)) for group in PERMUTED.groups("tp")]
        pg = pairs[PERMUTED.groups("tp").index_of(dist.get_rank())]
    assert dist.get_rank(pg) == here["tp"], f"position {dist.get_rank(pg)} at coordinate {here['tp']}"


def test_ranks_in_an_order_of_their_own():
    """4 permuted ranks: new_group sorts its ranks, so positions are not coordinates; in our groups they are."""
    assert "at coordinate" in str(wrong(_position, PERMUTED, False))
    sim.run(_position, PERMUTED, True)


# -- results that are not there yet, tensors that are not one block ------------------------------------------------


def _forgets_to_wait(wait):
    number = torch.ones(1)
    work = dist.all_reduce(number, async_op=True)
    if wait:
        work.wait()
    assert float(number) == dist.get_world_size()
    work.wait()


def test_a_forgotten_wait():
    """2 ranks: a result that is used before the wait is wrong on every run, not only on an unlucky one."""
    assert isinstance(wrong(_forgets_to_wait, 2, False), AssertionError)
    sim.run(_forgets_to_wait, 2, True)
