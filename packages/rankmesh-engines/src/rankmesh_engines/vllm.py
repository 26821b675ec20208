"""vLLM as a side: its own model classes and their ``load_weights``, under tensor, pipeline, data, expert parallelism.

The parameters are those after loading. What vLLM does to them next, in ``process_weights_after_loading`` (kernels that
transpose, block or quantise), comes after a transfer: fill the views, then call that hook. Of a configuration with a
``quantization_config`` the parameters of each layer that vLLM's own configuration quantises are refused by name.

The mesh is made by `rankmesh.recipes.vllm`. Source: vLLM 0.33.0, run without a GPU: its kernels are not needed to load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm import platforms

from rankmesh.core.recipes import vllm as recipe
from rankmesh_engines import transformers
from rankmesh_engines.engines import Quantised, default_dtype, model_folder, quiet
from rankmesh_engines.loaders import Side

if not platforms.current_platform.device_type:  # no device here: the modules below ask for it at import
    platforms.current_platform = import_module("vllm.platforms.cpu").CpuPlatform()

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

__all__ = ["side"]

_HOOK = "fill it before vLLM's process_weights_after_loading(model, model_config, device), then call that"


def side(config: Mapping[str, Any], *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 0) -> Side:
    """Return a model in vLLM; ``ep=1`` is ``--enable-expert-parallel``, over all ranks of a stage."""
    mesh = recipe(tp=tp, pp=pp, dp=dp).mesh
    weights = transformers.weights(config)
    quantization = config.get("quantization_config")
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    with model_folder(config, transformers.architecture(config)) as folder, quiet():
        asked = EngineArgs(
            model=folder,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_size=dp,
            enable_expert_parallel=bool(ep),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            distributed_executor_backend="mp",
            dtype=next(iter(weights.values()))[1],
        ).create_engine_config()
    kernels: dict[str, str] = {}
    quantised = _Quantised(_quantization(quantization, str(config.get("model_type")))) if quantization else None
    asked.quant_config = quantised
    asked.parallel_config.distributed_executor_backend = "external_launcher"  # the world that exists is taken

    def load(rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        asked.parallel_config.rank = rank % (tp * pp)
        asked.parallel_config.data_parallel_rank = rank // (tp * pp)
        with _one_process(), set_current_vllm_config(asked), default_dtype(asked.model_config.dtype):
            parallel_state.init_distributed_environment(mesh.size, rank, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(tp, pp, backend="fake")
            try:
                parameters, model = _parameters(asked, tensors)
                kernels.update(quantised.kernels(model) if quantised else {})
                return parameters
            finally:
                parallel_state.destroy_model_parallel()
                parallel_state.destroy_distributed_environment()

    return Side("vllm", mesh, weights, load, kernels, _HOOK)


def _parameters(asked: Any, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils

    # vLLM knows which layers a stage lacks by the id of its model, which a later model may have.
    vars(utils).get("_model_to_pp_missing_layer_names", {}).clear()  # of vLLM, absent from some releases
    asked.compilation_config.static_forward_context.clear()
    with next(iter(tensors.values())).device:
        model = initialize_model(asked)
    model.load_weights(iter(tensors.items()))
    return transformers.saved_tensors(model), model


class _Quantised(Quantised, QuantizationConfig):  # type: ignore[misc]
    UNQUANTISED = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)

    def plain(self, layer: torch.nn.Module) -> Any:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return UnquantizedFusedMoEMethod(layer.moe_config) if isinstance(layer, RoutedExperts) else None

    def apply_vllm_mapper(self, mapper: Any) -> None:
        self._config.apply_vllm_mapper(mapper)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(_quantization(config, ""))


def _quantization(given: Mapping[str, Any], model_type: str) -> Any:
    """vLLM's own configuration of a ``quantization_config``. Raises ``ValueError`` for a method that it lacks."""
    kind = str(given.get("quant_method", "")).lower()
    if kind == "mxfp4" and model_type == "gpt_oss":
        kind = "gpt_oss_mxfp4"
    return get_quantization_config(kind).from_config(dict(given))


@contextmanager
def _one_process() -> Iterator[None]:
    """vLLM without the channels between processes that are not there."""
    group = parallel_state.init_model_parallel_group

    def without_queue(*given: Any, **options: Any) -> Any:
        return group(*given, **{**options, "use_message_queue_broadcaster": False})

    with (
        quiet(),
        mock.patch.object(parallel_state, "init_model_parallel_group", without_queue),
        mock.patch.object(parallel_state, "_node_count", return_value=1),
    ):
        yield
