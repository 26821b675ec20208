import json

import pytest
from tests.readers.families import FILE

from rankmesh.core.model import Transformer
from rankmesh.errors import PlacementError
from rankmesh.readers.models import FAMILIES, transformer

KNOWN = json.loads(FILE.read_text(encoding="utf-8"))


def test_each_family_is_known():
    """The file has the real model of each family, and one that is not known is refused with those that are."""
    assert set(KNOWN) == set(FAMILIES)
    with pytest.raises(PlacementError) as caught:
        transformer({"model_type": "mamba2", "hidden_size": 64})
    assert caught.value.received == "mamba2"


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_parameters_are_those_of_the_real_model(kind):
    """A config that states only its main sizes means the model that transformers builds, but for biases."""
    fields = transformer(KNOWN[kind]["config"])
    assert Transformer(**{"ffn_hidden_size": 8192, **fields}).parameters == pytest.approx(
        KNOWN[kind]["parameters"], rel=0.003
    )


@pytest.mark.parametrize(
    ("kinds", "windowed"), [(["full_attention"] * 12, None), (["sliding"] * 3 + ["full_attention"] * 9, 3)]
)
def test_layer_types_go_before_the_familys_pattern(kinds, windowed):
    """A list of each block's kind counts, whatever the family's own pattern is."""
    config = KNOWN["gemma3_text"]["config"]
    assert transformer({**config, "layer_types": kinds}).get("windowed") == windowed
    assert transformer(config)["windowed"] == 10


def test_the_texts_of_a_model_with_images():
    """What has a text_config is read as its text's layers."""
    config = {"model_type": "llama4", "text_config": KNOWN["llama4_text"]["config"], "vision_config": {}}
    assert transformer(config) == transformer(KNOWN["llama4_text"]["config"])
