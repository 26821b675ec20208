"""The defects of Megatron-LM issue 7452 in Megatron's own code, as programs for ``sim.compare``, without annotations.

``PYTHONPATH=RELEASE python -m tests.peers.defects`` prints a table: what differs first, and its cause.

Each program calls the function of Megatron that the issue names, on simulated ranks, with ``install()``. Where a module
gets process groups of its own, the global state has other ones, in the order of Megatron: ``tp`` adjacent.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.peers import stand_ins

stand_ins.triton()

from tests.peers.megatron_training import AsOnAGpu, megatron, without_a_gpu  # noqa: E402

from rankmesh import sim  # noqa: E402
from rankmesh.dialects.megatron import install, parallel_state  # noqa: E402

HIDDEN, LENGTH, BATCH = 8, 8, 4
# The module's replicas are adjacent, the global state's shards are: two grids over the same ranks.
OTHER_GRID = ("tp=2", "dp=2", "dp=2,tp=2")
PROGRAMS = {}


@dataclass(frozen=True)
class Finding:
    """A program with the number of its finding; ``harmless`` is the same call where the defect cannot show."""

    number: int
    script: str
    layouts: tuple[str, ...]
    program: Callable[..., None]

    def compared(self, *, harmless=False, seconds=20.0):
        """The comparison; two grids that are one do no harm."""
        grids = self.layouts == OTHER_GRID
        layouts = ("tp=2", "dp=2", "tp=2,dp=2") if grids and harmless else self.layouts
        given = {"harmless": True} if harmless and not grids else {}
        program = partial(self.program, **given)
        return sim.compare(program, [_whole(layout) for layout in layouts], seconds=seconds)


def _whole(layout):
    """A layout with every axis."""
    return ",".join([layout, *(f"{axis}=1" for axis in ("tp", "cp", "dp", "pp") if axis not in layout)])


def finding(number, script, *layouts):
    """Add a program under the number and the name of its reproduction in the issue."""

    def add(program):
        PROGRAMS[script] = Finding(number, script, layouts, program)
        return program

    return add


@contextlib.contextmanager
def megatron_state(**sizes):
    """Megatron's global parallel state of these sizes, in Megatron's own order of axes."""
    parallel_state.initialize_model_parallel(**sizes)
    with AsOnAGpu():
        yield
    parallel_state.destroy_model_parallel()


def size(groups, axis):
    """How many ranks an axis has."""
    return groups[axis].size


def config(groups, **options):
    """A configuration of Megatron's, in torch's default dtype and without what needs a GPU."""
    return megatron("transformer.transformer_config").TransformerConfig(
        **{
            "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 16,
            "use_cpu_initialization": True, "params_dtype": torch.get_default_dtype(),
            "pipeline_dtype": torch.get_default_dtype(),
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False, "bias_dropout_fusion": False,
            "tensor_model_parallel_size": size(groups, "tp"),
            **options,
        }
    )  # fmt: skip


def collection(groups, *kinds):
    """A module's explicit process groups."""
    collection = megatron("process_groups_config").ProcessGroupCollection()
    for kind in kinds:
        setattr(collection, kind, groups[kind.split("_")[0]].pg)
    return collection


def sequence(groups, name, *, seq="tp", batch="dp"):
    """Activations: sequence, batch, hidden, cut along the first two."""
    return sim.random(groups, name, (LENGTH, BATCH, HIDDEN), (seq, batch, None))


def total(tensor, *kinds_of):
    """A sum over groups, in place."""
    for group in kinds_of:
        dist.all_reduce(tensor, group=group.pg)
    return tensor


