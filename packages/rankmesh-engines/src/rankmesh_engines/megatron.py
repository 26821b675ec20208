"""Megatron-Core as a side: its own GPTModel on its own parallel state, filled by mbridge's loader.

```
tp cp dp pp       the mesh, tp adjacent; experts see it as etp ep edp pp, its view "expert"
vpp=2             virtual stages of a rank: parameters as ModuleList(chunks) names them, "1.decoder.layers.0..."
first=3, last=3   layers of the first and of the last stage: --decoder-first-pipeline-num-layers
vocab=128         the vocabulary is padded to a multiple of 128 tp: --make-vocab-size-divisible-by
te=1              names of a model of Transformer Engine's modules, whose parameters have the same forms; refused for
                  latent attention with tp: its down projections are whole there, and cut in what is read
```

Megatron cuts and fuses (queries, keys and values by group; gate above up), mbridge says from which tensors of a
checkpoint. Layers follow Megatron's local specification, which needs no Transformer Engine. Layers of
multi-token prediction are left out. Source: megatron-core 0.19.2, mbridge 0.15.1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import mbridge  # noqa: F401  - registers the models
import torch
import torch.distributed as dist
from mbridge.core import LLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.parallel_states import ParallelStates
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from rankmesh.core.recipes import megatron as recipe
from rankmesh.errors import LayoutError, quoted
from rankmesh_engines import transformers
from rankmesh_engines.loaders import Side

__all__ = ["side"]

_HOOK = "fill a model made without fp8 parameters (--fp8-param-gather); Transformer Engine quantises in its forward"
# Of a configuration: no Transformer Engine, no GPU, no random numbers.
_PLAIN = {
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "sequence_parallel": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "mtp_num_layers": None,
    "attention_backend": AttnBackend.auto,
}
# What a local specification calls a parameter, and Transformer Engine's; of all layers, dense ones, those with MLA.
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$")
_DENSE = {".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_"}
_ATTENTION = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
_LATENT = {
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}


def side(
    config: Mapping[str, Any],
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
) -> Side:
    """Return a model in Megatron-Core; ``etp`` is ``tp`` unless it is given.

    Raises ``LayoutError`` for a model that mbridge cannot load.
    """
    mesh = recipe(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp or tp).mesh
    kind = config.get("model_type")
    if kind not in _MODEL_REGISTRY:
        raise LayoutError(
            f"mbridge has no map from the weights of {quoted(kind)} to Megatron-Core; it has "
            f"{', '.join(sorted(_MODEL_REGISTRY))}",
            model_type=kind,
        )
    if te and tp > 1 and config.get("kv_lora_rank") is not None:
        raise LayoutError(
            f"te=1 with tp={tp} of {quoted(kind)}: Transformer Engine keeps latent attention's down projections whole, "
            "and the local specification, whose loader is read, cuts them; leave te out, or give tp=1",
            model_type=kind,
        )
    weights = transformers.weights(config)
    asked = transformers.configuration(config)
    asked.rope_theta = (asked.rope_parameters or {}).get("rope_theta", 10000.0)  # where mbridge looks for it
    dtype = getattr(torch, next(iter(weights.values()))[1])
    stages = {"num_layers_in_first_pipeline_stage": first or None, "num_layers_in_last_pipeline_stage": last or None}
    options = {**_PLAIN, **stages, "params_dtype": dtype}
    bridge = _bridge(_MODEL_REGISTRY[kind], options, bool(asked.tie_word_embeddings))
    multiple: int | None = vocab * tp
    if bridge._model_provider is not LLMBridge._model_provider:
        if asked.vocab_size % (vocab * tp):
            raise LayoutError(
                f"mbridge does not pad the vocabulary of {kind}, and {asked.vocab_size} is not a multiple of vocab x "
                f"tp = {vocab * tp}; set vocab=1",
                vocab_size=asked.vocab_size,
            )
        multiple = None

    def load(_rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        device = next(iter(tensors.values())).device
        # What Megatron prints goes to stderr: stdout is for data.
        with redirect_stdout(sys.stderr), _state(tp, cp, pp, vpp, ep, etp or tp), _without_gpu(device):
            # mbridge reads on the first rank of tp and scatters: each rank reads, and takes the part of its own.
            known = ParallelStates.get_parallel_state()
            known.vpp_size = vpp or None
            known.tp_rank = known.etp_rank = 0
            one = bridge(asked, dtype, known, multiple)
            one.tensors = tensors
            with device:
                chunks = [_provided(one, vpp, stage) for stage in range(vpp or 1)]
            one.load_weights([_as_te(chunk) for chunk in chunks], "")
        made: dict[str, Tensor] = {}
        for number, chunk in enumerate(chunks):
            for name, tensor in _saved(chunk).items():
                local = _te_name(name, chunk) if te else name
                made[f"{number}.{local}" if vpp else local] = tensor
        return made

    return Side("megatron", mesh, weights, load, hook=_HOOK)


def _saved(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a chunk, and the buffers that a checkpoint has."""
    return {name: t for name, t in transformers.saved_tensors(chunk).items() if "_extra_state" not in name}


