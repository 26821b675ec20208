"""Each preset against the published numbers, written here a second time."""

from dataclasses import dataclass
from math import prod

import pytest

from rankmesh import PlanError
from rankmesh.core import presets
from rankmesh.readers import source


@dataclass(frozen=True)
class Published:
    """Degrees as published or derived; ``ep`` 0 for a model without experts."""

    world: int
    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 0
    etp: int = 1


PUBLISHED = {
    "llama3-405b": Published(16_384, tp=8, pp=16, dp=128),
    "llama3-405b-8192": Published(8_192, tp=8, pp=16, dp=64),
    "llama3-405b-128k": Published(16_384, tp=8, pp=16, dp=8, cp=16),
    "deepseek-v3": Published(2_048, tp=1, pp=16, dp=128, ep=64),
    "megatron-turing-530b": Published(2_240, tp=8, pp=35, dp=8),
    "megatron-turing-530b-3360": Published(3_360, tp=8, pp=35, dp=12),
    "megascale-175b": Published(12_288, tp=8, pp=8, dp=192),
    "megatron-gpt-1t": Published(3_072, tp=8, pp=64, dp=6),
    "megatron-gpt-530b": Published(2_520, tp=8, pp=35, dp=9),
    "bloom-176b": Published(384, tp=4, pp=12, dp=8),
    "opt-175b": Published(992, tp=8, pp=1, dp=124),
    "falcon-180b": Published(4_096, tp=8, pp=8, dp=64),
    "nemotron4-340b": Published(6_144, tp=8, pp=12, dp=64),
    "mixtral-8x7b": Published(64, tp=1, pp=4, dp=16, ep=8),
    "mixtral-8x22b": Published(128, tp=4, pp=8, dp=4, ep=2, etp=4),
    "mixtral-8x22b-folded": Published(128, tp=2, pp=8, dp=8, ep=8),
    "mixtral-8x22b-128k": Published(1_024, tp=8, cp=8, pp=8, dp=2, ep=8),
    "qwen2-57b-a14b": Published(64, tp=2, pp=4, dp=8, ep=4),
    "qwen3-235b-a22b": Published(256, tp=4, cp=2, pp=16, dp=2, ep=8),
    "qwen3-30b-a3b": Published(8, tp=4, pp=2, dp=1, ep=4),
    "skywork-moe": Published(1_536, tp=4, pp=12, dp=32, ep=4),
}


def test_every_preset_is_checked():
    """The table here and the gallery hold the same names."""
    assert set(presets.names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """World size and every degree are the published ones, and multiply to the world."""
    published = PUBLISHED[name]
    plan = source.read(name).plan
    axes = plan.mesh.axes
    assert plan.world_size == plan.mesh.size == published.world
    assert (axes["tp"], axes.get("cp", 1), axes["dp"], axes["pp"]) == (
        published.tp,
        published.cp,
        published.dp,
        published.pp,
    )
    assert prod((published.tp, published.cp, published.dp, published.pp)) == published.world
    if published.ep:
        expert = plan.mesh.view("expert").axes
        assert (expert["ep"], expert["etp"], expert["pp"]) == (published.ep, published.etp, published.pp)
        assert prod(expert.values()) == published.world


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_kind_partitions(name):
    """Each preset builds for its first, middle and last rank, shares pp between its views, and saves."""
    preset, plan = presets.get(name), source.read(name).plan
    for rank in (0, plan.world_size // 2, plan.world_size - 1):
        local = plan.of(rank)
        assert all(rank in group for group in local.values())
        assert local["tp"].ranks == tuple(range(rank // local["tp"].size * local["tp"].size, local["tp"].ranks[-1] + 1))
    if plan.mesh.views:
        assert plan.mesh.groups("pp").tolist() == plan.mesh.groups("pp", view="expert").tolist()
    assert type(plan).from_json(plan.to_json()) == plan
    assert plan.world_size % preset.gpus_per_node == 0
    assert preset.gpus_per_node == 8
    assert preset.source
    assert preset.title


def test_unknown_presets():
    """A preset that there is not is named with those that there are."""
    with pytest.raises(PlanError, match="unknown preset 'gpt5'; the presets are llama3-405b,") as caught:
        presets.get("gpt5")
    assert caught.value.received == "gpt5"
