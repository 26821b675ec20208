"""Models: Hugging Face's ``config.json`` as a transformer, and published configs by name, without weights or network.

A value that the file leaves out is the one of the family's config class in transformers. Whether a feed-forward layer
is gated follows from the family, because its activation does not tell. Weights are those before quantisation, as they
are trained; of Gemma 3 these are the texts' layers.

>>> found = transformer({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
...                      "num_attention_heads": 32, "intermediate_size": 14336})
>>> found["experts"], found["top_k"], found["kv_heads"], found["gated"]
(8, 2, 8, True)
>>> CONFIGS["llama3-8b"]["hidden_size"], CONFIGS["qwen3-30b-a3b"]["num_experts"]
(4096, 128)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from rankmesh.core.documents import parse_json
from rankmesh.errors import PlacementError, quoted

__all__ = ["CONFIGS", "FAMILIES", "counts", "latent_attention", "model_type", "named_counts", "transformer"]

# A field of Transformer, and the names that configs have for it; the first that is there counts.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "width": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "expert_every": ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"),
    "dense_layers": ("first_k_dense_replace",),
    "shared_ffn_hidden_size": ("shared_expert_intermediate_size",),
}


@dataclass(frozen=True)
class _Family:
    """The class of a model, and what its config class has for values that a file leaves out.

    Every ``full_every``-th block sees the whole sequence, the others a window; 0: none, 1: each.
    """

    architecture: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    full_every: int = 1
    gated: bool = True


# ``families``: the config classes of transformers 5; tests/readers/families.json has the parameters of their models.
# ``configs``: The Llama 3 Herd of Models (2024), table 3; Mixtral of Experts (2024), table 1; of the others as their
# authors published them. ``counts``: heads, heads of keys and layers of further models, by their names at Hugging Face.
_DATA: Mapping[str, Any] = parse_json(files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
CONFIGS: Mapping[str, Mapping[str, object]] = _DATA["configs"]
FAMILIES: Mapping[str, _Family] = {kind: _Family(**row) for kind, row in _DATA["families"].items()}
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
# Ranks and widths of latent attention; null where a layer has none.
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# A linear attention computes as one over as many tokens: its state of a head, and a chunk.
_CHUNK = 64


def model_type(config: Mapping[str, object]) -> object:
    """Return the ``model_type`` of a ``config.json``, else the type of the class in ``architectures``, None if unknown.

    >>> model_type({"architectures": ["LlamaForCausalLM"]}), model_type({"hidden_size": 64})
    ('llama', None)
    """
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind is None and isinstance(classes, list | tuple):
        return next((name for name, family in FAMILIES.items() if family.architecture in classes), None)
    return kind


def _texts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], object, _Family | None]:
    """Return the config of a model's text layers, their type and their family."""
    texts = config.get("text_config")
    data = texts if isinstance(texts, Mapping) else config
    kind = model_type(data)
    return data, kind, FAMILIES.get(kind) if isinstance(kind, str) else None


def counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return heads, heads of keys, layers and experts of a ``config.json``, those that it or its family states.

    >>> counts({"model_type": "mixtral", "num_attention_heads": 32, "num_hidden_layers": 32})
    {'heads': 32, 'kv_heads': 8, 'layers': 32, 'experts': 8}
    """
    data, _, family = _texts(config)
    data = {**(family.defaults if family else {}), **data}
    names = ["heads", *(["kv_heads"] if family else []), "layers", "experts"]
    found = {name: next((data[key] for key in _FIELDS[name] if type(data.get(key)) is int), 0) for name in names}
    return {name: value for name, value in found.items() if value > 0}


def transformer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Transformer that a ``config.json`` gives; for a model with images, of its text layers.

    Raises ``PlacementError`` for a family that is not known, and for a value that is not a number.
    """
    data, kind, family = _texts(config)
    if family is None:
        problem = (
            f"the config has no model_type, and architectures is {quoted(data.get('architectures'))}"
            if kind is None
            else f"the model type {quoted(kind)} is not known"
        )
        raise PlacementError(
            f"{problem}, so its layers may be of another form; known are {', '.join(FAMILIES)}; set model_type "
            "to one of them if the layers are its, or write a file of Transformer's fields",
            received=kind,
        )
    data = {**family.defaults, **{name: value for name, value in data.items() if value is not None or name in _LATENT}}
    found: dict[str, Any] = {"gated": family.gated, "tied": False}
    for name, names in _FIELDS.items():
        for key in reversed(names):
            found[name] = found.get(name) if data.get(key) is None else data[key]
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, int):
            raise PlacementError(f"{name} of the model is {quoted(value)}; give an integer", name=name)
    found |= _experts(data, found) | _attention(data, family, found) | _window(data, family, found)
    return found