@finding(3, "03_mtp_per_token_loss_local_counts.py", "dp=2", "dp=4")
def mtp_loss_with_local_counts(groups, harmless=False):
    """``process_mtp_loss`` normalises by the counts of this rank; the gradients are divided by all tokens."""
    with megatron_state():
        mtp = megatron("transformer.multi_token_prediction")
        mtp.MTPLossLoggingHelper.save_metrics_to_tracker = staticmethod(lambda *_, **__: None)
        mtp.MTPLossLoggingHelper.save_loss_to_tracker = staticmethod(lambda *_, **__: None)
        weight = sim.random(groups, "weight", (5, HIDDEN)).requires_grad_()
        hidden = sim.random(groups, "hidden", (2 * LENGTH, BATCH, HIDDEN), (None, "dp", None)).requires_grad_()
        labels = (sim.random(groups, "labels", (BATCH, LENGTH), ("dp", None), draw=torch.rand) * 5).long()
        lengths = sim.shard(groups, torch.tensor([5] * 4 if harmless else [3, 8, 5, 4]), ("dp",))
        mask = (torch.arange(LENGTH) < lengths[:, None]).to(torch.float64)
        output = mtp.process_mtp_loss(
            hidden, labels, mask.clone(), lambda x, **_: (x @ weight.T, None), None, None, True,
            lambda wanted, logits: F.cross_entropy(
                logits.transpose(0, 1).flatten(0, 1), wanted.flatten(), reduction="none"
            ).view_as(wanted),
            config(groups, mtp_num_layers=1, calculate_per_token_loss=True),
        )  # fmt: skip
        (output * 0.0).sum().backward()
        gradient = total(weight.grad, groups["dp"]) / total(mask.sum(), groups["dp"])
        sim.see("output weight grad", gradient)


@finding(4, "04_mtp_recompute_wrong_tp_group.py", *OTHER_GRID)
def recomputation_over_the_global_group(groups):
    """Distributed saved activations are cut and gathered over the tp group of the global state."""
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        x = sim.random(groups, "x", (LENGTH, BATCH, HIDDEN), (None, "dp", None))
        weight = sim.random(groups, "weight", (HIDDEN, HIDDEN)).requires_grad_()
        kept = x.clone().requires_grad_()
        layer = SimpleNamespace(
            config=config(groups, distribute_saved_activations=True, recompute_method="uniform", recompute_num_layers=1,
                          recompute_granularity="full", sequence_parallel=False),
            training=True, tp_group=groups["tp"].pg,
            _proj_and_transformer_layer=lambda hidden_states, **_: torch.tanh(hidden_states @ weight),
        )  # fmt: skip
        block = megatron("transformer.multi_token_prediction").MultiTokenPredictionLayer
        block._checkpointed_forward(layer, kept * 1.0, x.clone()).square().sum().backward()
        sim.see("weight grad", total(weight.grad, groups["dp"]))


@finding(5, "05_gpt_moe_padding_mask_wrong_tp_group.py", *OTHER_GRID)
def padding_mask_over_the_global_group(groups):
    """The padding mask of the router is scattered over the tp group of the global state."""
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        mask = sim.random(groups, "mask", (BATCH, LENGTH), ("dp", None), draw=torch.rand) > 0.5
        hidden = sequence(groups, "hidden")
        embedding = SimpleNamespace(scatter_to_sequence_parallel=True, reduce_scatter_embeddings=True)
        model = SimpleNamespace(
            config=config(groups, sequence_parallel=size(groups, "tp") > 1), pre_process=True,
            embedding=type("Embedding", (), {**vars(embedding), "__call__": lambda self, **_: hidden})(),
            position_embedding_type="none", pg_collection=collection(groups, "tp", "cp"), mtp_process=False,
            training=True, decoder=SimpleNamespace(input_tensor=None),
        )  # fmt: skip
        gpt = megatron("models.gpt.gpt_model").GPTModel
        result = gpt._preprocess(
            model, torch.zeros(mask.shape).long(), torch.zeros(mask.shape).long(), padding_mask=mask
        )
        found = next(one for one in result if one is not None and one.dtype == torch.bool)
        sim.see("padding mask", found.double(), ("dp", "tp"))


@finding(6, "06_cross_attention_qkv_wrong_tp_group.py", *OTHER_GRID)
def cross_attention_over_the_global_group(groups):
    """``linear_q`` and ``linear_kv`` are made without the tp group of the module."""
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        attention, layers = megatron("transformer.attention"), megatron("tensor_parallel.layers")
        core = megatron("transformer.dot_product_attention").DotProductAttention
        many = size(groups, "tp") > 1
        module = attention.CrossAttention(
            config(groups, sequence_parallel=many, add_bias_linear=False),
            attention.CrossAttentionSubmodules(
                linear_q=layers.ColumnParallelLinear, linear_kv=layers.ColumnParallelLinear, core_attention=core,
                linear_proj=layers.RowParallelLinear,
            ),
            layer_number=1, attn_mask_type=megatron("transformer.enums").AttnMaskType.no_mask,
            pg_collection=collection(groups, "tp", "cp", "pp"),
        )  # fmt: skip
        cuts = {"linear_q.weight": ("tp", None), "linear_kv.weight": ("tp", None), "linear_proj.weight": (None, "tp")}
        fill(groups, module, cuts)
        output, _ = module(sequence(groups, "x"), None, key_value_states=sequence(groups, "context"))
        sim.see("attention", output, ("tp", "dp", None))


