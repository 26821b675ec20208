"""DeepSpeed's own PipelineModule end to end, over its grid and over ours."""

import importlib
import sys

import pytest
from tests.peers.fetch import folder


def _train(me, peer, *how):
    """One training, with DeepSpeed on the path."""
    sys.path.insert(0, peer)
    return importlib.import_module("tests.peers.deepspeed_pipeline").train(*how)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_pipeline_trains_as_on_its_own_grid(ranks, zero):
    """4 ranks, 2 stages of 2 replicas, 3 steps: DeepSpeed's engine over an Mpu has the same losses and weights."""
    local, ours = (
        ranks(4, _train, str(folder("deepspeed")), 2, zero, over, limit=150, timeout=100.0)
        for over in ("theirs", "ours")
    )
    for theirs, mine in zip(local, ours, strict=True):
        assert (theirs.pop("ours"), mine.pop("ours")) == (False, True)
        assert mine == theirs
    assert len(set(local[0]["losses"])) == 3
    assert [part["stage"] for part in local] == [0, 0, 1, 1]
