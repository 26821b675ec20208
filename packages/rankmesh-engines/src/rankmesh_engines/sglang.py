"""SGLang as a side: its own model classes and their ``load_weights``, under tensor, pipeline, expert parallelism.

```
tp=8          all ranks of a stage: --tp-size
pp=2          --pp-size
ep=4          of tp: --ep-size; experts are cut by the rest, tp / ep
dp=2          of tp: --dp-size with --enable-dp-attention; attention is cut by the rest, tp / dp
```

The layout is for an engine with ``--moe-runner-backend triton --disable-shared-experts-fusion``, which does not
depend on the device: other kernels of SGLang transpose experts, or add the shared expert to them, and ``views`` refuses
such parameters. Redundant experts (``--ep-num-redundant-experts``, ``--enable-eplb``) move while the engine runs, so
they are not options.

The parameters are those after loading. What SGLang makes of them next comes after a transfer: fill the views, then call
``model.post_load_weights()`` where the model has it (DeepSeek computes ``w_kc`` and ``w_vc`` there), and
``process_weights_after_loading`` of each module's ``quant_method``. Of a configuration with a ``quantization_config``
the parameters of each layer that SGLang's own configuration quantises are refused by name.

The mesh is made by `rankmesh.recipes.sglang`. Source: SGLang 0.5.23, run without a GPU: packages of kernels that are
not installed are replaced while it constructs and loads, which runs none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rankmesh.core.recipes import sglang as recipe
from rankmesh.errors import LayoutError
from rankmesh_engines import transformers
from rankmesh_engines.engines import Quantised, default_dtype, model_folder, quiet
from rankmesh_engines.loaders import Side
from rankmesh_engines.stand_ins import StandIns, settle_triton

# Who looks for these packages themselves does so before stand-ins answer.
settle_triton()
import_module("transformers.image_utils")

# SGLang imports triton everywhere, torchvision for images, and vLLM's kernels where there is no GPU.
_KERNELS = StandIns("triton", "torchvision", hidden=() if torch.cuda.is_available() else ("vllm",))

with _KERNELS, quiet():
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

__all__ = ["side"]

_HOOK = "fill it before the process_weights_after_loading(module) of its module's quant_method, then call that"


def side(config: Mapping[str, Any], *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> Side:
    """Return a model in SGLang; ``dp`` is attention's, and divides ``tp`` as ``ep`` does."""
    for name, size in (("dp", dp), ("ep", ep)):
        if size < 1 or tp % size:
            raise LayoutError(
                f"{name}={size} does not divide tp={tp}, of which it is a part in SGLang; give another {name}"
            )
    mesh = recipe(tp=tp, pp=pp, attn_dp=dp, ep=ep).mesh
    weights = transformers.weights(config)
    quantization = config.get("quantization_config")
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    dtype = next(iter(weights.values()))[1]
    with model_folder(config, transformers.architecture(config)) as folder, _KERNELS, _unchanged(), quiet():
        asked = ServerArgs(
            model_path=folder,
            tp_size=tp,
            pp_size=pp,
            attn_dp_size=dp,
            ep_size=ep,
            moe_runner_backend="triton",
            disable_shared_experts_fusion=True,
            skip_tokenizer_init=True,
            load_format="dummy",
            device="cuda",
            mem_fraction_static=0.5,  # not measured on a device
            dtype=dtype,
        )
        asked.resolve_once()
        model_config = model_config_of(asked)
    kernels: dict[str, str] = {}
    quantised = _Quantised(_quantization(quantization)) if quantization else None

    def load(rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with _KERNELS, _engine(asked, model_config, rank), default_dtype(getattr(torch, dtype)):
            with next(iter(tensors.values())).device:
                model = loader._initialize_model(model_config, LoadConfig(), quantised)
            model.load_weights(iter(tensors.items()))
            kernels.update(quantised.kernels(model) if quantised else {})
            return transformers.saved_tensors(model)

    return Side("sglang", mesh, weights, load, kernels, _HOOK)


@contextmanager
def _engine(asked: Any, model_config: Any, rank: int) -> Iterator[None]:
    """SGLang's own state of one rank; as it was before, when it ends."""
    before = runtime_context.snapshot_context()
    runtime_context.reset_context()
    try:
        # Without the channels between processes that are not there.
        with quiet(), _unchanged(SGLANG_USE_MESSAGE_QUEUE_BROADCASTER="0"):
            ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
            runtime_context.publish(asked, role="scheduler", ranks=ranks)
            parallel_state.init_distributed_environment(torch.distributed.get_world_size(), rank, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(backend="fake")
            initialize_dp_attention(server_args=asked)
            bootstrap.init_layer_runtime(model_config=model_config)
            initialize_moe_config()
            yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        runtime_context.restore_context(before)


@contextmanager
def _unchanged(**variables: str) -> Iterator[None]:
    """Restore the environment and the rotary embeddings, which SGLang changes, at the end of this block."""
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.dict(factory._ROPE_DICT, clear=True),
        mock.patch.object(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", False),
    ):
        yield


class _Quantised(Quantised, QuantizationConfig):  # type: ignore[misc]
    UNQUANTISED = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)

    def plain(self, layer: torch.nn.Module) -> Any:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return UnquantizedFusedMoEMethod() if isinstance(layer, FusedMoE) else None

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(_quantization(config))


def _quantization(given: Mapping[str, Any]) -> Any:
    """SGLang's own configuration of a ``quantization_config``. Raises ``ValueError`` for a method that it lacks."""
    kind = str(given.get("quant_method", "")).lower()
    if kind == "mxfp4":  # known by name only where there is a device for it
        return Mxfp4Config.from_config(dict(given))
    return get_quantization_config(kind.replace("gptq", "gptq_marlin")).from_config(dict(given))
