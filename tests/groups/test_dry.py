import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import rankmesh as rm
from rankmesh.backend.registries import registries

WORLD = 131_072
PLAN = rm.recipes.megatron(world_size=WORLD, tp=8, cp=2, pp=8, ep=8, etp=1)


def _dry(me, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    before = registries()
    resources = me.resources()
    with rm.connect(PLAN) as groups:
        seen = {name: [dist.get_rank(group.pg), dist.get_world_size(group.pg)] for name, group in groups.items()}
        tp = dist.get_process_group_ranks(groups["tp"].pg)
        dist.all_reduce(torch.ones(1), group=groups["dp_cp"].pg)
    used = {key: value - resources[key] for key, value in me.resources().items() if key != "memory"}
    return {"seen": seen, "tp": tp, "back": registries() == before, "used": used}


@pytest.mark.parametrize("rank", [0, 70_000, WORLD - 1])
def test_any_rank_of_a_large_world_runs_dry(ranks, rank):
    """1 process plays one rank of 131,072: positions and sizes of all its groups, and nothing left."""
    (ran,) = ranks(1, _dry, rank, world=None)
    local = PLAN.of(rank)
    assert ran["seen"] == {name: [group.rank, group.size] for name, group in local.items()}
    assert ran["tp"] == list(local["tp"].ranks) == [rank // 8 * 8 + place for place in range(8)]
    assert ran["back"] is True
    assert ran["used"] == {"descriptors": 0, "threads": 0}
