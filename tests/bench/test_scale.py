"""The store operations of a large job: what is replayed is what ranks do."""

import threading

import pytest
from torch.distributed import HashStore

from bench import scale
from bench.scale_text import scale_section
from rankmesh.core.saved import contents

WORLD = 64


@pytest.mark.parametrize("side", scale.SIDES)
def test_all_ranks_come_through(side):
    """No process, 64 ranks as threads on a store in memory: all are through, with the operations that are expected."""
    plan = scale._plan(WORLD)
    fields, store, done, through = contents(plan), HashStore(), [0] * WORLD, []

    def run(rank):
        scale.SIDES[side](scale._Counted(store, done, rank), rank, plan.of(rank), fields, WORLD)
        through.append(rank)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert sorted(through) == list(range(WORLD))
    assert sum(done) == max(sum(done), scale._expected(side, plan))
    assert max(done) < 60 or side == "theirs"
    if side == "theirs":
        assert sum(done) == scale._expected(side, plan)


def test_a_side_that_does_not_finish_is_shown_as_such():
    """The section states medians with their spread, and for a side that was stopped what it would have taken."""
    run = {"seconds": 2.0, "through": 1024, "operations": 10, "expected": 10, "busiest": 1, "limit": 60.0}
    stopped = run | {"seconds": None, "operations": 30, "expected": 300}
    found = {
        "machine": {"cores": 2, "system": "Linux", "load": [0.5, 0, 0]},
        "torch": "2.13.0",
        "rounds": 2,
        "clients": {
            "1024": {"ours": [run, run | {"seconds": 4.0}], "theirs": [run]},
            "10240": {"ours": [run | {"seconds": 8.0}], "theirs": [stopped]},
        },
    }
    text = "\n".join(scale_section(found))
    assert "| 1,024 | rankmesh | 3.00 (2.00 – 4.00) |" in text
    assert "not finished after 60; about 600 at that rate" in text
    assert "10 times as many, rankmesh takes 2.0 times as long" in text
