"""A transformer and how it is trained, from what people have: a Megatron script, Hugging Face's config.json, a preset.

```
config.json                     hidden_size, num_hidden_layers, num_key_value_heads, intermediate_size, num_experts, ...
train.sh                        --hidden-size, --num-layers, --group-query-attention, --ffn-hidden-size, --swiglu, ...
                                and the batch: --global-batch-size, --micro-batch-size, --seq-length
model.yaml, model.json          the fields of rankmesh.core.model.Transformer and Training by their names
llama3-405b                     a model by its name, see ``rankmesh.readers.models``
```

>>> model, training = read_model("llama3-8b")
>>> model.hidden, model.ffn_hidden_size, training
(4096, 14336, {})
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rankmesh.core.documents import Unreadable, parse, read_text, refused_as
from rankmesh.core.model import RECOMPUTE, Training, Transformer
from rankmesh.errors import PlacementError, quoted
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.launches import read_launch
from rankmesh.readers.models import CONFIGS, FAMILIES, latent_attention, transformer
from rankmesh.readers.options import Option

__all__ = ["described", "model_of", "read_model"]

_MEGATRON: Mapping[str, str] = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--num-query-groups": "kv_heads",
    "--kv-channels": "width",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--vocab-size": "vocabulary",
    "--padded-vocab-size": "vocabulary",
    "--num-experts": "experts",
    "--moe-router-topk": "top_k",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "shared_ffn_hidden_size",
    "--mtp-num-layers": "mtp_layers",
    "--global-batch-size": "batch",
    "--micro-batch-size": "microbatch",
    "--seq-length": "sequence",
}
# Latent attention: the argument, its name in DeepSeek's configs, and Megatron's default.
_LATENT: Mapping[str, tuple[str, int | None]] = {
    "--q-lora-rank": ("q_lora_rank", None),
    "--kv-lora-rank": ("kv_lora_rank", 32),
    "--qk-head-dim": ("qk_nope_head_dim", 128),
    "--qk-pos-emb-head-dim": ("qk_rope_head_dim", 64),
    "--v-head-dim": ("v_head_dim", 128),
}
# Options of blocks that ``Transformer`` does not describe.
_OTHER_BLOCKS = (
    "--experimental-attention-variant", "--heterogeneous-layers-config-path", "--hybrid-attention-ratio",
    "--hybrid-layer-pattern", "--hybrid-mlp-ratio", "--hybrid-override-pattern", "--is-hybrid-model",
    "--linear-attention-freq", "--linear-attention-type", "--multi-head-latent-attention",
)  # fmt: skip
_MOST_BLOCKS = 10_000
# What the command line may give instead.
_LEFT_OPEN = ("vocabulary", "batch", "microbatch", "sequence")


def read_model(text: str, *, vocabulary: int | None = None) -> tuple[Transformer, dict[str, Any]]:
    """Return the model of a path or a name, and what the file states of its training, as fields of ``Training``.

    ``vocabulary`` goes before the file's, which a script may leave to its tokenizer.
    Raises ``PlacementError`` for a file that describes no model, and for one that lacks a number.
    """
    given = {} if vocabulary is None else {"vocabulary": vocabulary}
    if text in CONFIGS:
        return model_of({**transformer(CONFIGS[text]), **given}, text)
    forms = f"give a Megatron script, config.json, a file of Transformer's fields, or one of {', '.join(CONFIGS)}"
    near = get_close_matches(text, CONFIGS, n=1)
    fix = f"did you mean {near[0]!r}?" if near else forms
    with refused_as(PlacementError, f"model {quoted(text)}", fix, received=text):
        content = read_text(text)
        if not content.strip():
            raise Unreadable("is an empty file")
        return model_of({**_values(content, text), **given}, text)


def model_of(values: dict[str, Any], text: str) -> tuple[Transformer, dict[str, Any]]:
    """Return a model of fields by name, and the fields of ``Training`` among them; ``text`` is their source.

    Raises ``PlacementError`` where one is missing.
    """
    names = {field.name for field in fields(Transformer)}
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in values]
    if missing:
        raise PlacementError(
            f"{text}: the model has no {', '.join(missing)}, which make its traffic; add them", missing=tuple(missing)
        )
    values.setdefault("ffn_hidden_size", 4 * values["hidden"])
    model = Transformer(**{name: value for name, value in values.items() if name in names})
    known = {field.name for field in fields(Training)}
    return model, {name: value for name, value in values.items() if name in known}


def described(config: Mapping[str, Any]) -> tuple[dict[str, Any], Transformer]:
    """Return a ``config.json`` of a family that is known, with the family's defaults, and its model."""
    kind = config["model_type"]
    return {**FAMILIES[kind].defaults, **config}, model_of(transformer(config), kind)[0]


def _values(content: str, path: str) -> dict[str, Any]:
    if path.endswith((".sh", ".slurm", ".sbatch", ".args")) or content.startswith("#!"):
        return _megatron(content, path)
    data = parse(content)
    if not isinstance(data, Mapping):
        raise PlacementError(f"{path}: {quoted(data)} is not a model; a model is a mapping of names to numbers")
    if {"model_type", "text_config", "hidden_size", "n_embd"} & set(data):
        return transformer(data)
    known = {field.name for kind in (Transformer, Training) for field in fields(kind)}
    for name in data:
        if name not in known:
            raise PlacementError(
                f"{path}: unknown field {quoted(name)}; known are {', '.join(sorted(known))}", received=name
            )
    return dict(data)


