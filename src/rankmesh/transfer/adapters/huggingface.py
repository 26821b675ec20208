"""Hugging Face models as shardings: shapes by name, and the tensor-parallel plan as transformers states it.

```
"layers.*.self_attn.q_proj": "colwise"      weight ("tp", None)     bias ("tp",)
"layers.*.mlp.down_proj":    "rowwise"      weight (None, "tp")     bias (None,)
anything else                               copies
```

Source: ``base_model_tp_plan`` of transformers' configurations. The shapes are those of a checkpoint
(`rankmesh.transfer.files.Checkpoint.shapes`), or follow from the configuration of a model of the Llama family.

>>> config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
...           "num_hidden_layers": 1, "vocab_size": 100}
>>> made = shardings(shapes(config), Mesh(tp=2), dtype="bfloat16")
>>> made["model.layers.0.self_attn.k_proj.weight"].of(1).boxes
(((16, 32), (0, 64)),)
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rankmesh.errors import LayoutError
from rankmesh.layout.mesh import Mesh
from rankmesh.layout.sharding import Sharding

__all__ = ["LLAMA", "cut_of", "shapes", "shardings"]

# Llama's plan, which Mistral and Qwen share; the embedding and the head are whole in it.
LLAMA = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}

# What a style does to a weight (out, in); ``_rep`` and ``_gather_output`` speak of activations.
_WORDS = {"colwise": 0, "rowwise": 1, "replicated": None, "sequence_parallel": None}

Shape = tuple[int, ...]


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes by name of a model of the Llama family (Llama, Mistral, Qwen 2 and 3), from its ``config.json``."""
    try:
        hidden, units, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
        layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    except KeyError as error:
        raise LayoutError(
            f"received a configuration without {error}; it is one of the Llama family; give shapes of another model "
            "yourself: Checkpoint.open(folder).shapes",
            missing=str(error),
        ) from error
    width = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    outs = {"q": heads * width, "k": groups * width, "v": groups * width}
    bias = config.get("attention_bias", config.get("model_type") == "qwen2")
    made: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for name, out in outs.items():
            made[f"{block}.self_attn.{name}_proj.weight"] = (out, hidden)
            made |= {f"{block}.self_attn.{name}_proj.bias": (out,)} if bias else {}
        made |= {
            f"{block}.self_attn.{name}_norm.weight": (width,) for name in "qk" if config.get("model_type") == "qwen3"
        }
        made[f"{block}.self_attn.o_proj.weight"] = (hidden, heads * width)
        made |= {f"{block}.mlp.{name}_proj.weight": (units, hidden) for name in ("gate", "up")}
        made[f"{block}.mlp.down_proj.weight"] = (hidden, units)
        made |= {f"{block}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    made["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        made["lm_head.weight"] = (vocabulary, hidden)
    return made


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
    word = style.removesuffix("_rep").removesuffix("_gather_output").removeprefix("local_")
    if word not in _WORDS:
        raise LayoutError(
            f"received style {style!r} for {name!r}; known are {', '.join(_WORDS)}, with _rep, _gather_output, local_; "
            "state the sharding of this tensor yourself",
            style=style,
            name=name,
        )
    dim = _WORDS[word]
    if dim is None or dim >= dimensions:  # the bias of a row-parallel layer is added once, to the sum
        return (None,) * dimensions
    return tuple(axis if number == dim else None for number in range(dimensions))
