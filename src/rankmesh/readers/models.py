"""Models by name: their shapes by their published ``config.json``, without weights and without network.

Weights are those before quantisation, as they are trained. Of Gemma 3 these are the texts' layers.

>>> CONFIGS["llama3-8b"]["hidden_size"], CONFIGS["qwen3-30b-a3b"]["num_experts"]
(4096, 128)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankmesh.readers.families import counts

__all__ = ["CONFIGS", "named_counts"]

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"}
# fmt: off
_LLAMA = {**_COMMON, "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256,
          "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
_MIXTRAL = {**_COMMON, "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6}
_QWEN = {**_COMMON, "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
         "max_position_embeddings": 40960, "rope_theta": 1e6}
_QWEN_MOE = {**_QWEN, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
             "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GPT_OSS = {**_COMMON, "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "sliding_window": 128,
            "num_experts_per_tok": 4, "max_position_embeddings": 131072, "attention_bias": True}
_GEMMA = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
          "dtype": "bfloat16", "max_position_embeddings": 131072}
# fmt: on


def _sizes(layers: int, hidden: int, heads: int, ffn: int, **others: object) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        **others,
    }


# Source: The Llama 3 Herd of Models (2024), table 3; Mixtral of Experts (2024), table 1; the config.json of the others
# as their authors published them: Mistral's of 8x22B, Qwen's, DeepSeek's, OpenAI's, Google's.
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama3-8b": _LLAMA | _sizes(32, 4096, 32, 14336),
    "llama3-70b": _LLAMA | _sizes(80, 8192, 64, 28672),
    "llama3-405b": _LLAMA | _sizes(126, 16384, 128, 53248),
    "mixtral-8x7b": _MIXTRAL | _sizes(32, 4096, 32, 14336, vocab_size=32000),
    "mixtral-8x22b": _MIXTRAL | _sizes(56, 6144, 48, 16384, vocab_size=32768),
    "qwen3-8b": _QWEN | _sizes(36, 4096, 32, 12288),
    "qwen3-32b": _QWEN | _sizes(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _QWEN_MOE | _sizes(48, 2048, 32, 6144, moe_intermediate_size=768),
    "qwen3-235b-a22b": _QWEN_MOE | _sizes(94, 4096, 64, 12288, moe_intermediate_size=1536),
    "deepseek-v3": _COMMON
    | _sizes(61, 7168, 128, 18432, moe_intermediate_size=2048, num_key_value_heads=128, vocab_size=129280)
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 256,
       "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
       "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
       "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
       "max_position_embeddings": 4096},
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma3-1b": _GEMMA | _sizes(26, 1152, 4, 6912, num_key_value_heads=1, head_dim=256, vocab_size=262144,
                                 sliding_window=512, max_position_embeddings=32768),
    "gemma3-27b": _GEMMA | _sizes(62, 5376, 32, 21504, num_key_value_heads=16, head_dim=128, vocab_size=262208,
                                  sliding_window=1024, query_pre_attn_scalar=168),
}  # fmt: skip

# Heads, heads of keys and layers of further models, by the names of their repositories at Hugging Face.
_COUNTS = """
qwen2.5-0.5b 14 2 24, qwen2.5-1.5b 12 2 28, qwen2.5-3b 16 2 36, qwen2.5-7b 28 4 28, qwen2.5-14b 40 8 48,
qwen2.5-32b 40 8 64, qwen2.5-72b 64 8 80, qwen2-57b-a14b 28 4 28, qwen2-vl-2b 12 2 28, qwen2-vl-7b 28 4 28,
qwen1.5-32b 40 8 64, qwen3-0.6b 16 8 28, qwen3-1.7b 16 8 28, qwen3-4b 32 8 36, qwen3-14b 40 8 40,
qwq-32b 40 8 64, llama-2-7b 32 32 32, llama-2-13b 40 40 40, llama-2-70b 64 8 80, llama-3.2-1b 32 8 16,
llama-3.2-3b 24 8 28, mistral-7b 32 8 32, phi-4 40 10 40, gemma-2-9b 16 8 42, gemma-2-27b 32 16 46,
opt-125m 12 12 12, gpt2 12 12 12
"""
_NAMES: Mapping[str, str] = {
    r"llama-3(\.1)?-8b": "llama3-8b",
    r"llama-3(\.[13])?-70b": "llama3-70b",
    r"llama-3\.1-405b": "llama3-405b",
    r"deepseek-(v3(\.1)?|r1)": "deepseek-v3",
    r"qwen3(-coder)?-30b-a3b": "qwen3-30b-a3b",
    r"gemma-3-(1b|27b)": r"gemma3-\1",
}
# What names another training or number format of the same shape.
_VARIANT = re.compile(
    r"(-(instruct|base|chat|it|pt|hf|fp8|nvfp4|fp4|awq|gptq|int[48]|bf16|w\da\d+|bnb|[48]bit|thinking|dynamic|quantized"
    r"|\d{4}|v0\.\d|zero|terminus)(\.w\da\d+)?)+$"
)


def named_counts(name: str) -> dict[str, int]:
    """Return the heads, heads of keys, layers and experts of a model by its name at Hugging Face, none of another.

    >>> named_counts("Qwen/Qwen2.5-7B-Instruct"), named_counts("org/Qwen2.5-7B-merged")
    ({'heads': 28, 'kv_heads': 4, 'layers': 28}, {})
    """
    model = _VARIANT.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
    if (row := re.search(rf"(?:^|, ){re.escape(model)} ([\d ]+)", _COUNTS, re.MULTILINE)) is not None:
        return dict(zip(("heads", "kv_heads", "layers"), map(int, row[1].split()), strict=True))
    known = next((re.sub(pattern, to, model) for pattern, to in _NAMES.items() if re.fullmatch(pattern, model)), model)
    return counts(CONFIGS[known]) if known in CONFIGS else {}
