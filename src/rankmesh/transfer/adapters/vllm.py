"""A dense model of the Llama family as vLLM lays it: under Hugging Face's names, and as views of vLLM's own parameters.

```
qkv_proj on a rank       | q rows | k rows | v rows |       three names, each cut over tp by itself
gate_up_proj             | gate rows | up rows |            two names
embed_tokens, lm_head    rows, padded to a multiple of 64
k, v with tp > heads     each head on tp / heads ranks
```

Layers go to stages evenly; what is left goes to the stages before the last, from behind. Sources: vLLM 0.33.0,
``vllm.model_executor.layers.linear`` and ``vocab_parallel_embedding``, ``vllm.distributed.utils.get_pp_indices``.

>>> config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
...           "num_hidden_layers": 6, "vocab_size": 100}
>>> made = shardings(config, Mesh(tp=4, pp=4))
>>> [made["model.layers.0.self_attn.k_proj.weight"].of(rank).boxes for rank in (1, 2)]
[(((0, 8), (0, 64)),), (((8, 16), (0, 64)),)]
>>> stages(6, 4)
[1, 2, 2, 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankmesh.errors import LayoutError
from rankmesh.layout.mesh import Mesh
from rankmesh.layout.sharding import Sharding
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


def shardings(config: Mapping[str, Any], mesh: Mesh, *, dtype: object = "bfloat16") -> dict[str, Sharding]:
    """The shardings by Hugging Face's names on the mesh of `rankmesh.recipes.vllm`, whose axes are tp, pp and others.

    ``tp`` must divide the heads; key and value heads are fewer or more than ``tp``, one a multiple of the other.
    """
    heads = config["num_attention_heads"]
    groups, tp = config.get("num_key_value_heads") or heads, mesh.axes.get("tp", 1)
    if heads % tp or (groups % tp and tp % groups):
        raise LayoutError(
            f"received {heads} heads and {groups} key-value heads for tp {tp}; tp divides the heads, and divides the "
            "key-value heads or is a multiple of them; change tp",
            heads=heads,
            groups=groups,
            tp=tp,
        )
    copies = max(1, tp // groups)
    split = mesh.split("tp", kv_copy=copies, kv_head=...)
    held = _stages_of(config["num_hidden_layers"], mesh.axes.get("pp", 1))
    made = {}
    for name, shape in huggingface.shapes(config).items():
        cut, padded = _cut(name, len(shape)), None
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            cut, padded = ("tp", None), {0: -(-shape[0] // _PADDING) * _PADDING}
        at: dict[str, int | tuple[int, ...]] | None = {"pp": held(name)} if "pp" in mesh.axes else None
        if at and name == "model.embed_tokens.weight" and config.get("tie_word_embeddings"):
            at = {"pp": (0, -1)}  # the last stage has it as its head
        made[name] = Sharding(split, cut, shape, str(dtype), at, padded=padded)
    return made


def _stages_of(layers: int, pp: int) -> Any:
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


def views(parameters: Mapping[str, Tensor], held: Mapping[str, Sharding], rank: int) -> dict[str, Tensor]:
    """A rank's target tensors by Hugging Face's names: views of vLLM's own parameters, into which a transfer writes.

    ``held`` are the shardings. Raises ``LayoutError`` for a parameter that vLLM does not have under its usual name.
    """
    made: dict[str, Tensor] = {}
    taken: dict[str, int] = {}
    for name, sharding in held.items():
        if not sharding.holds(rank):
            continue
        fused, rows = _fused(name), sharding.of(rank).shape[0]
        if fused not in parameters:
            raise LayoutError(
                f"received parameters without {fused!r}, which has {name!r}; give those of vLLM's model, "
                "dict(model.named_parameters())",
                name=name,
            )
        start = taken.get(fused, 0) if fused != name else 0
        made[name] = parameters[fused].detach()[start : start + rows]
        taken[fused] = start + rows
    return made


def _fused(name: str) -> str:
    for parts, fused in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, fused)
    return name
