"""Known layouts: rankmesh's own table of how frameworks shard models, without any of them."""

import json
from math import prod

import pytest

from rankmesh.core.model import Transformer
from rankmesh.errors import LayoutError
from rankmesh.readers.model import described
from rankmesh.readers.models import CONFIGS, transformer
from rankmesh.transfer.layouts.known import KNOWN, SIDES
from rankmesh.transfer.layouts.known import known as known_by
from rankmesh.transfer.layouts.layout import Layout

# Small, with fewer key-value heads than ranks, and a vocabulary that is padded.
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
         "num_hidden_layers": 4, "vocab_size": 100}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS_OF = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen3_moe": EXPERTS | {"num_experts": 8},
       "deepseek_v3": EXPERTS | {"n_routed_experts": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                                 "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 3}}  # fmt: skip
CONFIGS_OF["kimi_k2"] = CONFIGS_OF["deepseek_v3"]
TEXTS = ("megatron:tp=2,pp=2", "megatron:tp=2,dp=2,ep=2,pp=2,vpp=2", "vllm:tp=4,pp=3", "vllm:tp=2,dp=2,ep=1",
         "sglang:tp=4,pp=3,dp=2,ep=2", "transformers:tp=2,fsdp=2",
         "transformers:fsdp=4", "sglang:tp=4")  # fmt: skip


def known(text, config):
    """The layout of a side in the table."""
    return known_by(text, config, described)


def _small(kind, **more):
    return SMALL | CONFIGS_OF.get(kind, {}) | {"model_type": kind, **more}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KNOWN)
def test_the_ranks_of_a_layout_hold_every_element(kind, text):
    """Whatever the axes, views, copies and padding: the shards of all ranks cover each tensor; JSON keeps them."""
    try:
        found = known(text, _small(kind))
    except LayoutError as error:
        assert "this model has none" in str(error)  # noqa: PT017  - expert parallelism without experts
        assert kind not in CONFIGS_OF
        return
    assert found is not None or text.partition(":")[0] in KNOWN[kind].unknown
    for name, sharding in found.shardings.items() if found else ():
        covered = {box for rank in range(found.mesh.size) for box in sharding.of(rank).boxes}
        assert sum(prod(high - low for low, high in box) for box in covered) == prod(sharding.shape), name
    assert found is None or Layout.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config["model_type"] in KNOWN])
def test_the_tensors_of_a_model_have_its_parameters(name):
    """The published sizes: the table's tensors are the transformer's parameters, but for norms of heads and biases."""
    found = known("transformers:", CONFIGS[name])
    counted = sum(prod(sharding.shape) for sharding in found.shardings.values())
    assert counted == pytest.approx(Transformer(**transformer(CONFIGS[name])).parameters, rel=1e-4)


def test_what_each_framework_does_with_a_tensor():
    """Copies of key-value heads, padding, uneven stages, tied tables, experts: as the frameworks' own loaders do it."""
    llama = _small("llama")
    vllm = known("vllm:tp=4,pp=3", llama).shardings
    assert [vllm["model.layers.0.self_attn.k_proj.weight"].of(rank).boxes[0][0] for rank in range(4)] == [
        (0, 8), (0, 8), (8, 16), (8, 16)]  # fmt: skip
    assert vllm["model.embed_tokens.weight"].of(3).boxes == (((96, 100), (0, 64)),)
    assert [vllm[f"model.layers.{layer}.input_layernorm.weight"].at["pp"] for layer in range(4)] == [
        (0,), (1,), (1,), (2,)]  # fmt: skip
    tied = known("megatron:tp=2,pp=2", llama | {"tie_word_embeddings": True}).shardings
    assert (tied["model.embed_tokens.weight"].at, "lm_head.weight" in tied) == ({"pp": (0, 1)}, False)
    assert tied["model.embed_tokens.weight"].padded == {0: 256}
    padded = [known(side, _small("llama", vocab_size=130)).shardings["lm_head.weight"].padded for side in SIDES]
    assert padded == [{0: 256}, {0: 192}, None, {0: 192}]  # megatron, sglang, transformers, vllm
    mixed = known("vllm:tp=2,dp=2,ep=1", _small("qwen3_moe", num_experts=6)).shardings
    owners = [mixed[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].shard_map.ranks.tolist() for e in range(6)]
    assert owners == [[[0]], [[0]], [[1]], [[1]], [[2]], [[3]]]


@pytest.mark.parametrize(
    "text",
    ["megatron:tp=2,ep=2,dp=2", "vllm:tp=2,ep=1", "vllm:pp=8", "vllm:tp=0", "sglang:ep=2", "vllm:tp=" + "9" * 5000],
)
def test_sizes_that_a_framework_refuses(text):
    """Experts of a model that has none, more stages than layers, no ranks, parts that do not divide."""
    with pytest.raises(LayoutError):
        known(text, _small("llama"))
    with pytest.raises(LayoutError, match="more than any model has"):
        known(text.partition(":")[0], _small("llama", num_hidden_layers=10**9))
    with pytest.raises(LayoutError, match="4 ranks of tp do not divide the 126 of"):
        known("vllm:tp=4", _small("llama", intermediate_size=126))


def test_what_the_table_does_not_have():
    """Another family, another side, a quantised model: None, so that the framework itself is asked."""
    llama = _small("llama")
    assert known("vllm:tp=2", _small("gpt2")) is None
    assert known("trt:tp=2", llama) is None
    assert known("megatron:tp=2", _small("gemma3_text")) is None
    assert known("vllm:tp=2", llama | {"quantization_config": {"quant_method": "fp8"}}) is None
    assert set(SIDES) == {"megatron", "sglang", "transformers", "vllm"}
