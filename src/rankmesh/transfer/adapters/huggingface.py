"""Hugging Face models as shardings: shapes by name, and the tensor-parallel plan as transformers states it.

```
"layers.*.self_attn.q_proj": "colwise"      weight ("tp", None)     bias ("tp",)
"layers.*.mlp.down_proj":    "rowwise"      weight (None, "tp")     bias (None,)
anything else                               copies
```

Source: ``base_model_tp_plan`` of transformers' configurations. The shapes are those of a checkpoint
(`rankmesh.transfer.files.Checkpoint.shapes`), or follow from the configuration of a model of the Llama family. Each
expert has names of its own, as in checkpoints: ``mlp.experts.3.gate_proj`` (Qwen 3), ``block_sparse_moe.experts.3.w1``
(Mixtral).

>>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
...           "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 100}
>>> made = shardings(shapes(config), Mesh(tp=2), dtype="bfloat16")
>>> made["model.layers.0.self_attn.k_proj.weight"].of(1).boxes
(((16, 32), (0, 64)),)
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError, quoted
from rankmesh.readers.model import model_type

__all__ = ["LLAMA", "cut_of", "shapes", "shardings"]

# Llama's plan, which Mistral and Qwen share; the embedding and the head are whole in it, and who routes to experts.
LLAMA = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    **dict.fromkeys((f"layers.*.mlp.experts.*.{name}_proj" for name in ("gate", "up")), "colwise"),
    "layers.*.mlp.experts.*.down_proj": "rowwise",
    **dict.fromkeys((f"layers.*.block_sparse_moe.experts.*.{name}" for name in ("w1", "w3")), "colwise"),
    "layers.*.block_sparse_moe.experts.*.w2": "rowwise",
}

# What a style does to a weight (out, in); ``_rep`` and ``_gather_output`` speak of activations.
_STYLES = {"colwise": 0, "rowwise": 1, "replicated": None, "sequence_parallel": None}

Shape = tuple[int, ...]
# Models whose tensors have Llama's names and forms; GPT-OSS, say, fuses and packs its experts.
_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes by name of a model of the Llama family, from its ``config.json``: Llama, Mistral, Mixtral, Qwen 2 and 3.

    Raises ``LayoutError`` where the configuration lacks a size, or has experts that every token goes to.
    """
    try:
        return _shapes(config)
    except KeyError as error:
        raise LayoutError(
            f"the configuration has no {error}, as those of the Llama family have; give shapes of another model "
            "yourself: Checkpoint.open(folder).shapes",
            missing=str(error),
        ) from error


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    kind = model_type(config)
    if kind not in _TYPES:
        found = quoted(config.get("architectures"))
        problem = (
            f"the configuration has no model_type, and architectures is {found}"
            if kind is None
            else f"shapes of model type {quoted(kind)} are not known here"
        )
        raise LayoutError(
            f"{problem}; known are the shapes of {', '.join(_TYPES)}; read others from the checkpoint: "
            "Checkpoint.open(folder).shapes",
            received=kind,
        )
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    made: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = {**_attention(config), **_feed_forward(config, layer)}
        parts |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        made |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    made["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        made["lm_head.weight"] = (vocabulary, hidden)
    return made


def _attention(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], model_type(config)
    width = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    made: dict[str, Shape] = {}
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        made[f"self_attn.{name}_proj.weight"] = (count * width, hidden)
        if config.get("attention_bias", kind == "qwen2"):
            made[f"self_attn.{name}_proj.bias"] = (count * width,)
    if kind in ("qwen3", "qwen3_moe"):
        made |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    made["self_attn.o_proj.weight"] = (hidden, heads * width)
    return made


def _feed_forward(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    """The feed-forward part of one layer, or its experts and their router."""
    hidden = config["hidden_size"]
    if "num_local_experts" in config:
        block, count, width = "block_sparse_moe", config["num_local_experts"], config["intermediate_size"]
        gate, up, down = "w1", "w3", "w2"
    else:
        block, count, width = "mlp", _experts_of(config, layer), config["intermediate_size"]
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if count:
            width = config["moe_intermediate_size"]
    parts = {f"{gate}.weight": (width, hidden), f"{up}.weight": (width, hidden), f"{down}.weight": (hidden, width)}
    if not count:
        return {f"{block}.{name}": shape for name, shape in parts.items()}
    experts = {f"{block}.experts.{e}.{name}": shape for e in range(count) for name, shape in parts.items()}
    return {f"{block}.gate.weight": (count, hidden), **experts}


def _experts_of(config: Mapping[str, Any], layer: int) -> int:
    """How many experts a layer of Qwen has: every ``decoder_sparse_step``-th layer, but for those said to have none."""
    if config.get("shared_expert_intermediate_size") or config.get("n_shared_experts"):
        raise LayoutError(
            "the configuration has shared experts, whose shapes are not known here; give shapes yourself: "
            "Checkpoint.open(folder).shapes"
        )
    sparse = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return config.get("num_experts", 0) if sparse and layer not in (config.get("mlp_only_layers") or ()) else 0


def shardings(
    shapes: Mapping[str, Shape],
    mesh: Mesh,
    plan: Mapping[str, str] | None = None,
    *,
    dtype: object = "bfloat16",
    axis: str = "tp",
) -> dict[str, Sharding]:
    """The sharding of each tensor on a mesh, whose ``axis`` is tensor parallelism; the other axes hold copies.

    ``plan`` is transformers' (``model.config.base_model_tp_plan``), its patterns with ``model.`` or without; None is
    Llama's. Raises ``LayoutError`` for a style that it does not know.
    """
    styles = LLAMA if plan is None else plan
    return {
        name: Sharding(mesh, cut_of(name, len(shape), styles, axis), shape, str(dtype))
        for name, shape in shapes.items()
    }


def cut_of(name: str, dimensions: int, styles: Mapping[str, str], axis: str) -> tuple[str | None, ...]:
    """The cut of one tensor under a plan."""
    module, _, _ = name.rpartition(".")
    short = module.removeprefix("model.")
    style = next(
        (style for pattern, style in styles.items() if fnmatchcase(short, pattern.removeprefix("model."))), None
    )
    if style is None:
        return (None,) * dimensions
    base = style.removesuffix("_rep").removesuffix("_gather_output").removeprefix("local_")
    if base not in _STYLES:
        raise LayoutError(
            f"unknown style {quoted(style)} of {name!r}; known are {', '.join(_STYLES)}, with _rep, _gather_output, "
            "local_; state the sharding of this tensor yourself",
            style=style,
            name=name,
        )
    dim = _STYLES[base]
    if dim is None or dim >= dimensions:  # the bias of a row-parallel layer is added once, to the sum
        return (None,) * dimensions
    return tuple(axis if number == dim else None for number in range(dimensions))