@finding(7, "07_llava_scatter_wrong_tp_group.py", *OTHER_GRID)
def embeddings_over_the_global_group(groups):
    """LLaVA's combined embeddings are scattered over the tp group of the global state."""
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        llava = megatron("models.multimodal.llava_model").LLaVAModel
        embeddings = sim.random(groups, "embeddings", (LENGTH, BATCH, HIDDEN), (None, "dp", None))
        many = size(groups, "tp") > 1
        model = SimpleNamespace(
            pre_process=True, post_process=False, context_parallel_lm=1, sequence_parallel_lm=many,
            tensor_model_parallel_size_lm=size(groups, "tp"), tp_comm_overlap_lm=False, _language_max_sequence_length=0,
            cp_group=None, pg_collection=collection(groups, "tp", "cp"),
        )  # fmt: skip
        if many:
            embeddings = llava._process_embedding_token_parallel(model, embeddings, None, None, None)[0]
        sim.see("embeddings", embeddings, ("tp", "dp", None))


@finding(8, "08_attention_sink_grad_norm.py", "tp=2", "tp=4")
def sinks_outside_the_norm(groups, harmless=False):
    """The learnable sinks of each rank's heads are not marked as shards: the norm counts those of one rank."""
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        attention = megatron("transformer.dot_product_attention").DotProductAttention(
            config(groups, softmax_type="learnable", perform_initialization=False), layer_number=1,
            attn_mask_type=megatron("transformer.enums").AttnMaskType.no_mask, attention_type="self",
            pg_collection=collection(groups, "tp", "cp"),
        )  # fmt: skip
        fill(groups, attention, {"softmax_offset": ("tp",)})
        heads = [sim.random(groups, name, (LENGTH, BATCH, 4, 2), (None, None, "tp", None)) for name in "qkv"]
        attention(*heads, None).square().sum().backward()
        sim.see("sink grad", attention.softmax_offset.grad, ("tp",))
        attention.softmax_offset.tensor_model_parallel = harmless
        duplicate = megatron("tensor_parallel").param_is_not_tensor_parallel_duplicate
        shown = [one.grad for one in attention.parameters() if duplicate(one, groups["tp"].pg)]
        norm = megatron("optimizer.clip_grads").get_grad_norm_fp32(shown, grad_stats_parallel_group=groups["tp"].pg)
        sim.see("grad norm", norm)


