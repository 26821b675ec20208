"""Assumptions of a search, by name: all that its seconds and bytes depend on and the layouts do not show."""

from __future__ import annotations

from collections.abc import Collection

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import Device
from rankmesh.core.clusters.levels import in_words, reached
from rankmesh.core.model import Training, Transformer
from rankmesh.placement.compute import ATTENTION, LAUNCH, MATRIX, MOVING
from rankmesh.placement.memory import FRAGMENTS, LIBRARIES, LOGITS
from rankmesh.placement.predict import CONTENTION

__all__ = ["assumptions"]

_ZERO = (
    "every replica keeps all; gradients are all-reduced",
    "the optimizer is sharded",
    "optimizer and gradients are sharded; gradients are reduced in every microbatch",
    "optimizer, gradients and weights are sharded (FSDP); weights are gathered in every microbatch, twice",
)


def assumptions(
    model: Transformer,
    training: Training,
    device: Device,
    cluster: Cluster,
    *,
    speed_from: str = "as given",
    free: Collection[str] = (),
) -> dict[str, str]:
    """Return sentences by name; ``free``: the fields of ``training`` that the search chose for each layout.

    ``speed_from``: the source of the device's speed, in words.
    """
    peak = device.peak(training.precision) / 1e12
    computes = (
        f"{device.speed / 1e12:g} TFLOP/s of everything, {speed_from}"
        if device.speed is not None
        else f"{device.name}: {peak:g} TFLOP/s in {training.precision}, of which large matrix products reach "
        f"{MATRIX:.0%}, and attention {ATTENTION:.0%} in bf16; {device.bandwidth / 1e12:g} TB/s, of which kernels "
        f"reach {MOVING:.0%}; {LAUNCH * 1e6:g} µs a kernel"
    )
    found = {
        "model": f"{model.parameters / 1e9:.4g} billion parameters, {model.active / 1e9:.4g} billion for a token, "
        f"a vocabulary of {model.vocabulary:,}",
        "batch": f"{training.batch:,} sequences of {training.sequence:,} tokens",
        "device": computes,
        "memory": f"{device.memory / 1e9:g} GB, of which CUDA, NCCL and kernels take {LIBRARIES / 1e9:g} GB",
        "sequence_parallel": "no" if training.sequence_parallel is False else "where tp is above 1",
        "zero": f"{training.zero}: {_ZERO[training.zero]}",
        "microbatch": str(training.microbatch),
        "virtual_stages": str(training.virtual_stages),
        "schedule": training.schedule,
        "recompute": training.recompute,
        "attention": f"{training.attention}, causal; with cp by {training.context}",
        "bytes": f"{training.parameter} a weight, {training.gradient} a gradient, {training.state} of optimizer state "
        f"a parameter, {training.activation} an activation, {LOGITS} a logit; fragments take {FRAGMENTS:.0%} of what "
        "each step allocates",
        "overlap": f"communication of {', '.join(training.overlap) or 'nothing'} hides behind computation (pp with "
        f"virtual stages, cp as a ring), which loses {CONTENTION:.0%} of the time to it",
        "experts": "tokens are spread evenly",
        "stages": "layers that pp does not divide go to the middle; the ends hold embedding, output and loss",
        "links": in_words(cluster.levels, max(cluster.host_sizes), device) + "; NCCL reaches "
        + ", ".join(f"{level.name} {level.bandwidth / 1e9:.4g} GB/s, {level.latency * 1e6:.3g} µs"
                    for level in reached(cluster.levels, device)) + "; kinds of group do not share them",
    }  # fmt: skip
    if training.replicate > 1:
        found["replicate"] = f"{training.replicate} copies of the shards (HSDP)"
    if cluster.default_levels:
        names = ", ".join(cluster.default_levels)
        found["links"] += f"; {names} by default, not measured (rankmesh measure --save)"
    if not model.experts:
        del found["experts"]
    return found | dict.fromkeys(free, "chosen for each layout")
