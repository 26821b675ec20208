"""Bugs of peers, most of which give wrong numbers without a word: the naive code, and what our groups make of it."""

from math import isclose, sqrt

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh import sim


def wrong(function, ranks, *args):
    """The first failure of a run that must fail."""
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(function, ranks, *args)
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
    """8 ranks, cp=2: None means the world, and runs; a handle has its group."""
    assert "8 parts" in str(wrong(_attends, LONG, None))
    sim.run(_attends, LONG, "cp")


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


# -- a group that only some have -----------------------------------------------------------------------------------

PIPELINE = rm.recipes.megatron(4, pp=4)


def _ties_embeddings(groups, ours):
    """Every stage reduces the embedding's gradient; the middle ones have no such group."""
    grad = torch.ones(1)
    if ours:
        if "embd" in groups:
            dist.all_reduce(grad, group=groups["embd"].pg)
    else:
        group = groups["embd"].pg if "embd" in groups else None
        dist.all_reduce(grad, group=group)
    return float(grad)


def test_embedding_groups():
    """4 stages: where the group is None the middle stages wait in the world for the ends, which have gone on."""
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(_ties_embeddings, PIPELINE, False)
    found = caught.value.failures
    assert {rank: (error.kind, error.group) for rank, error in found.items()} == {
        1: ("deadlock", "the world"),
        2: ("deadlock", "the world"),
    }
    assert "rank 0  has returned" in str(found[1])
    assert sim.run(_ties_embeddings, PIPELINE, True) == [2.0, 1.0, 1.0, 2.0]


# -- an axis that is the world -------------------------------------------------------------------------------------


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
