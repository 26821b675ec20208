"""Megatron's own GPT, DDP and optimizer on gloo ranks, over each release's own modules and then over the drop-ins.

``MEGATRON=checkout:another`` adds others, such as the head of its repository.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest
from tests.peers.fetch import MEGATRON, folder

DENSE = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "dense": (DENSE, {}),
    "sequence parallel": (DENSE, {"sequence_parallel": True}),
    "interleaved": ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {}),
    "experts": ({"expert_model_parallel_size": 2}, {"experts": 4}),
    "distributed optimizer": ({}, {"sharded": True}),
    "optimizer instances": ({"num_distributed_optimizer_instances": 2}, {"sharded": True}),
}


def _train(me, peer):
    """Every layout over Megatron's own modules, then over ours, in one process."""
    sys.path.insert(0, peer)
    training = importlib.import_module("tests.peers.megatron_training")
    return training.on_both(LAYOUTS)


def _sources():
    """The last release of each series, and checkouts."""
    last = {tuple(version.split(".")[:2]): version for version in MEGATRON}
    releases = [pytest.param(version, None, id=version) for version in last.values()]
    checkouts = filter(None, os.environ.get("MEGATRON", "").split(os.pathsep))
    return releases + [pytest.param(None, path, id=Path(path).name) for path in checkouts]


@pytest.mark.nightly
@pytest.mark.parametrize(("version", "checkout"), _sources())
def test_gpt_trains_as_on_megatrons_own_groups(ranks, version, checkout):
    """4 ranks, 3 steps of each layout: losses, gradient norms and parameters are equal, bit for bit."""
    result = ranks(4, _train, checkout or str(folder("megatron-core", version)), limit=280, timeout=120.0)
    for rank, part in enumerate(result):
        assert part["used"]
        for name in LAYOUTS:
            assert part["ours"][name] == part["theirs"][name], (name, rank)
            assert part["ours"][name]["steps"] == 3
    assert all(any(part["ours"][name]["losses"] for part in result) for name in LAYOUTS)