def _megatron(content: str, path: str) -> dict[str, Any]:
    launch = read_launch(content, path, FLAGS)
    if launch is None:
        raise PlacementError(f"{path}: the script starts no training; give the one that runs torchrun")
    given = {str(option.path[-1]): option for option in launch.flags}
    for name in (name for name in _OTHER_BLOCKS if name in given):
        raise PlacementError(
            f"{path}:{given[name].line}: {name} makes blocks of another form; write a file of Transformer's fields",
            name=name,
        )
    found: dict[str, Any] = {"zero": 0}
    for name, field in _MEGATRON.items():
        if name in given and (value := _number(given[name], path, optional=field in _LEFT_OPEN)) is not None:
            found[field] = value
    recompute = given.get("--recompute-granularity")
    if recompute is not None and recompute.first in RECOMPUTE:
        found["recompute"] = recompute.first
    found["gated"] = "--swiglu" in given
    found["tied"] = "--untie-embeddings-and-output-weights" not in given
    found["sequence_parallel"] = "--sequence-parallel" in given
    if {"--fp8-format", "--fp8-hybrid", "--fp8-e4m3"} & set(given):
        found["precision"] = "fp8"
    if "--tp-comm-overlap" in given:
        found["overlap"] = ("dp", "cp", "pp", "tp")
    if "--use-distributed-optimizer" in given:
        found["zero"] = 1
    return found | _blocks(given, found, path)


def _blocks(given: Mapping[str, Option], found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a model's blocks: Megatron's defaults, latent attention, and which blocks have experts."""
    blocks: dict[str, Any] = {}
    hidden, heads = found.get("hidden"), found.get("heads")
    if "--group-query-attention" not in given:
        blocks["kv_heads"] = None
    elif "kv_heads" not in found:
        blocks["kv_heads"] = 1
    if found["gated"] and hidden and "ffn_hidden_size" not in found:
        blocks["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64
    if "experts" in found:
        blocks["top_k"] = found.get("top_k", 2)
        if (frequency := given.get("--moe-layer-freq")) is not None:
            blocks |= _with_experts(frequency, found.get("layers", 0), path)
    if (window := given.get("--window-size")) is not None and (sizes := re.findall(r"\d+", str(window.value))):
        every = _number(given["--window-attn-skip-freq"], path) if "--window-attn-skip-freq" in given else None
        layers = found.get("layers", 0)
        blocks |= {"window": int(sizes[0]) + 1, "windowed": layers - layers // every if every else layers}
    if "--multi-latent-attention" in given and hidden and heads:
        ranks = {
            key: _number(given[name], path) if name in given else default for name, (key, default) in _LATENT.items()
        }
        blocks |= latent_attention(ranks, hidden, heads)
    return blocks


def _with_experts(frequency: Option, layers: int, path: str) -> dict[str, int]:
    """Read ``--moe-layer-freq``: one number n (each n-th block has experts), or a list with one entry a block.

    >>> _with_experts(Option(("--moe-layer-freq",), "([0]*3+[1]*58)", 1), 61, "run.sh")
    {'dense_layers': 3, 'expert_every': 1}
    """
    text = str(frequency.first)
    if text.isdecimal() and int(text):
        return {"expert_every": int(text)}
    pattern = _listed(text)
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    for every in range(1, dense + 2):
        if len(pattern) == layers and pattern == [
            int(layer >= dense and (layer + 1) % every == 0) for layer in range(layers)
        ]:
            return {"dense_layers": dense if every == 1 else 0, "expert_every": every}
    raise PlacementError(
        f"{path}:{frequency.line}: {frequency} is not a pattern of dense blocks first, or of every n-th of {layers} "
        "blocks with experts; write a file of Transformer's fields",
        received=text,
    )


def _listed(text: str) -> list[int]:
    """Return the list of an expression such as ``[0]*3+[1]*58``; empty for another expression."""

    def of(node: ast.expr) -> list[int]:
        match node:
            case ast.List(elements):
                return [1 if each.value else 0 for each in elements if isinstance(each, ast.Constant)]
            case ast.BinOp(left, ast.Add(), right):
                return of(left) + of(right)
            case ast.BinOp(one, ast.Mult(), ast.Constant(int(times))) | ast.BinOp(
                ast.Constant(int(times)), ast.Mult(), one
            ):
                part = of(one)
                return part * times if len(part) * times <= _MOST_BLOCKS else []
            case _:
                return []

    try:
        return of(ast.parse(text, mode="eval").body) if len(text) <= _MOST_BLOCKS else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _number(option: Option, path: str, *, optional: bool = False) -> int | None:
    text = str(option.first)
    if text.isdecimal():
        return int(text)
    if optional:
        return None
    raise PlacementError(f"{path}:{option.line}: {option} is not a number; write the number", name=option.key)
