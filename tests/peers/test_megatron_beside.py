"""Each release's own functions, groups, globals and refusals beside the drop-in as of that release."""

import json

import pytest
from tests.peers.fetch import folder

COUNT = 60


@pytest.mark.few(1)
@pytest.mark.parametrize("version", ["0.19.2", "0.16.1", "0.17.1", "0.18.2"])
def test_random_configurations_equal_the_release(asked_beside, version):
    """60 configurations, a rank of each: every getter with every flag, every global, every refusal."""
    printed = asked_beside("tests.peers.megatron_beside", folder("megatron-core", version), COUNT, 7)
    found = json.loads(printed.splitlines()[-1])
    assert found["version"].startswith(version)
    if found["wrong"]:
        pytest.fail("\n".join(found["wrong"]), pytrace=False)
    assert found["built"] >= COUNT // 3
    assert found["pieces"] >= (8 if version >= "0.19" else 0)


def test_the_training_loop_is_imported(asked_beside):
    """megatron.training of 0.19.2 under install(): it imports whatever it asks for, and its mpu is the drop-in."""
    assert asked_beside("tests.peers.megatron_imports", folder("megatron-core", "0.19.2")).splitlines()[-1] == "True"
