import json

import pytest

from rankmesh.errors import PlacementError
from rankmesh.placement import Training
from rankmesh.readers.model import read_model
from rankmesh.readers.models import CONFIGS

SCRIPT = """\
#!/bin/bash
ARGS="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 $ARGS --ffn-hidden-size 14336 --swiglu \\
  --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192 --global-batch-size 512 \\
  --micro-batch-size 2 --sequence-parallel --use-distributed-optimizer
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def script(tmp_path):
    """Read the model of the script, with these flags in the place of --sequence-parallel."""

    def read(flags="--sequence-parallel"):
        (tmp_path / "train.sh").write_text(SCRIPT.replace("--sequence-parallel", flags))
        return read_model(str(tmp_path / "train.sh"))

    return read


@pytest.fixture
def config(tmp_path):
    """Read the model of a config.json."""

    def read(fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_model(str(tmp_path / "config.json"))

    return read


def test_three_ways_to_say_one_model(script, config):
    """A Megatron script, a config.json, by type or class, and a name give one transformer; the script has the batch."""
    model, training = script()
    assert model == config(CONFIG)[0] == read_model("llama3-8b")[0]
    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    assert model == config(fields | {"architectures": ["LlamaForCausalLM"]})[0]
    how = Training(**training)
    assert (how.batch, how.microbatch, how.sequence, how.sequence_parallel, how.zero) == (512, 2, 8192, True, 1)
    assert {"recompute", "precision", "overlap"}.isdisjoint(training)


def test_a_script_says_how_it_trains(script):
    """Recomputation, FP8 and overlapped tensor parallelism of a Megatron script are those of its flags."""
    how = Training(
        **script("--sequence-parallel --recompute-granularity full --fp8-format hybrid --tp-comm-overlap")[1]
    )
    assert (how.recompute, how.precision, "tp" in how.overlap) == ("full", "fp8", True)


def test_experts_of_a_config(config):
    """Experts, shared ones and their units have other names in every model."""
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
    model, _ = config(CONFIG | experts)
    assert (model.experts, model.top_k, model.moe_ffn_hidden_size, model.shared_ffn_hidden_size) == (64, 6, 1408, 2816)


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 129280, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_latent_attention_and_dense_layers(config):
    """DeepSeek-V3 has 671 billion parameters, of which a token uses 37."""
    model, _ = config(DEEPSEEK)
    assert model.parameters / 1e9 == pytest.approx(671.0, rel=0.001)
    assert model.active / 1e9 == pytest.approx(37.5, rel=0.02)
    assert (model.expert_layers(0, 61), model.expert_layers(0, 3), model.expert_layers(2, 5)) == (58, 0, 2)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"model_type": "mamba2"}, "the model type 'mamba2' is not known"),
        ({"model_type": None}, "the config has no model_type, and architectures is None"),
        ({"model_type": None, "architectures": ["GemmaForCausalLM"]}, r"architectures is \['GemmaForCausalLM'\]"),
        ({"model_type": None, "architectures": 5}, "architectures is 5"),
        ({"hidden_size": {}}, "hidden of the model is {}"),
        ({"n_shared_experts": "x"}, "n_shared_experts of the model is 'x'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers of the model is 3"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank of the model is '512'"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim of the model is None"),
    ],
)
def test_models_of_another_form(config, change, output):
    """A type that is not known and a value that is no number are refused by name, not read as Llama's."""
    with pytest.raises(PlacementError, match=output):
        config(DEEPSEEK | change)


def test_published_sizes():
    """The models by name have the number of parameters that their names say."""
    billions = {
        "llama3-8b": 8.0, "llama3-70b": 70.6, "llama3-405b": 405.9, "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6,
        "qwen3-8b": 8.19, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "deepseek-v3": 671.0,
        "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "gemma3-1b": 1.0, "gemma3-27b": 27.0,
    }  # fmt: skip
    for name, size in billions.items():
        assert read_model(name)[0].parameters / 1e9 == pytest.approx(size, rel=0.005), name
    assert read_model("mixtral-8x7b")[0].active / 1e9 == pytest.approx(12.9, rel=0.01)
    assert set(CONFIGS) == set(billions)


@pytest.mark.parametrize(
    ("pattern", "dense", "every", "count"),
    [("([0]*3+[1]*29)", 3, 1, 29), ("[0, 1]*16", 0, 2, 16), ("2", 0, 2, 16), ("[1]*32", 0, 1, 32)],
)
def test_which_blocks_of_megatron_have_experts(script, pattern, dense, every, count):
    """A list of each block and a number mean the same blocks as Megatron's; its defaults fill what is left out."""
    model, _ = script(f"--num-experts 8 --moe-layer-freq '{pattern}'")
    assert (model.dense_layers, model.expert_every, model.expert_layers(0, 32)) == (dense, every, count)
    assert (model.top_k, model.kv_heads) == (2, 8)


@pytest.mark.parametrize(
    "arguments",
    ["--moe-layer-freq '[1]*3+[0]*29'", "--moe-layer-freq '[0]*3+[1]*3'", "--moe-layer-freq 'f(3)'",
     "--moe-ffn-hidden-size $UNSET_SIZE", "--hybrid-override-pattern M-M-"],
)  # fmt: skip
def test_what_changes_the_blocks_is_not_ignored(script, arguments):
    """A pattern, a size or a kind of block that is not understood is refused, as the model would be another one."""
    with pytest.raises(PlacementError, match=f"train.sh:5: {arguments.split()[0]}"):
        script(f"--num-experts 8 {arguments}")


def test_latent_attention_and_windows_of_megatron(script, config):
    """DeepSeek-V3's arguments have its parameters; GPT-OSS's windows are in every second block."""
    model, _ = script(
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --window-size 127,0 --window-attn-skip-freq 2"
    )
    assert (model.width, model.value_width, model.window, model.windowed) == (192, 128, 128, 16)
    other, _ = config({**DEEPSEEK, "hidden_size": 4096, "num_attention_heads": 32})
    assert model.attention_weights == other.attention_weights


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1]", "a mapping of names"),
        ("a: [", "is not valid YAML"),
        ("layers: 2", "the model has no hidden, heads, vocabulary"),
        ("layer: 2", "unknown field 'layer'; known are"),
        ("#!/bin/bash\necho\n", "starts no training"),
    ],
)
def test_models_that_are_none(tmp_path, text, match):
    """A file that describes no model says what it lacks."""
    (tmp_path / "model").write_text(text)
    with pytest.raises(PlacementError, match=match):
        read_model(str(tmp_path / "model"))
    with pytest.raises(PlacementError, match="cannot be read"):
        read_model(str(tmp_path / "none"))
