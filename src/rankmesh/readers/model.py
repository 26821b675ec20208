"""A transformer and how it is trained, from what people have: a Megatron script, Hugging Face's config.json, a preset.

```
config.json                     hidden_size, num_hidden_layers, num_key_value_heads, intermediate_size, num_experts, ...
train.sh                        --hidden-size, --num-layers, --group-query-attention, --ffn-hidden-size, --swiglu, ...
                                and the batch: --global-batch-size, --micro-batch-size, --seq-length
model.yaml, model.json          the fields of rankmesh.placement.Transformer and Training by their names
llama3-405b                     a model by its name, see ``rankmesh.readers.models``
```

>>> model, training = read_model("llama3-8b")
>>> model.hidden, model.ffn_hidden_size, training
(4096, 14336, {})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rankmesh.core.documents import Unreadable, parse, read_text, refused_as
from rankmesh.errors import PlacementError, quoted
from rankmesh.placement.model import RECOMPUTE, Training, Transformer
from rankmesh.readers.megatron import FLAGS
from rankmesh.readers.models import CONFIGS
from rankmesh.readers.run import read_run

__all__ = ["model_type", "read_model"]

# A field, and the names that config.json has for it; the first that is there counts.
_HUGGING_FACE: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "width": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "expert_every": ("decoder_sparse_step", "moe_layer_freq"),
    "dense_layers": ("first_k_dense_replace",),
    "shared_ffn_hidden_size": ("shared_expert_intermediate_size",),
}
# Models whose blocks are those of Transformer, by their class and type: their numbers of parameters are those that
# were published.
_TYPES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt_oss",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
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
    "--moe-layer-freq": "expert_every",
    "--moe-shared-expert-intermediate-size": "shared_ffn_hidden_size",
    "--global-batch-size": "batch",
    "--micro-batch-size": "microbatch",
    "--seq-length": "sequence",
}


def read_model(text: str, *, vocabulary: int | None = None) -> tuple[Transformer, dict[str, Any]]:
    """Return the model that a path or a name means, and what the file says of its training, as fields of ``Training``.

    ``vocabulary`` goes before the file's, which a script may leave to its tokenizer.
    Raises ``PlacementError`` for a file that is none, and for one that lacks a number.
    """
    given = {} if vocabulary is None else {"vocabulary": vocabulary}
    if text in CONFIGS:
        return _model({**_hugging_face(CONFIGS[text]), **given}, text)
    named = [name for name, config in CONFIGS.items() if config["model_type"] in _TYPES.values()]
    forms = f"give a Megatron script, config.json, a file of Transformer's fields, or one of {', '.join(named)}"
    near = get_close_matches(text, named, n=1)
    fix = f"did you mean {near[0]!r}?" if near else forms
    with refused_as(PlacementError, f"model {quoted(text)}", fix, received=text):
        content = read_text(text)
        if not content.strip():
            raise Unreadable("is an empty file")
        return _model({**_values(content, text), **given}, text)


def _model(values: dict[str, Any], text: str) -> tuple[Transformer, dict[str, Any]]:
    names = {field.name for field in fields(Transformer)}
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in values]
    if missing:
        raise PlacementError(
            f"{text}: the model has no {', '.join(missing)}, which make its traffic; add them",
            missing=tuple(missing),
        )
    values.setdefault("ffn_hidden_size", 4 * values["hidden"])
    model = Transformer(**{name: value for name, value in values.items() if name in names})
    known = {field.name for field in fields(Training)}
    return model, {name: value for name, value in values.items() if name in known}


def _values(content: str, path: str) -> dict[str, Any]:
    if path.endswith((".sh", ".slurm", ".sbatch", ".args")) or content.startswith("#!"):
        return _megatron(content, path)
    data = parse(content)
    if not isinstance(data, Mapping):
        raise PlacementError(f"{path}: {quoted(data)} is no model; a model is a mapping of names to numbers")
    if "model_type" in data or "hidden_size" in data or "n_embd" in data:
        return _hugging_face(data)
    known = {field.name for kind in (Transformer, Training) for field in fields(kind)}
    for name in data:
        if name not in known:
            raise PlacementError(
                f"{path}: unknown field {quoted(name)}; known are {', '.join(sorted(known))}", received=name
            )
    return dict(data)


def model_type(config: Mapping[str, Any]) -> object:
    """Return the ``model_type`` of a ``config.json``, else the type of the class in ``architectures``, None if unknown.

    >>> model_type({"architectures": ["LlamaForCausalLM"]}), model_type({"hidden_size": 64})
    ('llama', None)
    """
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind is None and isinstance(classes, list | tuple):
        return next((_TYPES[name] for name in map(str, classes) if name in _TYPES), None)
    return kind


def _hugging_face(data: Mapping[str, Any]) -> dict[str, Any]:
    kind = model_type(data)
    if kind not in _TYPES.values():
        problem = (
            f"the config has no model_type, and architectures is {quoted(data.get('architectures'))}"
            if kind is None
            else f"the model type {quoted(kind)} is not known"
        )
        raise PlacementError(
            f"{problem}, so its layers may be of another form; known are {', '.join(_TYPES.values())}; set model_type "
            "to one of them if the layers are its, or write a file of Transformer's fields",
            received=kind,
        )
    found = {
        field: next(data[name] for name in names if data.get(name) is not None)
        for field, names in _HUGGING_FACE.items()
        if any(data.get(name) is not None for name in names)
    }
    activation = str(data.get("hidden_act", data.get("activation_function", "")))
    found["gated"] = "silu" in activation or "swiglu" in activation
    found.setdefault("tied", kind == "gpt2")
    if not all(isinstance(value, int) for value in found.values()):
        wrong = next(name for name, value in found.items() if not isinstance(value, int))
        raise PlacementError(f"{wrong} of the model is {quoted(found[wrong])}; give an integer", name=wrong)
    if "shared_ffn_hidden_size" not in found and data.get("n_shared_experts") and "moe_ffn_hidden_size" in found:
        found["shared_ffn_hidden_size"] = _whole(data, "n_shared_experts") * found["moe_ffn_hidden_size"]
    if data.get("kv_lora_rank") is not None:
        found |= _latent(data, found["hidden"], found["heads"])
    return found


def _latent(data: Mapping[str, Any], hidden: int, heads: int) -> dict[str, int]:
    """Latent attention (MLA): queries, and keys with values, through ranks of their own; one rotary key for all."""
    rope, value = _whole(data, "qk_rope_head_dim"), _whole(data, "v_head_dim")
    plain, rank = _whole(data, "qk_nope_head_dim"), _whole(data, "kv_lora_rank")
    low = data.get("q_lora_rank")
    wide = heads * (plain + rope)
    queries = hidden * wide if low is None else (hidden + 1 + wide) * _whole(data, "q_lora_rank")
    keys = hidden * (rank + rope) + rank + rank * heads * (plain + value)
    return {"width": plain + rope, "value_width": value, "attention_weights": queries + keys + heads * value * hidden}


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise PlacementError(f"{name} of the model is {quoted(value)}; give an integer of at least 1", name=name)
    return value


def _megatron(content: str, path: str) -> dict[str, Any]:
    run = read_run(content, path, FLAGS)
    if run is None:
        raise PlacementError(f"{path}: the script starts no training; give the one that runs torchrun")
    found: dict[str, Any] = {"tied": True, "zero": 0}
    switches = {str(entry.path[-1]) for entry in run.arguments}
    for entry in run.arguments:
        field = _MEGATRON.get(str(entry.path[-1]))
        value = entry.value[0] if isinstance(entry.value, list) and entry.value else entry.value
        if field is not None and str(value).isdecimal():
            found[field] = int(str(value))
        if str(entry.path[-1]) == "--recompute-granularity" and str(value) in RECOMPUTE:
            found["recompute"] = str(value)
    found["gated"] = "--swiglu" in switches
    found["tied"] = "--untie-embeddings-and-output-weights" not in switches
    found["sequence_parallel"] = "--sequence-parallel" in switches
    if switches & {"--fp8-format", "--fp8-hybrid", "--fp8-e4m3"}:
        found["precision"] = "fp8"
    if "--tp-comm-overlap" in switches:
        found["overlap"] = ("dp", "cp", "pp", "tp")
    if "--use-distributed-optimizer" in switches:
        found["zero"] = 1
    if "--group-query-attention" not in switches:
        found.pop("kv_heads", None)
    return found
