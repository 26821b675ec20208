"""A small GPT of Megatron's own parts, trained with its DistributedDataParallel and its optimizer on the CPU."""

import contextlib
import importlib
import random
import warnings
from unittest.mock import Mock

import torch
from tests.peers import stand_ins
from tests.peers.stand_ins import OnCpu

stand_ins.triton()

VOCABULARY, LENGTH, STEPS, MICROBATCHES = 64, 8, 3, 2


def megatron(name):
    """A module of megatron-core, without its words about what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


def without_a_gpu():
    """What megatron-core asks of CUDA on the way, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    tracker = megatron("tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    megatron("transformer.moe.moe_utils").te_general_gemm = None  # 0.16.1 asks for it without Transformer Engine too


class AsOnAGpu(OnCpu):
    """Tensors of the CPU say that they are a GPU's, which Megatron's optimizers demand."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The call; the name of a type with another device."""
        answer = super().__torch_function__(function, types, args, kwargs)
        asks_for_the_type = function is torch.Tensor.type and len(args) == 1 and not kwargs
        return answer.replace("torch.", "torch.cuda.") if asks_for_the_type else answer


def config_of(state, *, experts=None, sequence_parallel=False, interleaved=False):
    """The configuration of the model of this rank."""
    return megatron("transformer.transformer_config").TransformerConfig(
        num_layers=4 if interleaved else 2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=2 if interleaved else None,
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        num_moe_experts=experts,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # noqa: S106
        add_bias_linear=experts is None,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        deterministic_mode=False,
    )


def chunks_of(state, config, experts):
    """This rank's model, or its virtual stages."""
    specs, gpt = megatron("models.gpt.gpt_layer_specs"), megatron("models.gpt")
    virtual = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual or 1):
        where = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        yield gpt.GPTModel(
            config=config,
            transformer_layer_spec=specs.get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=state.is_pipeline_first_stage(**where),
            post_process=state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            **({"vp_stage": stage} if virtual else {}),
        )


def batches(state):
    """The same tokens for ranks of one replica, others for others."""
    place = torch.Generator().manual_seed(77 + state.get_data_parallel_rank())
    while True:
        yield torch.randint(VOCABULARY, (2, LENGTH + 1), generator=place)


def forward(iterator, model):
    """One microbatch: the output, and how its loss is taken."""
    tokens = next(iterator)
    places = torch.arange(LENGTH).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    output = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.detach()})


def norms_over_parts_of_a_sequence():
    """Norms of torch's where Megatron wants Apex's: their weights say that each rank saw a part of the sequence."""
    norm = megatron("transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def made(cls, config, *given, **named):
        parts, config.sequence_parallel = config.sequence_parallel, False
        layer = make(cls, config, *given, **named)
        config.sequence_parallel = parts
        for weight in layer.parameters():
            weight.sequence_parallel = parts
        return layer

    norm.__new__ = made


def train(state, layout, *, sharded=False, experts=None, sequence_parallel=False):
    """Three steps; losses on the last stage, gradient norms, and a sum of all parameters at the end."""
    torch.manual_seed(5)
    random.seed(5)
    state.initialize_model_parallel(**layout)
    interleaved = "virtual_pipeline_model_parallel_size" in layout
    config = config_of(state, experts=experts, sequence_parallel=sequence_parallel, interleaved=interleaved)
    distributed, optimizers = megatron("distributed"), megatron("optimizer")
    ddp = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=layout.get("num_distributed_optimizer_instances", 1),
    )
    with AsOnAGpu():
        model = [distributed.DistributedDataParallel(config, ddp, part) for part in chunks_of(state, config, experts)]
        settings = optimizers.OptimizerConfig(
            optimizer="adam", lr=0.01, clip_grad=0.0, use_distributed_optimizer=sharded
        )
        optimizer = optimizers.get_megatron_optimizer(settings, model)
        losses, norms = steps_of(state, config, model, optimizer)
    total = [float(p.detach().double().sum()) for part in model for p in part.parameters()]
    state.destroy_model_parallel()
    return {"losses": losses, "norms": norms, "parameters": total, "steps": len(norms)}


def steps_of(state, config, model, optimizer):
    """Forward, backward and update; the losses of each microbatch, and the norm of each step's gradients."""
    step = megatron("pipeline_parallel.schedules").get_forward_backward_func()
    config.finalize_model_grads_func = megatron("distributed").finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    data = [batches(state) for _ in model]
    losses, norms = [], []
    for _ in range(STEPS):
        for part in model:
            part.zero_grad_buffer()
        optimizer.zero_grad()
        result = step(
            forward_step_func=forward,
            data_iterator=data if len(model) > 1 else data[0],
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses += [float(part["loss"].mean()) for part in result]
        norms.append(float(norm))
    return losses, norms


def on_both(layouts):
    """Every layout over Megatron's own modules, then over the drop-ins."""
    from rankmesh.dialects.megatron import install, parallel_state, uninstall

    without_a_gpu()
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.Stream = torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Mock()
    norms_over_parts_of_a_sequence()
    local = megatron("parallel_state")
    theirs = {name: train(local, layout, **how) for name, (layout, how) in layouts.items()}
    install()
    used = megatron("tensor_parallel.layers").get_tensor_model_parallel_rank
    ours = {name: train(parallel_state, layout, **how) for name, (layout, how) in layouts.items()}
    same = used is parallel_state.get_tensor_model_parallel_rank
    uninstall()
    return {"theirs": theirs, "ours": ours, "used": same}
