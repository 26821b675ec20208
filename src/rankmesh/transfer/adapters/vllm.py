"""A model of the Llama family as vLLM shards it: under Hugging Face's names, and as views of vLLM's own parameters.

```
qkv_proj on a rank       | q rows | k rows | v rows |       three names, each cut over tp by itself
gate_up_proj             | gate rows | up rows |            two names
embed_tokens, lm_head    rows, padded to a multiple of 64
k, v with tp > heads     each head on tp / heads ranks
w13_weight, w2_weight    its experts, stacked               each expert's names: cut over all of dp x pcp x tp, or
  --enable-expert-parallel                                  whole on one rank of them, the first ones one more
```

Layers go to stages evenly; what is left goes to the stages before the last, from behind. Sources: vLLM 0.33.0,
``vllm.model_executor.layers.linear`` and ``vocab_parallel_embedding``, ``vllm.distributed.utils.get_pp_indices``; for
experts ``fused_moe.config.FusedMoEParallelConfig`` and ``fused_moe.expert_map_manager.determine_expert_map``, whose
placement is linear for models without groups of experts. Redundant experts (``--enable-eplb``) are not known here.

>>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
...           "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 100}
>>> made = shardings(config, Mesh(tp=4, pp=4))
>>> [made["model.layers.0.self_attn.k_proj.weight"].of(rank).boxes for rank in (1, 2)]
[(((0, 8), (0, 64)),), (((8, 16), (0, 64)),)]
>>> stages(6, 4)
[1, 2, 2, 1]
>>> mixtral = {**config, "model_type": "mixtral", "num_local_experts": 6}
>>> made = shardings(mixtral, Mesh(tp=2, dp=2), expert_parallel=True)
>>> [[e for e in range(6) if made[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"].holds(r)] for r in range(4)]
[[0, 1], [2, 3], [4], [5]]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError
from rankmesh.transfer.adapters import huggingface

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["shardings", "stages", "views"]

_PADDING = 64


def stages(layers: int, pp: int) -> list[int]:
    """How many layers each stage has, as vLLM counts without VLLM_PP_LAYER_PARTITION."""
    counts = [layers // pp] * pp
    for place in range(2, layers % pp + 2):
        counts[-place] += 1
    return counts


def shardings(
    config: Mapping[str, Any], mesh: Mesh, *, dtype: object = "bfloat16", expert_parallel: bool = False
) -> dict[str, Sharding]:
    """The shardings by Hugging Face's names on the mesh of `rankmesh.recipes.vllm`, whose axes are tp, pp and others.

    ``tp`` must divide the heads; key and value heads are fewer or more than ``tp``, one a multiple of the other.
    ``expert_parallel`` is vLLM's ``--enable-expert-parallel``; without it ``dp x pcp x tp`` divides an expert's width.
    """
    heads = config["num_attention_heads"]
    groups, tp = config.get("num_key_value_heads") or heads, mesh.axes.get("tp", 1)
    if heads % tp or (groups % tp and tp % groups):
        raise LayoutError(
            f"{heads} heads and {groups} key-value heads cannot be sharded over tp {tp}; use a tp that divides the "
            "heads, and divides the key-value heads or is a multiple of them",
            heads=heads,
            groups=groups,
            tp=tp,
        )
    copies = max(1, tp // groups)
    split = mesh.split("tp", kv_copy=copies, kv_head=...)
    stage_of = _stages_of(config["num_hidden_layers"], mesh.axes.get("pp", 1))
    shapes = huggingface.shapes(config)
    experts = _Experts(mesh, expert_parallel, 1 + max((_expert(name) for name in shapes), default=-1))
    made = {}
    for name, shape in shapes.items():
        cut, padded = _cut(name, len(shape)), None
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            cut, padded = ("tp", None), {0: -(-shape[0] // _PADDING) * _PADDING}
        at: dict[str, int | tuple[int, ...]] = {"pp": stage_of(name)} if "pp" in mesh.axes else {}
        if at and name == "model.embed_tokens.weight" and config.get("tie_word_embeddings"):
            at = {"pp": (0, -1)}  # the last stage has it as its head
        if _expert(name) >= 0:
            cut, at = experts.cut(cut, shape), {**at, **experts.at(_expert(name))}
        made[name] = Sharding(split, cut, shape, str(dtype), at or None, padded=padded)
    return made


class _Experts:
    """Where ``count`` experts are: each cut over all ranks of a stage, or whole on one of them."""

    def __init__(self, mesh: Mesh, parallel: bool, count: int) -> None:
        # As vLLM numbers these ranks: dp outermost.
        self._axes: dict[str, int] = {axis: mesh.axes[axis] for axis in ("dp", "pcp", "tp") if axis in mesh.axes}
        self._ranks = prod(self._axes.values())
        self._parallel, self._count = parallel and self._ranks > 1, count

    def cut(self, cut: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """What cuts an expert, where ``cut`` is what tp would cut."""
        if self._parallel:
            return (None,) * len(shape)
        width = next(length for axes, length in zip(cut, shape, strict=True) if axes)
        if width % self._ranks:
            raise LayoutError(
                f"experts of width {width} cannot be divided by {' x '.join(self._axes)} = {self._ranks}; change a "
                "size, or place whole experts: expert_parallel=True",
                width=width,
                ranks=self._ranks,
            )
        return tuple("-".join(self._axes) if axes and self._axes else None for axes in cut)

    def at(self, expert: int) -> dict[str, int]:
        """The one rank that has an expert: consecutive ones each, one more on the first ranks."""
        if not self._parallel:
            return {}
        each, more = divmod(self._count, self._ranks)
        rank = expert // (each + 1) if expert < more * (each + 1) else more + (expert - more * (each + 1)) // each
        found: dict[str, int] = {}
        for axis, size in reversed(self._axes.items()):
            rank, found[axis] = divmod(rank, size)
        return found


def _expert(name: str) -> int:
    """The number of the expert whose tensor this is; -1 for none."""
    return int(name.partition(".experts.")[2].partition(".")[0] or -1)


def _stages_of(layers: int, pp: int) -> Callable[[str], int]:
    bounds = [stage for stage, count in enumerate(stages(layers, pp)) for _ in range(count)]

    def of(name: str) -> int:
        if name.startswith("model.layers."):
            return bounds[int(name.split(".")[2])]
        return 0 if name.startswith("model.embed_tokens") else pp - 1

    return of


def _cut(name: str, dimensions: int) -> tuple[str | None, ...]:
    cut = huggingface.cut_of(name, dimensions, huggingface.LLAMA, "tp")
    kv = any(f".{part}_proj." in name for part in "kv")
    return tuple("kv_head" if kv and axes else axes for axes in cut)


def views(parameters: Mapping[str, Tensor], shardings: Mapping[str, Sharding], rank: int) -> dict[str, Tensor]:
    """A rank's target tensors by Hugging Face's names: views of vLLM's own parameters, into which a transfer writes.

    Raises ``LayoutError`` for a parameter that vLLM does not have under its usual name.
    """
    made: dict[str, Tensor] = {}
    taken: dict[tuple[str, int], int] = {}
    local: dict[str, list[int]] = {}
    for name, sharding in shardings.items():
        if not sharding.holds(rank):
            continue
        fused, rows, expert = _fused(name), sharding.of(rank).shape[0], _expert(name)
        if fused not in parameters:
            raise LayoutError(
                f"{fused!r}, which holds {name!r}, is not among the parameters; give those of vLLM's model: "
                "dict(model.named_parameters())",
                name=name,
            )
        whole = parameters[fused].detach()
        if expert >= 0:
            experts = local.setdefault(fused, [])
            experts += [expert] if expert not in experts else []
            whole = whole[experts.index(expert)]  # experts come in ascending order, and so they are stacked
        start = taken.get((fused, expert), 0)
        made[name] = whole[start : start + rows]
        taken[fused, expert] = start + rows
    return made


_FUSED = {
    **dict.fromkeys((".q_proj.", ".k_proj.", ".v_proj."), ".qkv_proj."),
    **dict.fromkeys((".gate_proj.", ".up_proj."), ".gate_up_proj."),
}
_STACKED = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "w13_weight"),
    **dict.fromkeys(("down_proj", "w2"), "w2_weight"),
}


def _fused(name: str) -> str:
    """vLLM's parameter that has a tensor."""
    if _expert(name) >= 0:
        block, _, rest = name.partition(".experts.")
        return f"{block}.experts.routed_experts.{_STACKED[rest.split('.')[1]]}"
    return next((name.replace(part, fused) for part, fused in _FUSED.items() if part in name), name)
