"""Transformers as a side: ``from_pretrained`` with a ``DistributedConfig``: tensor and expert parallelism, FSDP2.

The mesh is that of transformers, whose last dimension is adjacent; experts see it as ``ep`` and the remaining ranks:

```
(pp, dp_replicate, fsdp, tp)       Mesh(tp=, fsdp=, dp_replicate=, pp=)
(pp, dp_replicate, efsdp, ep)      its view "expert"
```

Source: transformers 5.23, ``transformers.distributed`` and ``core_model_loading``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed import DistributedConfig

from rankmesh.core.mesh import Mesh
from rankmesh.errors import LayoutError
from rankmesh.transfer.layouts.layout import Side, Weights

__all__ = ["architecture", "configuration", "saved_tensors", "side", "weights"]

_AXES = ("tp", "fsdp", "dp_replicate", "pp")


def weights(config: Mapping[str, Any]) -> Weights:
    """Shape and dtype of every tensor of a checkpoint, by the names under which transformers saves it.

    ``config`` is the content of ``config.json``. Raises ``LayoutError`` for a quantised checkpoint.
    """
    return _weights(configuration(config))


def architecture(config: Mapping[str, Any]) -> str:
    """The class of a model, as ``architectures`` of its ``config.json`` names it."""
    return type(_empty(configuration(config))).__name__


def saved_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, and the buffers that a checkpoint has."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def side(config: Mapping[str, Any], *, ep: int = 1, **sizes: int) -> Side:
    """A model over ``tp``, ``fsdp``, ``dp_replicate``, ``pp`` and ``ep``, each 1 by default."""
    made = configuration(config)
    axes = {axis: sizes.pop(axis, 1) for axis in _AXES}
    if sizes:
        raise LayoutError(f"transformers has no axis {next(iter(sizes))!r}; it has {', '.join(_AXES)} and ep")
    mesh = Mesh.of(axes)
    inner = axes["tp"] * axes["fsdp"]
    if inner % ep:
        raise LayoutError(f"ep={ep} does not divide tp x fsdp = {inner}; give an ep that does")
    if ep > 1:
        outer = {axis: axes[axis] for axis in _AXES[2:]}
        mesh = mesh.with_view("expert", ep=ep, efsdp=inner // ep, **outer, shared=tuple(outer))
    names = {"tp": "tp_size", "fsdp": "fsdp_size", "dp_replicate": "dp_replicate_size", "pp": "pp_size"}
    kind = type(_empty(made))
    asked = {names[axis]: size for axis, size in axes.items()} | {"ep_size": ep}

    def load(_rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with _one_thread():
            model = kind.from_pretrained(
                None,
                config=made,
                state_dict=dict(tensors),
                dtype=made.dtype,
                distributed_config=DistributedConfig(**asked),
            )
        return saved_tensors(model)

    return Side("transformers", mesh, _weights(made), load)


def configuration(config: Mapping[str, Any]) -> Any:
    """Transformers' own configuration of a model. Raises ``LayoutError`` for a quantised checkpoint."""
    given = dict(config)
    kind = given.pop("model_type", None)
    if given.get("quantization_config"):
        raise LayoutError(
            "the checkpoint is quantised, and its kernels' forms are made after loading; give the configuration "
            "without quantization_config, for the weights that a trainer has"
        )
    made = transformers.AutoConfig.for_model(kind, **given)
    made = getattr(made, "text_config", made) if hasattr(made, "vision_config") else made
    made.dtype = made.dtype or torch.float32
    return made


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
def _one_thread() -> Iterator[None]:
    """Loads on this thread, which is the one that is traced."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before
