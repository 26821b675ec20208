"""megatron-core's own GPTModel, trained on gloo ranks: over the drop-in it has the losses that it has over its own."""

import contextlib
import importlib
import random
import warnings

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core.parallel_state")

LAYOUTS = {
    "TP 2 x DP 2": {"tensor_model_parallel_size": 2},
    "PP 2 x DP 2": {"pipeline_model_parallel_size": 2},
    "EP 2 x DP 4": {"expert_model_parallel_size": 2},
}
STEPS = 5
VOCABULARY, LENGTH, MICROBATCHES = 64, 8, 2


def megatron(name):
    """A module of megatron-core, without its words about what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


class OnCpu(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on the GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The call, with another device."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def without_a_gpu():
    """What megatron-core asks of CUDA on the way, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    tracker = megatron("tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    megatron("transformer.moe.moe_utils").te_general_gemm = None  # 0.16.1 asks for it without Transformer Engine too


def model_of(state, experts):
    """This rank's part of a small GPT."""
    specs, gpt = megatron("models.gpt.gpt_layer_specs"), megatron("models.gpt")
    config = megatron("transformer.transformer_config").TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        num_moe_experts=experts,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # noqa: S106
        add_bias_linear=experts is None,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        deterministic_mode=False,
    )
    return gpt.GPTModel(
        config=config,
        transformer_layer_spec=specs.get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def batches(state):
    """The same tokens for ranks of one replica, others for others."""
    place = torch.Generator().manual_seed(77 + state.get_data_parallel_rank())
    while True:
        yield torch.randint(VOCABULARY, (2, LENGTH + 1), generator=place)


def forward(iterator, model):
    """One microbatch: the output, and how its loss is taken."""
    tokens = next(iterator)
    places = torch.arange(LENGTH).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    output = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": float(losses.mean())})


def train(state, layout):
    """Five steps; each one's losses, on the last stage, and a sum of all parameters at the end."""
    torch.manual_seed(5)
    random.seed(5)
    state.initialize_model_parallel(**layout)
    model = model_of(state, experts=4 if "expert_model_parallel_size" in layout else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = megatron("pipeline_parallel.schedules").get_forward_backward_func()
    data, losses = batches(state), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with OnCpu():
            result = step(
                forward_step_func=forward,
                data_iterator=data,
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
        for parameter in model.parameters():
            if parameter.grad is not None:
                expert = not getattr(parameter, "allreduce", True)
                group = state.get_expert_data_parallel_group() if expert else state.get_data_parallel_group()
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        losses += [part["loss"] for part in result]
    total = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    state.destroy_model_parallel()
    return losses, total


def _train_on_both(me):
    """Every layout over megatron-core's own modules, then over the drop-in, in one process."""
    from rankmesh.dialects.megatron import install, parallel_state, uninstall

    without_a_gpu()
    local = megatron("parallel_state")
    theirs = {name: train(local, layout) for name, layout in LAYOUTS.items()}
    install()
    layers = megatron("tensor_parallel.layers")
    ours_is_used = layers.get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    ours = {name: train(megatron("parallel_state"), layout) for name, layout in LAYOUTS.items()}
    uninstall()
    return {"theirs": theirs, "ours": ours, "used": ours_is_used, "back": megatron("parallel_state") is local}


@pytest.mark.long
def test_gpt_model_has_the_same_losses(ranks):
    """4 ranks, five steps of each layout: equal losses and equal parameters, bit for bit, and they learn."""
    result = ranks(4, _train_on_both, timeout=60.0)
    for rank, part in enumerate(result):
        assert part["used"] is True
        assert part["back"] is True
        assert part["ours"] == part["theirs"], f"rank {rank}"
    for name in LAYOUTS:
        losses = [part["ours"][name][0] for part in result if part["ours"][name][0]]
        assert len(losses) == (2 if name.startswith("PP") else 4)
        assert all(len(steps) == STEPS * MICROBATCHES for steps in losses)
        assert len({steps[0] for steps in losses}) >= 2
