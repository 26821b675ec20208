"""Megatron's GPT, schedules, DistributedDataParallel and optimizer as a program for ``sim.compare``, right and broken.

``PYTHONPATH=RELEASE python -m tests.peers.gpt row right`` prints what the comparison says of some of them as JSON.
"""

import json
import linecache
import re
import sys

from tests.peers import defects  # first: it stands in for triton
from tests.peers.defects import LENGTH, config, megatron, megatron_state, size

import torch  # isort: skip
from tests.peers.megatron_training import VOCABULARY, chunks_of, forward, norms_over_parts_of_a_sequence

from rankmesh import sim
from rankmesh.dialects.megatron import parallel_state

ROWS, MICROBATCHES, LAYERS = 4, 2, 2
LAYOUTS = ("tp=2,dp=1", "dp=2", "pp=2,dp=1", "tp=2,dp=2", "tp=2,pp=2,dp=1", "tp=2,pp=2,dp=2")


def cut_of(name, parameter):
    """How a parameter is sharded, as Megatron marks it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return tuple("tp" if dim == parameter.partition_dim else None for dim in range(parameter.dim()))


def named(groups, model):
    """Each parameter with its name in the whole model, its cut, and the stage that has it."""
    stages = groups["pp"].size
    for name, parameter in model.named_parameters():
        whole = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + model.first}", name)
        yield whole, parameter, cut_of(name, parameter), {"pp": groups["pp"].rank} if stages > 1 else {}


class Training:
    """One step of a model on this rank; ``broken`` is called with it when it is made."""

    def __init__(self, groups, broken, *, sequence_parallel, clip):
        self.groups = groups
        parts = sequence_parallel and size(groups, "tp") > 1
        self.config = config(
            groups, num_layers=LAYERS, sequence_parallel=parts, pipeline_model_parallel_size=size(groups, "pp"),
            attention_softmax_in_fp32=False, deterministic_mode=False,
        )  # fmt: skip
        distributed, optimizers = megatron("distributed"), megatron("optimizer")
        (self.model,) = chunks_of(parallel_state, self.config, experts=None)
        self.model.first = LAYERS // size(groups, "pp") * groups["pp"].rank
        for name, parameter, cut, _ in named(groups, self.model):
            shape = [length * (size(groups, axis) if axis else 1) for length, axis in zip(parameter.shape, cut or
                     (None,) * parameter.dim(), strict=True)]  # fmt: skip
            parameter.data = sim.random(groups, name, shape, cut) * 0.3
        ddp = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=False)
        self.ddp = distributed.DistributedDataParallel(self.config, ddp, self.model)
        settings = optimizers.OptimizerConfig(
            optimizer="sgd",
            lr=0.1,
            clip_grad=clip,
            fp16=False,
            bf16=False,
            params_dtype=torch.get_default_dtype(),
        )
        self.optimizer = optimizers.get_megatron_optimizer(settings, [self.ddp])
        self.config.finalize_model_grads_func = distributed.finalize_model_grads
        broken(self)

    def batches(self):
        """The microbatches of this rank's rows."""
        for number in range(MICROBATCHES):
            drawn = sim.random(self.groups, f"tokens {number}", (ROWS, LENGTH + 1), ("dp", None), draw=torch.rand)
            yield (drawn * VOCABULARY).long()

    def step(self):
        """Forward, backward, the sums of gradients, the norm and the update; everything is seen."""
        result = megatron("pipeline_parallel.schedules").get_forward_backward_func()(
            forward_step_func=forward, data_iterator=self.batches(), model=[self.ddp],
            num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=ROWS // size(self.groups, "dp"),
            forward_only=False,
        )  # fmt: skip
        last = {"at": {"pp": size(self.groups, "pp") - 1}} if size(self.groups, "pp") > 1 else {}
        for part in result:
            sim.see("loss", part["loss"], ("dp", None), **last)
        for name, parameter, cut, at in named(self.groups, self.model):
            sim.see(f"{name}.grad", parameter.main_grad, cut, at=at or None)
        _, norm, _ = self.optimizer.step()
        sim.see("norm", norm)
        for name, parameter, cut, at in named(self.groups, self.model):
            sim.see(name, parameter, cut, at=at or None)


