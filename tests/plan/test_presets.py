"""Every preset is a layout of its world; ``presets.json`` has the published numbers with their sources."""

import pytest

from rankmesh import PlanError
from rankmesh.core import presets
from rankmesh.readers import source


@pytest.mark.parametrize("name", presets.PRESETS)
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