@finding(9, "09 (pull request 7513)", "cp=2", "cp=4")
def masked_loss_with_local_counts(groups, harmless=False):
    """The schedule divides a loss by the tokens of this rank's part of a sequence; DDP takes the mean over cp."""
    with megatron_state(context_parallel_size=size(groups, "cp")):
        weight = torch.nn.Linear(HIDDEN, 1, bias=False)
        fill(groups, weight, {})
        x = sim.random(groups, "x", (LENGTH, HIDDEN), ("cp", None))
        mask = sim.shard(groups, (torch.arange(LENGTH) < (LENGTH if harmless else 5)).double(), ("cp",))

        def losses(output):
            loss = (output.squeeze(-1).square() * mask).sum()
            return loss, mask.sum().int(), {"loss": loss.detach()}

        weight.model_type = megatron("enums").ModelType.encoder_or_decoder
        weight.set_input_tensor = lambda given: None
        weight.config = config(groups, context_parallel_size=size(groups, "cp"))
        megatron("pipeline_parallel.schedules").forward_backward_no_pipelining(
            forward_step_func=lambda iterator, model: (model(next(iterator)), losses),
            data_iterator=iter([x]), model=weight, num_microbatches=1, seq_length=LENGTH, micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        sim.see("weight grad", total(weight.weight.grad, groups["cp"]) / size(groups, "cp"))


@finding(10, "10_router_local_count_overwritten.py", "tp=2", "tp=4")
def router_count_that_a_sum_overwrote(groups, harmless=False):
    """A sum over tp overwrites the local count of tokens, by which the loss of each rank is multiplied."""
    many = size(groups, "tp") > 1
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        router = megatron("transformer.moe.router").TopKRouter(
            config(groups, num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.1, sequence_parallel=many,
                   moe_router_load_balancing_type="aux_loss", calculate_per_token_loss=True, add_bias_linear=False,
                   moe_router_dtype="fp64"),
            pg_collection=megatron("process_groups_config").ProcessGroupCollection.use_mpu_process_groups(),
        )  # fmt: skip
        router.set_layer_number(1)
        fill(groups, router, {})
        megatron("transformer.moe.moe_utils").MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        tokens = sim.random(groups, "tokens", (LENGTH, BATCH, HIDDEN), ("tp", None, None))
        padded = sim.random(groups, "padded", (LENGTH, BATCH), ("tp", None), draw=torch.rand) > 0.6
        probabilities, _ = router(tokens, None if harmless else padded)
        (probabilities * 0.0).sum().backward()
        sim.see("router grad", total(router.weight.grad, groups["tp"]))


@finding(11, "11_gdn_out_norm_missing_tp_sum.py", "tp=2", "tp=4")
def norm_of_heads_without_a_sum(groups, harmless=False):
    """The norm of all heads has on each rank the gradient of its heads, summed with sequence parallelism only.

    The norm is torch's in place of Transformer Engine's, the gate and the sum of gradients are Megatron's.
    """
    many = size(groups, "tp") > 1
    with megatron_state(tensor_model_parallel_size=size(groups, "tp")):
        module = torch.nn.Module()
        module.out_norm, module.act_fn = torch.nn.RMSNorm(4, eps=1e-5), F.silu
        fill(groups, module, {})
        heads, gate = (sim.random(groups, name, (LENGTH, BATCH, 4, 4), (None, None, "tp", None)) for name in "xg")
        base = megatron("ssm.gated_delta_net.common")._GDNBase
        base._apply_gated_norm(module, heads, gate).square().sum().backward()
        module.out_norm.weight.main_grad = module.out_norm.weight.grad
        module.out_norm.weight.sequence_parallel = harmless and many
        module.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        finalize = megatron("distributed.finalize_model_grads")
        finalize._allreduce_non_tensor_model_parallel_grads(
            [module], config(groups, sequence_parallel=harmless and many), groups["tp"].pg
        )
        sim.see("out_norm grad", module.out_norm.weight.main_grad)


def fill(groups, module, cuts):
    """Give each parameter the elements that it has on one process."""
    for name, parameter in module.named_parameters():
        cut = cuts.get(name) or (None,) * parameter.dim()
        whole = [length * (groups[axis].size if axis else 1) for length, axis in zip(parameter.shape, cut, strict=True)]
        parameter.data = sim.random(groups, name, whole, cut) * 0.5


def row(found):
    """What a comparison says of one program, as cells: finding, reproduction, what differs, cause, change."""
    first = found.compared().first
    harmless = "same" if found.compared(harmless=True).same else "different"
    if first is None:
        return [str(found.number), found.script, "nothing", "", "", harmless]
    layout = ",".join(axis for axis in first.layout.split(",") if not axis.endswith("=1"))
    site = first.before or first.site
    place = "in the program" if site.startswith("defects.py") else site
    cause = f"before a collective, {place}" if first.before else "no collective"
    if first.operation is not None:
        cause = f"{first.operation} over `{first.group}`, {place}"
    change = first.fix if first.settles else "none works"
    return [str(found.number), found.script, f"{first.name} under `{layout}`", cause, change, harmless]


def table(rows):
    """The rows in Markdown."""
    head = ["finding", "reproduction", "differs first", "cause", "change that works", "without the defect"]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def ready():
    """Megatron without a GPU, over the drop-ins."""
    warnings.simplefilter("ignore")
    without_a_gpu()
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.Stream = torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Mock()
    states = megatron("tensor_parallel.random")
    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda *_, **__: None
    megatron("models.gpt.gpt_model")
    install()


if __name__ == "__main__":
    ready()
    sys.stdout.write(table(map(row, PROGRAMS.values())))
