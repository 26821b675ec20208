"""Bugs of peers that hang: the simulator tells at once who waits for whom, and our groups do not hang."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh import AgreementError, sim
from rankmesh.errors import NotAMember


def failures(function, ranks, *args):
    """The errors of a run that must fail, by rank."""
    with pytest.raises(sim.RanksFailed) as caught:
        sim.run(function, ranks, *args)
    return caught.value.failures


# -- embeddings ----------------------------------------------------------------------------------------------------

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
    found = failures(_ties_embeddings, PIPELINE, False)
    assert {rank: (error.kind, error.group) for rank, error in found.items()} == {
        1: ("deadlock", "the world"),
        2: ("deadlock", "the world"),
    }
    assert "rank 0  has returned" in str(found[1])
    assert sim.run(_ties_embeddings, PIPELINE, True) == [2.0, 1.0, 1.0, 2.0]


def _takes_the_handle(groups):
    return groups["embd"].ranks


def test_no_handle_in_the_middle():
    """4 stages: the handle that would have been None cannot be had in the middle; the error names the members."""
    first, *middle, last = sim.run(_takes_the_handle, PIPELINE, return_exceptions=True)
    assert (first, last) == ((0, 3), (0, 3))
    assert [type(error) for error in middle] == [NotAMember] * 2
    assert "[0, 3]" in str(middle[0])


# -- names ---------------------------------------------------------------------------------------------------------


def _uneven():
    """Ranks 0 and 3 make a group before all make pairs, as embeddings do."""
    rank = dist.get_rank()
    if rank in (0, 3):
        dist.new_group([0, 3], use_local_synchronization=True)
    pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=pair)


UNEVEN = rm.Plan(rm.Mesh(tp=2, pp=2), [rm.GroupSpec("ends", "pp-tp", pick=(0, 3)), rm.GroupSpec("tp")])


def _uneven_ours(groups):
    number = torch.ones(1)
    dist.all_reduce(number, group=groups["tp"].pg)
    return float(number), "ends" in groups


def test_names_that_count():
    """4 ranks: torch's local names count a rank's groups, and hang when the counts differ; ours do not count."""
    found = failures(_uneven, 4)
    assert {error.kind for error in found.values()} == {"deadlock"}
    assert "the order in which groups are made differs" in str(found[1])
    assert sim.run(_uneven_ours, UNEVEN) == [(2.0, True), (2.0, False), (2.0, False), (2.0, True)]


# -- meshes that differ --------------------------------------------------------------------------------------------


def _meshes(ours):
    shape = {"dp": 2, "tp": 2} if dist.get_rank() != 3 else {"dp": 4}
    if ours:
        rm.connect(rm.recipes.axes(rm.Mesh(**shape)))
    else:
        init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def test_meshes_that_differ():
    """4 ranks, one with another mesh: DeviceMesh waits for ever, which the simulator tells; connect names the rank."""
    found = failures(_meshes, 4, False)
    assert {error.kind for error in found.values()} == {"deadlock"}
    assert "rank 3  has returned" in str(found[0])
    agreed = failures(_meshes, 4, True)
    assert {type(error) for error in agreed.values()} == {AgreementError}
    assert agreed[0].ranks == [3]


# -- order ---------------------------------------------------------------------------------------------------------


def _loops_over_all(skip):
    """Every rank makes every group of the world; one rank skips those that it is not in."""
    for members in ([0, 1], [2, 3], [0, 2], [1, 3]):
        if not (skip and dist.get_rank() == 3 and 3 not in members):
            group = dist.new_group(members)
            if dist.get_rank() in members:
                dist.all_reduce(torch.ones(1), group=group)


def test_creation_loops():
    """4 ranks: a rank that skips groups of others names its own differently, which is told where it waits."""
    sim.run(_loops_over_all, 4, False)
    found = failures(_loops_over_all, 4, True)
    assert "have one group under the names" in str(found[3])
