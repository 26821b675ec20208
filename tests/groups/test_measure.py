import pytest
import torch.distributed as dist

import rankmesh as rm
from rankmesh.sim import RanksFailed, run


def _measured(groups):
    seen = []
    found = groups.measure((64, 4096), progress=lambda done, total: seen.append((done, total)))
    dist.barrier()
    return found, seen, groups.world.default.store.num_keys()


def test_every_rank_gets_one_measurement():
    """8 simulated ranks: all kinds, sizes and collectives, the same on each; progress to the end; no key is left."""
    (first, seen, keys), *others = run(_measured, "tp=2,dp=2,pp=2", timeout=60)
    assert all(found == first for found, _, _ in others)
    assert seen[-1] == (len(seen), len(seen))
    assert keys <= run(lambda groups: groups.world.default.store.num_keys(), "tp=2,dp=2,pp=2", timeout=60)[0]
    told = {(row.name, row.collective) for row in first.rows}
    three = ("all-reduce", "all-gather", "reduce-scatter")
    assert told == {("pp", "send/recv"), *((name, what) for name in ("tp", "dp") for what in three)}
    assert all(group.alone is not None for row in first.rows for group in row.groups)
    assert {row.name for row in first.hops} == {"tp", "dp", "pp"}


def test_ranks_that_a_kind_leaves_out():
    """4 simulated ranks, of which the ends of pp are a kind: the others wait at its barriers."""
    plan = rm.Plan(rm.Mesh(pp=4), [rm.GroupSpec("pp"), rm.GroupSpec("embd", axes="pp", pick=rm.ends)])
    found = run(lambda groups: groups.measure((64,), kinds=["embd"]), plan, timeout=60)
    assert {row.name for row in found[1].rows} == {"embd"}
    assert found[1].rows[0].groups[0].ranks == (0, 3)


def _sized(groups, sizes):
    return groups.measure(sizes)


def test_sizes_that_are_none():
    """Sizes are bytes, at least one of them."""
    for sizes in ((), (0,)):
        with pytest.raises(RanksFailed, match="bytes that a rank holds"):
            run(_sized, "tp=2", sizes, timeout=60)
