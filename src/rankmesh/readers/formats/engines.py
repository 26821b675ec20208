"""Commands of vLLM and SGLang, each of one engine, or of what ``--world-size`` has of them.

```
vllm serve MODEL --tensor-parallel-size 4
sglang serve, python -m sglang.launch_server
```
"""

from __future__ import annotations

from collections.abc import Mapping

from rankmesh.readers.launches import check_unknown, system
from rankmesh.readers.options import Options
from rankmesh.readers.table import Format, Read, Settled, Table, settle

__all__ = ["SGLANG", "VLLM"]


def _sizes(**names: str) -> Mapping[str, Read]:
    """Return rows of a table: each argument of a recipe, and its names on the command line."""
    return {name: Read(argument) for argument, listed in names.items() for name in listed.split()}


_VLLM = Table(
    _sizes(
        tp="tensor_parallel_size tp",
        pp="pipeline_parallel_size pp",
        dp="data_parallel_size dp",
        pcp="prefill_context_parallel_size pcp",
        dcp="decode_context_parallel_size dcp",
    ),
    harmless=("data_parallel_size_local", "enable_expert_parallel"),
    key=lambda option: option.name,
)
_SGLANG = Table(
    _sizes(
        tp="tensor_parallel_size tp_size tp",
        pp="pipeline_parallel_size pp_size pp",
        attn_dp="data_parallel_size dp_size dp",
        ep="expert_parallel_size ep_size ep",
        attn_cp="attention_context_parallel_size attn_cp_size",
        moe_dp="moe_data_parallel_size moe_dp_size",
        dcp="decode_context_parallel_size dcp_size",
    ),
    harmless=("moe_dense_tp_size", "enable_expert_parallel"),
    key=lambda option: option.name,
)


def _settled(options: Options, table: Table) -> Settled:
    check_unknown(options, lambda text: "parallel" in text)
    settled = settle(table, [option.single for option in options.flags], options.path)
    settled.notes += options.notes
    return settled


def _sglang(options: Options) -> Settled:
    """Settle one engine: without attention in data parallel, ``--dp`` starts engines of their own beside it."""
    settled = _settled(options, _SGLANG)
    if "--enable-dp-attention" not in {option.key for option in options.flags}:
        replicas = settled.arguments.get("attn_dp", 1)
        settled.drop("attn_dp", f"starts {replicas} engines of this layout" if replicas > 1 else "")
    return settled


VLLM = Format(
    lambda options: system(options.command) == "vllm",
    lambda options: _settled(options, _VLLM),
    command="a command of vLLM",
)
SGLANG = Format(lambda options: system(options.command) == "sglang", _sglang, command="a command of SGLang")