def _provided(bridge: Any, vpp: int, stage: int) -> Any:
    """Return the model of a rank, or one of its virtual stages."""
    where = {"ignore_virtual": False, "vp_stage": stage} if vpp else {}
    return bridge._model_provider([])(
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        vp_stage=stage if vpp else None,
    )


def _bridge(kind: Any, options: Mapping[str, Any], tied: bool) -> Any:
    """Return a class of mbridge that builds layers of the local specification, and loads tensors from memory."""

    class Bridge(kind):  # type: ignore[misc]
        # A copy: a bridge of tied embeddings changes it for all others.
        _DIRECT_MAPPING: ClassVar[dict[str, str]] = dict(kind._DIRECT_MAPPING)

        def _adjust_mapping_for_shared_weights(self) -> None:
            if tied:
                self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

        def _build_base_config(self, text_config_key: str | None = None, **given: Any) -> Any:
            if "max_position_embeddings" in given:  # of MLA, as Megatron called it before 0.13
                given["original_max_position_embeddings"] = given.pop("max_position_embeddings")
            return super()._build_base_config(text_config_key, **{**given, **options})

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            made = get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
            )
            for layer in made.layer_specs if self.config.multi_latent_attention else ():
                # Megatron's own kernel refuses heads of two widths; kernels of attention have no weights.
                layer.submodules.self_attention.submodules.core_attention = IdentityOp
            return made

        def _get_safetensor_io(self, _path: str) -> Any:
            return SimpleNamespace(load_some_hf_weight=lambda names: {name: self.tensors[name] for name in names})

    return Bridge


def _as_te(chunk: Any) -> Any:
    """Return the parts of a model that mbridge reads, under the names of Transformer Engine's modules."""
    tensors = {_te_name(name, chunk): tensor.detach() for name, tensor in _saved(chunk).items()}
    return SimpleNamespace(decoder=chunk.decoder, state_dict=lambda: tensors)


def _te_name(name: str, chunk: Any) -> str:
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found is None:
        return name
    layer = chunk.decoder.layers[int(found[1])]
    fused = dict(_DENSE) if not hasattr(layer.mlp, "experts") else {}
    fused |= _LATENT if hasattr(layer.self_attention, "linear_kv_up_proj") else _ATTENTION
    for local, theirs in fused.items():
        name = name.replace(local, theirs)
    return _EXPERT.sub(r".experts.\2.weight\1", name)


@contextmanager
def _state(tp: int, cp: int, pp: int, vpp: int, ep: int, etp: int) -> Iterator[None]:
    """Megatron's own parallel state; scatters give each rank its part, without a message."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp or None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )

    def scatter(into: Tensor, parts: list[Tensor], src: int, group: dist.ProcessGroup) -> None:
        into.copy_(parts[dist.get_rank(group)])

    try:
        with mock.patch.object(dist, "scatter", scatter):
            yield
    finally:
        parallel_state.destroy_model_parallel()


@contextmanager
def _without_gpu(device: torch.device) -> Iterator[None]:
    """Answer Megatron's calls of CUDA while it constructs a model; restore the variables NVTE_* that it sets."""
    with (
        mock.patch.object(torch.cuda, "Stream"),  # of shared experts and dispatchers
        mock.patch.object(torch.cuda, "current_device", return_value=device),
        mock.patch.object(Tensor, "cuda", lambda tensor, *_, **__: tensor),  # of embeddings that two stages share
        mock.patch.dict(os.environ),
    ):
        yield
