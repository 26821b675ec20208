"""Transformers as a side: ``from_pretrained`` with a ``DistributedConfig``: tensor and expert parallelism, FSDP2.

The mesh is transformers', whose last dimension is adjacent; experts see it as ``ep`` and the remaining ranks:

```
(pp, dp_replicate, fsdp, tp)       Mesh(tp=, fsdp=, dp_replicate=, pp=)
(pp, dp_replicate, efsdp, ep)      its view "expert"
```

Source: transformers 5.23, ``transformers.distributed`` and ``core_model_loading``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed import DistributedConfig, sharding_utils
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from rankmesh.core.mesh import Mesh
from rankmesh.errors import LayoutError
from rankmesh_engines.loaders import Side, Weights

__all__ = ["architecture", "configuration", "saved_tensors", "side", "weights"]

_HOOK = (
    "fill a model that has no quantization_config, then quantise it: from_pretrained(None, config=config, "
    "state_dict=model.state_dict(), quantization_config=...)"
)


def weights(config: Mapping[str, Any]) -> Weights:
    """Shape and dtype of every tensor of a checkpoint, by the names under which transformers saves it.

    ``config`` is the content of ``config.json``; of a quantised checkpoint these are the tensors before quantisation,
    which a trainer has.
    """
    return _weights(configuration(config))


def architecture(config: Mapping[str, Any]) -> str:
    """Return the class of a model, as ``architectures`` of its ``config.json`` names it."""
    return type(_empty(configuration(config))).__name__


def saved_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and the buffers that a checkpoint has."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def side(
    config: Mapping[str, Any], *, tp: int = 1, fsdp: int = 1, dp_replicate: int = 1, pp: int = 1, ep: int = 1
) -> Side:
    """Return a model in transformers; ``fsdp`` is FSDP2's size, and ``ep`` divides ``tp`` x ``fsdp``."""
    made = configuration(config)
    outer = {"dp_replicate": dp_replicate, "pp": pp}
    axes = {"tp": tp, "fsdp": fsdp, **outer}
    mesh = Mesh.of(axes)
    inner = tp * fsdp
    if inner % ep:
        raise LayoutError(f"ep={ep} does not divide tp x fsdp = {inner}; give an ep that does")
    if ep > 1:
        mesh = mesh.with_view("expert", ep=ep, efsdp=inner // ep, **outer, shared=tuple(outer))
    names = {"tp": "tp_size", "fsdp": "fsdp_size", "dp_replicate": "dp_replicate_size", "pp": "pp_size"}
    kind = type(_empty(made))
    asked = {names[axis]: size for axis, size in axes.items()} | {"ep_size": ep}

    def load(_rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with _loading():
            model = kind.from_pretrained(
                None,
                config=made,
                state_dict=dict(tensors),
                dtype=made.dtype,
                distributed_config=DistributedConfig(**asked),
            )
        return saved_tensors(model)

    return Side("transformers", mesh, _weights(made), load, _kernels(made, config.get("quantization_config")), _HOOK)


def configuration(config: Mapping[str, Any]) -> Any:
    """Return transformers' own configuration of a model, without ``quantization_config``."""
    given = dict(config)
    kind = given.pop("model_type", None)
    given.pop("quantization_config", None)
    made = transformers.AutoConfig.for_model(kind, **given)
    made = getattr(made, "text_config", made) if hasattr(made, "vision_config") else made
    made.dtype = made.dtype or torch.float32
    return made


def _kernels(config: Any, quantization: Mapping[str, Any] | None) -> dict[str, str]:
    """Parameters that the quantiser of a ``quantization_config`` replaces on a machine that can, with its format."""
    if not quantization:
        return {}
    plain = dict(_empty(config).named_parameters())
    kind = str(quantization.get("quant_method", "quantised"))
    found: set[str] = set()
    for kernels in (False, True):  # a quantiser that finds no device for one of them leaves the model as it is
        model = _empty(config)
        try:
            quantizer = AutoHfQuantizer.from_config(dict(quantization), pre_quantized=True)
            quantizer.preprocess_model(model, use_kernels=kernels)
        except (ImportError, RuntimeError):  # its package is not here: what it could replace
            kept = HfQuantizer.get_modules_to_not_convert(model, quantization.get("modules_to_not_convert"))
            layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
            found |= {
                name
                for name, one in plain.items()
                if (name.rpartition(".")[0] in layers or one.dim() > 2)
                and should_convert_module(name.rpartition(".")[0], kept)
            }
            continue
        made = {name: (tuple(one.shape), one.dtype) for name, one in model.named_parameters()}
        found |= {name for name, one in plain.items() if made.get(name) != (tuple(one.shape), one.dtype)}
    return dict.fromkeys(sorted(found), kind)


def _weights(config: Any) -> Weights:
    model = _empty(config)
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        model._weight_conversions = get_model_conversion_mapping(model)
    kept = dict(model.state_dict())
    for name in model.all_tied_weights_keys or {}:
        kept.pop(name, None)
    saved = revert_weight_conversion(model, kept)
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in saved.items()}


def _empty(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)


@contextmanager
def _loading() -> Iterator[None]:
    """Load on this thread, which is traced; compute where a rank's shards of one shape begin once, not by expert."""
    computed = functools.cache(sharding_utils.compute_local_shape_and_global_offset)
    with (
        mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
        mock.patch.object(sharding_utils, "compute_local_shape_and_global_offset", computed),
    ):
        yield