def latent_attention(data: Mapping[str, object], hidden: int, heads: int) -> dict[str, int]:
    """Count the weights of latent attention (MLA): queries, and keys with values, through ranks; one rotary key.

    ``data`` has the names that DeepSeek's configs have. Raises ``PlacementError`` where one is not a number.
    """
    rope, value = _whole(data, "qk_rope_head_dim"), _whole(data, "v_head_dim")
    plain, rank = _whole(data, "qk_nope_head_dim"), _whole(data, "kv_lora_rank")
    low = data.get("q_lora_rank")
    wide = heads * (plain + rope)
    queries = hidden * wide if low is None else (hidden + 1 + wide) * _whole(data, "q_lora_rank")
    keys = hidden * (rank + rope) + rank + rank * heads * (plain + value)
    return {"width": plain + rope, "value_width": value, "attention_weights": queries + keys + heads * value * hidden}


def _experts(data: Mapping[str, Any], found: Mapping[str, int]) -> dict[str, int]:
    """Return the shared experts, and the first blocks without experts."""
    experts: dict[str, int] = {}
    if "intermediate_size_mlp" in data:  # Llama 4: one of the experts' size is shared
        size = _whole(data, "intermediate_size")
        experts |= {"moe_ffn_hidden_size": size, "shared_ffn_hidden_size": size}
    elif data.get("n_shared_experts") and "moe_ffn_hidden_size" in found and "shared_ffn_hidden_size" not in found:
        experts["shared_ffn_hidden_size"] = _whole(data, "n_shared_experts") * found["moe_ffn_hidden_size"]
    dense = data.get("mlp_only_layers")
    if dense:
        if not isinstance(dense, list) or any(layer not in dense for layer in range(len(dense))):
            raise PlacementError(
                f"mlp_only_layers of the model is {quoted(dense)}; only first layers can be without experts here",
                name="mlp_only_layers",
            )
        experts["dense_layers"] = len(dense)
    return experts


def _attention(data: Mapping[str, object], family: _Family, found: Mapping[str, int]) -> dict[str, int]:
    """Return the weights of an attention layer that is not four matrices; the mean of layers that differ."""
    hidden, heads, layers = (found.get(name, 0) for name in ("hidden", "heads", "layers"))
    if data.get("kv_lora_rank") is not None:
        return latent_attention(data, hidden, heads)
    if "linear_num_value_heads" not in data or not layers:
        return {}
    # Gated DeltaNet: queries, keys, values, gates; two numbers a head; a convolution. Full attention has gates, too.
    key = _whole(data, "linear_num_key_heads") * _whole(data, "linear_key_head_dim")
    value = _whole(data, "linear_num_value_heads") * _whole(data, "linear_value_head_dim")
    scalars = 2 * _whole(data, "linear_num_value_heads")
    linear = hidden * (2 * key + 3 * value + scalars) + (2 * key + value) * _whole(data, "linear_conv_kernel_dim")
    full = found["width"] * hidden * (3 * heads + 2 * found["kv_heads"])
    whole = layers - _windowed(data, family, layers)
    return {"attention_weights": round((whole * full + (layers - whole) * linear) / layers)}


def _window(data: Mapping[str, object], family: _Family, found: Mapping[str, int]) -> dict[str, int]:
    """Return the window of a query in tokens, and the number of blocks with this window."""
    window = data.get("attention_chunk_size", data.get("sliding_window"))
    if "linear_key_head_dim" in data:
        window = _whole(data, "linear_key_head_dim") + _CHUNK
    windowed = _windowed(data, family, found.get("layers", 0))
    return {"window": window, "windowed": windowed} if windowed and isinstance(window, int) else {}


def _windowed(data: Mapping[str, Any], family: _Family, layers: int) -> int:
    """Return the number of blocks in which a query does not see the whole sequence."""
    kinds = data.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind != "full_attention" for kind in kinds)
    if data.get("use_sliding_window"):
        return max(layers - int(data.get("max_window_layers", 28)), 0)
    every = int(data.get("full_attention_interval", data.get("sliding_window_pattern", family.full_every)))
    return layers if every == 0 else layers - layers // every


def _whole(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise PlacementError(f"{name} of the model is {quoted(value)}; give an integer of at least 1", name=name)
    return value


def named_counts(name: str) -> dict[str, int]:
    """Return heads, heads of keys, layers and experts of a model by its name at Hugging Face; empty if it is not known.

    >>> named_counts("Qwen/Qwen2.5-7B-Instruct"), named_counts("org/Qwen2.5-7B-merged")
    ({'heads': 28, 'kv_heads': 4, 'layers': 28}, {})
    """
    model = _VARIANT.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
    if model in _DATA["counts"]:
        return dict(zip(("heads", "kv_heads", "layers"), _DATA["counts"][model], strict=True))
    known = next((re.sub(pattern, to, model) for pattern, to in _NAMES.items() if re.fullmatch(pattern, model)), model)
    return counts(CONFIGS[known]) if known in CONFIGS else {}
