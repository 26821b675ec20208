"""Known layouts: how Megatron-Core, vLLM, SGLang and transformers shard a model, without torch and without any of them.

```
family      tensors of its checkpoint, each with a shape and a role      llama: q_proj (heads x width, hidden) query
side        which axes cut each role, and where it is at all             vllm: query ("tp", None), layer 7 at pp=1
```

The tests of rankmesh-engines compare these with the layouts that the frameworks' own loaders give.

>>> from rankmesh.readers.model import described
>>> from rankmesh.readers.models import CONFIGS
>>> found = known("vllm:tp=8", CONFIGS["llama3-8b"], described)
>>> found.shardings["model.layers.7.mlp.down_proj.weight"].of(1)
Shard(boxes=(((0, 4096), (1792, 3584)),), places=((0, 0),), shape=(4096, 1792))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

from rankmesh.core import recipes
from rankmesh.core.mesh import Mesh
from rankmesh.core.model import Transformer
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError, quoted
from rankmesh.transfer.layouts.layout import Layout
from rankmesh.transfer.layouts.sides import check_options, sizes_of

__all__ = ["KNOWN", "SIDES", "known"]

# Tensors of a block by part: name, shape, role. An {} is the number of an expert.
_PARTS = """
norms        input_layernorm.weight                  hidden           whole
norms        post_attention_layernorm.weight         hidden           whole
norms_after  pre_feedforward_layernorm.weight        hidden           whole
norms_after  post_feedforward_layernorm.weight       hidden           whole
attention    self_attn.q_proj.weight                 queries hidden   query
attention    self_attn.k_proj.weight                 keys hidden      key
attention    self_attn.v_proj.weight                 keys hidden      key
attention    self_attn.o_proj.weight                 hidden queries   out
biases       self_attn.q_proj.bias                   queries          query
biases       self_attn.k_proj.bias                   keys             key
biases       self_attn.v_proj.bias                   keys             key
bias_out     self_attn.o_proj.bias                   hidden           whole
norms_heads  self_attn.q_norm.weight                 width            whole
norms_heads  self_attn.k_norm.weight                 width            whole
latent       self_attn.q_a_proj.weight               q_rank hidden    latent
latent       self_attn.q_a_layernorm.weight          q_rank           whole
latent       self_attn.q_b_proj.weight               queries q_rank   heads
latent       self_attn.kv_a_proj_with_mqa.weight     kv_rope hidden   latent
latent       self_attn.kv_a_layernorm.weight         kv_rank          whole
latent       self_attn.kv_b_proj.weight              kv_wide kv_rank  heads
latent       self_attn.o_proj.weight                 hidden attended  out
mlp          mlp.gate_proj.weight                    ffn hidden       up
mlp          mlp.up_proj.weight                      ffn hidden       up
mlp          mlp.down_proj.weight                    hidden ffn       down
experts      mlp.gate.weight                         experts hidden   whole
experts      mlp.experts.{}.gate_proj.weight         expert hidden    expert_up
experts      mlp.experts.{}.up_proj.weight           expert hidden    expert_up
experts      mlp.experts.{}.down_proj.weight         hidden expert    expert_down
shared       mlp.gate.e_score_correction_bias        experts          buffer
shared       mlp.shared_experts.gate_proj.weight     shared hidden    shared_up
shared       mlp.shared_experts.up_proj.weight       shared hidden    shared_up
shared       mlp.shared_experts.down_proj.weight     hidden shared    shared_down
mixtral      block_sparse_moe.gate.weight            experts hidden   whole
mixtral      block_sparse_moe.experts.{}.w1.weight   expert hidden    expert_up
mixtral      block_sparse_moe.experts.{}.w3.weight   expert hidden    expert_up
mixtral      block_sparse_moe.experts.{}.w2.weight   hidden expert    expert_down
"""
# Of each role the axes of a side that cut it, and the dimension.
_ROLES = {
    "query": ("attention", 0), "key": ("attention", 0), "heads": ("attention", 0), "out": ("attention", 1),
    "latent": ("latent", 0), "up": ("mlp", 0), "down": ("mlp", 1), "shared_up": ("shared", 0),
    "shared_down": ("shared", 1), "expert_up": ("expert", 0), "expert_down": ("expert", 1), "table": ("table", 0),
    "head": ("head", 0), "whole": ("", 0), "buffer": ("", 0),
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """The parts of each block, the parts of one with experts, and where its classes differ from others of a framework.

    ``everywhere``   by side, tensors outside of blocks that each pipeline stage has
    ``unknown``      by side, sizes with which its layout is not known here; all of it where one is ""
    """

    block: str
    experts: str = ""
    everywhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_HEAD, _ENDS = ("lm_head.weight",), ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_LLAMA = _Family("norms attention", everywhere={"sglang": _HEAD}, unknown={"sglang": ("dp",)})
_DEEPSEEK = _Family("norms latent", "experts shared", unknown={"transformers": ("tp",)})
_GEMMA = {"megatron": ("",), "sglang": ("",)}
KNOWN: Mapping[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _Family("norms attention", "mixtral", {"sglang": _HEAD, "vllm": _ENDS}, {"sglang": ("dp",)}),
    "qwen2": _Family("norms attention biases", unknown={"sglang": ("dp",)}),
    "qwen3": _Family("norms attention norms_heads"),
    "qwen3_moe": _Family("norms attention norms_heads", "experts", {"sglang": _HEAD, "vllm": _ENDS}),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gemma2": _Family("norms norms_after attention", "", {"vllm": _ENDS}, _GEMMA),
    "gemma3_text": _Family("norms norms_after attention norms_heads", "", {"vllm": _ENDS}, _GEMMA),
}
# Options of a config.json with which tensors have other forms, and those of a side that may be 0.
_OTHERWISE = ("mlp_bias", "quantization_config")
_OPTIONAL = ("vpp", "etp", "first", "last", "te", "ep")
Described = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Transformer]]
# Layers times experts.
_MOST = 1 << 18


class _Weight(NamedTuple):
    """A tensor of a checkpoint; of all blocks the ``layer``, of one expert its number."""

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int
    expert: int | None = None


def _weights(config: Mapping[str, Any], model: Transformer, family: _Family) -> Iterator[_Weight]:
    sizes = _sizes(config, model)
    last = model.layers - 1
    yield _Weight("model.embed_tokens.weight", (model.vocabulary, model.hidden), "table", 0)
    parts = {*family.block.split(), *(("biases", "bias_out") if config.get("attention_bias") else ())}
    for layer in range(model.layers):
        more = family.experts.split() if model.expert_layers(layer, layer + 1) else ["mlp"]
        for name, shape, role in (row for part, row in _rows() if part in parts or part in more):
            whole = tuple(sizes[one] for one in shape)
            for expert in range(model.experts) if "{}" in name else (None,):
                yield _Weight(f"model.layers.{layer}.{name.format(expert)}", whole, role, layer, expert)
    yield _Weight("model.norm.weight", (model.hidden,), "whole", last)
    if not model.tied:
        yield _Weight("lm_head.weight", (model.vocabulary, model.hidden), "head", last)


@cache
def _rows() -> tuple[tuple[str, tuple[str, tuple[str, ...], str]], ...]:
    """Return part, and name, shape and role, of each line of the table."""
    lines = (line.split() for line in _PARTS.strip().splitlines())
    return tuple((part, (name, tuple(shape), role)) for part, name, *shape, role in lines)


def _sizes(config: Mapping[str, Any], model: Transformer) -> dict[str, int]:
    """Return the lengths that the tables name."""
    width = model.width or model.hidden // model.heads
    sizes = {"hidden": model.hidden, "queries": model.queries, "keys": model.keys, "width": width}
    sizes |= {"ffn": model.ffn_hidden_size, "expert": model.moe_ffn_hidden_size or model.ffn_hidden_size}
    sizes |= {"experts": model.experts, "shared": model.shared_ffn_hidden_size, "attended": model.attended}
    if config.get("kv_lora_rank") is not None:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        sizes |= {"q_rank": config["q_lora_rank"], "kv_rank": rank, "kv_rope": rank + rope}
        sizes |= {"kv_wide": model.heads * (config["qk_nope_head_dim"] + config["v_head_dim"])}
    return sizes


@dataclass(frozen=True)
class _Side:
    """A framework's way to shard: for each group of roles the axes that cut it, and the view that has them.

    ``stages``   the pipeline stage of each layer
    ``padding``  the vocabulary is padded to a multiple of this
    ``at``       positions of an expert, by its number
    ``outer``    an axis that cuts the first dimension of each tensor further
    ``copies``   whether ranks that are more than the key-value heads hold copies of them
    """

    mesh: Mesh
    stages: Sequence[int]
    axes: Mapping[str, str | None]
    padding: int = 1
    at: Callable[[int], Mapping[str, int]] | None = None
    views: Mapping[str, str] = field(default_factory=dict)
    outer: str | None = None
    copies: bool = True

    def sizes(self, group: str) -> dict[str, int]:
        """Return the axes that cut a group of roles, with sizes above 1."""
        sizes = self.mesh.view(self.views.get(group)).axes
        return {axis: sizes[axis] for axis in (self.axes.get(group) or "").split("-") if sizes.get(axis, 1) > 1}


def known(text: str, config: Mapping[str, Any], described: Described) -> Layout | None:
    """Return the sharding of every tensor of a model on a side such as ``vllm:tp=8``; None if one is not known here.

    ``described`` completes a config and returns its model: `rankmesh.readers.model.described`. Raises ``LayoutError``
    for sizes that the side refuses.
    """
    name, kind = text.partition(":")[0], str(config.get("model_type"))
    family = KNOWN.get(kind)
    if family is None or name not in SIDES or any(config.get(option) for option in _OTHERWISE):
        return None
    given = sizes_of(text)
    if any(not axis or given.get(axis, 1) > 1 for axis in family.unknown.get(name, ())):
        return None
    data, model = described(config)
    if family is _DEEPSEEK and data["q_lora_rank"] is None:
        return None
    if model.layers * max(model.experts, 1) > _MOST:
        raise LayoutError(
            f"{model.layers} layers of {model.experts} experts are more than any model has; fix the config"
        )
    check_options(text, given, SIDES[name])
    for axis in (axis for axis, size in given.items() if not size and axis not in _OPTIONAL):
        raise LayoutError(f"{axis}=0 of side {quoted(text)} is not a size; give 1 or more", side=text)
    side = SIDES[name](model, **given)
    if side is None:
        return None
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    shardings: dict[str, Sharding] = {}
    refused: dict[str, str] = {}
    made: dict[object, Sharding] = {}
    for weight in _weights(data, model, family):
        everywhere = weight.name in family.everywhere.get(name, ())
        found = _sharding(side, model, weight, dtype, everywhere, made)
        if isinstance(found, str):
            refused[weight.name] = found
        else:
            shardings[weight.name] = found
    return Layout(name, side.mesh, shardings, refused)


def _sharding(
    side: _Side, model: Transformer, weight: _Weight, dtype: str, everywhere: bool, made: dict[object, Sharding]
) -> Sharding | str:
    """Return the sharding of a tensor, equal ones as one object, or why it has none."""
    mesh, shape, role = side.mesh, weight.shape, weight.role
    group, dim = _ROLES[role]
    at: dict[str, int | tuple[int, ...]] = dict(side.at(weight.expert)) if side.at and weight.expert is not None else {}
    if mesh.axes.get("pp", 1) > 1 and not everywhere:
        places = {side.stages[weight.layer], *(side.stages[-1:] if role == "table" and model.tied else ())}
        at["pp"] = tuple(sorted(places))
    key = (shape, role, str(at))
    if key in made:
        return made[key]
    view, sizes = side.views.get(group), side.sizes(group)
    axes, ways, heads = "-".join(sizes), prod(sizes.values()), model.kv_heads or model.heads
    rows = -(-shape[0] // side.padding) * side.padding if role in ("table", "head") else shape[0]
    if role in ("query", "key") and heads % ways and (not side.copies or ways % heads):
        return f"{ways} ranks of {axes} cut across the {heads} key-value heads, which no sharding expresses"
    if role == "key" and heads % ways:  # ranks that are neighbours hold copies of a head
        mesh = mesh.split(axes, view=view, **{f"{axes}_copy": ways // heads, f"{axes}_cut": heads})
        axes = f"{axes}_cut"
    elif (shape[1] if dim else rows) % ways:
        length = shape[1] if dim else rows
        raise LayoutError(f"{ways} ranks of {axes} do not divide the {length} of {weight.name}; give other sizes")
    cut: list[str | None] = [None] * len(shape)
    cut[dim] = axes or None
    if side.outer and weight.expert is None and role != "buffer":
        cut[0] = "-".join(filter(None, (cut[0], side.outer)))
    padded = {0: rows} if rows > shape[0] else None
    made[key] = Sharding(mesh, tuple(cut), shape, dtype, at or None, view, padded=padded)
    return made[key]


# -- sides ------------------------------------------------------------------------------------------------------------

# vLLM and SGLang pad the vocabulary to a multiple of this.
_VOCABULARY = 64


def _megatron(
    model: Transformer,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    pp: int = 1,
    vpp: int = 0,
    ep: int = 1,
    etp: int = 0,
    first: int = 0,
    last: int = 0,
    vocab: int = 128,
    te: int = 0,
) -> _Side:
    """Megatron-Core 0.19.2; ``te=1``: Transformer Engine, whose latent attention keeps its down projections whole."""
    _divides("tp", tp, model.heads, "heads")
    local = _experts(model, ep)
    ends = bool(first) + bool(last)
    middle = _divides("pp", max(pp - ends, 1), model.layers - first - last, "layers", "give first= and last= as well")
    counts = [middle] * pp
    counts[0], counts[-1] = first or counts[0], last or counts[-1]
    chunk = _divides("vpp", vpp or 1, min(counts), "layers of a stage")
    stages = _staged(model, counts) if vpp < 2 else tuple(layer // chunk % pp for layer in range(model.layers))
    return _Side(
        recipes.megatron(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp or tp).mesh,
        stages,
        {**_all("tp"), "expert": "etp", "latent": None if te else "tp"},
        padding=vocab * tp,
        at=lambda expert: {"ep": expert // local},
        views={"expert": "expert"},
        copies=False,
    )


def _vllm(model: Transformer, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 0) -> _Side:
    """vLLM 0.33.0; ``ep=1``: ``--enable-expert-parallel``, over all ranks of a stage."""
    _divides("tp", tp, model.heads, "heads")
    least, more = divmod(model.layers, pp)
    counts = [least + (2 <= pp - stage < more + 2) for stage in range(pp)]
    few, rest = divmod(model.experts, tp * dp)
    if ep and not model.experts:
        raise LayoutError("ep=1 cuts experts, and this model has none; leave ep out", axis="ep")

    def at(expert: int) -> dict[str, int]:
        many = rest * (few + 1)
        rank = expert // (few + 1) if expert < many else rest + (expert - many) // few
        return {"tp": rank % tp, "dp": rank // tp}

    axes = {**_all("tp"), "expert": None if ep else "dp-tp"}
    if ep and tp > 1 and dp > 1:  # sequence parallelism around the experts
        axes["shared"] = None
    return _Side(recipes.vllm(tp=tp, pp=pp, dp=dp).mesh, _staged(model, counts), axes, _VOCABULARY, at if ep else None)


def _sglang(model: Transformer, *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> _Side:
    """SGLang 0.5.23; ``dp`` is attention's, and divides ``tp`` as ``ep`` does."""
    for axis, size in (("dp", dp), ("ep", ep)):
        if tp % size:
            raise LayoutError(
                f"{axis}={size} does not divide tp={tp}, of which it is a part; give another {axis}", axis=axis
            )
    _divides("tp", tp // dp, model.heads, "heads")
    local = _divides("ep", ep, model.experts, "experts") or 1
    least, more = divmod(model.layers, pp)
    return _Side(
        recipes.sglang(tp=tp, pp=pp, attn_dp=dp, ep=ep).mesh,
        _staged(model, [least + (stage >= pp - more) for stage in range(pp)]),
        {**_all("tp"), "attention": "attn_tp", "table": "attn_tp", "expert": "moe_tp"},
        padding=_VOCABULARY,
        at=lambda expert: {"moe_ep": expert // local},
        views={"attention": "attention", "table": "attention", "expert": "experts"},
    )


def _transformers(
    model: Transformer, *, tp: int = 1, fsdp: int = 1, dp_replicate: int = 1, pp: int = 1, ep: int = 1
) -> _Side | None:
    """Return transformers 5.23's side; ``fsdp`` is FSDP2's size. ``pp`` and ``ep`` are left to its loader."""
    if pp > 1 or ep > 1:
        return None
    rows = -(-model.experts // fsdp)  # the experts of a layer are one parameter, whose first dimension FSDP2 cuts
    return _Side(
        Mesh(tp=tp, fsdp=fsdp, dp_replicate=dp_replicate),
        (0,) * model.layers,
        {**_all("tp"), "expert": "tp"},
        at=lambda expert: {"fsdp": expert // rows},
        outer="fsdp" if fsdp > 1 else None,
    )


def _all(axis: str) -> dict[str, str | None]:
    return dict.fromkeys(("attention", "mlp", "shared", "table", "head"), axis)


def _staged(model: Transformer, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of each layer, by the layers of each stage."""
    if min(counts) < 1 or sum(counts) != model.layers:
        raise LayoutError(
            f"{len(counts)} stages of {', '.join(map(str, counts))} layers do not fit the {model.layers} of the model; "
            "give another pp",
            layers=model.layers,
        )
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def _experts(model: Transformer, ep: int) -> int:
    """Return the experts of a rank. Raises ``LayoutError`` where a model without any is to be cut by them."""
    if ep > 1 and not model.experts:
        raise LayoutError(f"ep={ep} cuts experts, and this model has none; leave ep out", axis="ep")
    return _divides("ep", ep, model.experts, "experts")


def _divides(name: str, ways: int, length: int, what: str, fix: str = "") -> int:
    """Return a length divided. Raises ``LayoutError`` where it cannot be."""
    if length % ways:
        fix = fix or f"give another {name}"
        raise LayoutError(f"{name}={ways} does not divide the {length} {what} of the model; {fix}", axis=name)
    return length // ways


SIDES: Mapping[str, Callable[..., _Side | None]] = {
    "megatron": _megatron,
    "sglang": _sglang,
    "transformers": _transformers,
    "vllm": _vllm,
}