def program_of(broken=lambda training: None, *, sequence_parallel=False, clip=0.0):
    """The program, with what breaks it."""

    def program(groups):
        sizes = {"tensor_model_parallel_size": size(groups, "tp"), "pipeline_model_parallel_size": size(groups, "pp")}
        with megatron_state(**sizes):
            Training(groups, broken, sequence_parallel=sequence_parallel, clip=clip).step()

    return program


def grouped(path, kind):
    """A module that makes its collectives on another kind of group."""

    def broken(training):
        module = training.model
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is not None:
            module.tp_group = training.groups[kind].pg

    return broken


def gradients_over_tp(training):
    """The sums of gradients are made over tp."""
    for group in training.ddp.bucket_groups:
        group.intra_distributed_optimizer_instance_group = group.data_parallel_group = training.groups["tp"].pg


def gradients_not_divided(training):
    """The sums of gradients are not divided by the size of dp."""
    for group in training.ddp.bucket_groups:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor = 1.0


def norms_without_tp(training):
    """Weights of norms are not marked as those of a part of the sequence."""
    for name, parameter in training.model.named_parameters():
        if "input_layernorm" in name:
            parameter.sequence_parallel = False


def norm_over_dp(training):
    """The norm of the gradients is summed over dp, which has the same gradients."""
    training.optimizer.chained_optimizers[0].grad_stats_parallel_group = training.groups["dp"].pg


TP, DP, PP = ("tp=2,dp=1", "tp=2,dp=2"), ("dp=2", "tp=2,dp=2"), ("pp=2,dp=1", "pp=2,dp=2")
# What is broken, under which layouts, and whether with sequence parallelism.
BROKEN = {
    "row": (grouped("decoder.layers.1.mlp.linear_fc2", "dp"), TP, False),
    "attention row": (grouped("decoder.layers.0.self_attention.linear_proj", "dp"), TP, False),
    "column": (grouped("decoder.layers.1.mlp.linear_fc1", "dp"), TP, False),
    "vocabulary": (grouped("embedding.word_embeddings", "dp"), TP[1:], False),
    "gradients": (gradients_over_tp, DP, False),
    "mean": (gradients_not_divided, DP, False),
    "norms": (norms_without_tp, TP, True),
    "norm": (norm_over_dp, (*TP, *PP), False),
}


def broken(name):
    """What the comparison says of a broken program; ``code`` is the code from the named line on."""
    broken, layouts, parts = BROKEN[name]
    program = program_of(broken, sequence_parallel=parts)
    first = sim.compare(program, [f"megatron:{layout}" for layout in layouts], seconds=200.0).first
    file, line = first.site.split(":")
    known = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    found = [path for path in known if path.endswith(f"/{file}")
             and (not first.lines or first.lines[-1].split(":")[0] in path)]  # fmt: skip
    code = "".join(linecache.getline(found[0], int(line) + more) for more in range(3))
    return {"value": first.name, "site": first.site, "code": code, "operation": first.operation, "group": first.group,
            "repair": first.repair, "settles": first.settles}  # fmt: skip


def right():
    """The right program on every layout: without and with sequence parallelism, and with clipping."""
    layouts = [f"megatron:{layout}" for layout in LAYOUTS]
    programs = program_of(), program_of(sequence_parallel=True)
    results = [sim.compare(program, layouts) for program in programs]
    results.append(sim.compare(program_of(clip=0.5), layouts, tolerance=1e-5))  # which Megatron does in float32
    return [(result.same, len(result.errors[result.layouts[0]]), result.report()) for result in results]


if __name__ == "__main__":
    defects.ready()
    norms_over_parts_of_a_sequence()
    sys.stdout.write(json.dumps({name: right() if name == "right" else broken(name) for name in sys.argv[1:]}))
