from itertools import combinations

import pytest
import torch.distributed as dist
from tests.corpus.step import PLAN, step

from rankmesh import sim

PAIRS = list(combinations(PLAN.kinds, 2))


def _swapped(groups, first, second, where):
    """The step with two groups swapped, on one rank or on all (None)."""
    chosen = dict(groups)
    if where in (None, dist.get_rank()):
        for name, other in ((first, second), (second, first)):
            chosen.pop(name, None)
            if other in groups:
                chosen[name] = groups[other]
    step(chosen)


def test_the_step_is_right():
    """12 ranks: with its own groups the step gives the numbers of one process, in any order of the ranks."""
    for order in ("deterministic", 0):
        sim.run(step, PLAN, order=order, timeout=100)


@pytest.mark.few(5)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_two_groups_swapped(pair):
    """12 ranks: any two kinds swapped on all, or on the first or last rank of both: a wrong number or a divergence."""
    both = [rank for rank in range(PLAN.world_size) if all(name in PLAN.of(rank) for name in pair)]
    for where in (None, both[0], both[-1]):
        with pytest.raises(sim.RanksFailed):
            sim.run(_swapped, PLAN, *pair, where)
