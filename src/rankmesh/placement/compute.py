"""Computation: the seconds of one microbatch on one device of a pipeline stage, part by part.

```
matrices       a product of r × k by k × n: 2 r k n / (MATRIX · filled · peak) + bytes of all / (MOVING · bandwidth)
               filled: tiles of TILE over the units of the device, in whole rounds
               forward once, backward twice: gradients of its input and of its weights
attention      4 · queries' width · keys met FLOPs a token forward, half of the keys by the causal mask;
               backward 2.5 times (flash: scores again) or 2 times (unfused: no mask saves anything, and scores of
               heads · keys · 2 bytes cross memory SCORES times)
kernels        what only moves bytes: norms, residuals, rotary, activation functions, routing, casts to FP8, loss;
               and LAUNCH for each kernel
recomputation  what the forward pass did again: all (full), half of the products (operators), scores or norms and
               activation functions (selective)
optimizer      once a step: gradient, state and parameter of each parameter of the rank, read and written
```

The constants are few, and the same for every model and device; docs/benchmarks.md has what they predict of published
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rankmesh.core.clusters.hardware import Device
from rankmesh.core.model import Sizes, Training, Transformer
from rankmesh.placement.steps import blocks, parameters

__all__ = ["LAUNCH", "MATRIX", "MOVING", "SCORES", "Work", "flops", "optimizer", "stage_work"]

# Share of the peak that large matrix products reach, share that attention kernels reach, share of the memory's
# bandwidth, and seconds between two kernels.
MATRIX, ATTENTION, MOVING, LAUNCH = 0.78, 0.45, 0.8, 4e-6
# Rows and columns of a product that one unit of a device computes at a time.
TILE = (128, 256)
# How often the scores of unfused attention cross memory, forward and backward.
SCORES = (6.0, 8.0)
# Kernels of a block, forward and backward; of each expert of a rank.
_KERNELS, _EXPERT_KERNELS = 36, 9
_BACKWARD = {"flash": 2.5, "unfused": 2.0}


@dataclass(frozen=True)
class Work:
    """Seconds of one microbatch by part: forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """Both, by part."""
        return {name: self.forward.get(name, 0.0) + value for name, value in self.backward.items()}

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Product:
    """Matrix products of a block: rows by inner by columns, this often; kept in bfloat16 where ``plain``."""

    rows: float
    inner: float
    columns: float
    times: float = 1
    plain: bool = False


def flops(model: Transformer, training: Training) -> float:
    """FLOPs of a step that the model needs, without recomputation: the numerator of the utilisation (MFU).

    >>> model = Transformer(layers=1, hidden=2, heads=1, ffn_hidden_size=8, vocabulary=4)
    >>> flops(model, Training(batch=1, sequence=1))  # 6 · (16 + 32 + 8) and 12 · 2 · 1
    360.0
    """
    with_experts = model.expert_layers(0, model.layers) + model.mtp_layers * bool(model.experts)
    layers = model.layers + model.mtp_layers
    weights = layers * model.attention + (layers - with_experts) * model.matrices * model.hidden * model.ffn_hidden_size
    weights += with_experts * (model.top_k * model.expert + model.experts * model.hidden * bool(model.experts))
    weights += with_experts * model.shared
    weights += (1 + model.mtp_layers) * model.vocabulary * model.hidden + model.mtp_layers * 2 * model.hidden**2
    scores = 6 * layers * (model.queries + model.attended) * model.pairs(training.sequence)
    return float(training.batch * training.sequence * (6 * weights + scores))


def stage_work(model: Transformer, training: Training, sizes: Sizes, stage: int, device: Device) -> Work:
    """Seconds of one microbatch on a stage; at a given speed of the device only FLOPs take time."""
    layers, experts = blocks(model, sizes, stage)
    forward = dict.fromkeys(("matrices", "attention", "kernels"), 0.0)
    backward = dict.fromkeys((*forward, "recomputation"), 0.0)
    for count, with_experts in ((layers - experts, False), (experts, True)):
        if count:
            there, back = _block(model, training, sizes, device, with_experts)
            for total, part in ((forward, there), (backward, back)):
                for name, value in part.items():
                    total[name] += count * value
    for total, part in zip((forward, backward), _ends(model, training, sizes, stage, device), strict=True):
        for name, value in part.items():
            total[name] += value
    return Work(forward, backward)


def _products(model: Transformer, training: Training, sizes: Sizes, experts: bool) -> Iterator[_Product]:
    tokens, tp, hidden = training.tokens(sizes.cp), sizes.tp, model.hidden
    if model.attention_weights is None:
        yield _Product(tokens, hidden, (model.queries + model.keys + model.values) / tp)
    else:
        yield _Product(tokens, hidden, (model.attention_weights / hidden - model.attended) / tp)
    yield _Product(tokens, model.attended / tp, hidden)
    into = model.matrices - 1
    if not experts:
        yield _Product(tokens, hidden, into * model.ffn_hidden_size / tp)
        yield _Product(tokens, model.ffn_hidden_size / tp, hidden)
        return
    local = model.experts / sizes.ep
    wide = model.expert_width / sizes.etp
    rows = tokens * model.top_k / training.split(tp) * sizes.etp / local
    yield _Product(tokens / training.split(tp), hidden, model.experts, plain=True)
    yield _Product(rows, hidden, into * wide, local)
    yield _Product(rows, wide, hidden, local)
    if model.shared_ffn_hidden_size:
        yield _Product(tokens, hidden, into * model.shared_ffn_hidden_size / tp)
        yield _Product(tokens, model.shared_ffn_hidden_size / tp, hidden)


def _matrix(product: _Product, precision: str, device: Device) -> float:
    rows, inner, columns, times = product.rows, product.inner, product.columns, product.times
    work = 2 * rows * inner * columns * times
    if device.speed is not None:
        return work / device.speed
    each = 1 if precision == "fp8" and not product.plain else 2
    moved = each * (rows * inner + inner * columns) + 2 * rows * columns
    tiles = ceil(rows / TILE[0]) * ceil(columns / TILE[1]) / device.units
    filled = MATRIX * tiles / ceil(tiles)
    peak = device.peak("bf16" if product.plain else precision)
    return work / (filled * peak) + times * moved / (MOVING * device.bandwidth)


def _moved(model: Transformer, training: Training, sizes: Sizes, experts: bool) -> tuple[float, float]:
    """Bytes a token that kernels of a block move forward: of norms and activation functions, and of the rest."""
    tp, two = sizes.tp, training.activation
    hidden = model.hidden / training.split(tp)
    rows = model.top_k / training.split(tp) if experts else 1.0
    wide = model.expert_width if experts else model.ffn_hidden_size / tp
    cheap = 2 * two * 2 * hidden + two * model.matrices * wide * rows
    rest = 2 * two * 3 * hidden + two * 2 * (model.queries + model.keys) / tp
    if experts:
        rest += 4 * two * rows * model.hidden + two * model.matrices * model.shared_ffn_hidden_size / tp
        rest += 12 * model.experts
    return cheap, rest


def _block(
    model: Transformer, training: Training, sizes: Sizes, device: Device, experts: bool
) -> tuple[dict[str, float], dict[str, float]]:
    tokens, tp = training.tokens(sizes.cp), sizes.tp
    products = list(_products(model, training, sizes, experts))
    matrices = sum(_matrix(each, training.precision, device) for each in products)
    unfused = training.attention == "unfused"
    pairs = model.pairs(training.sequence, causal=not unfused)
    work = 2 * tokens * (model.queries + model.attended) / tp * pairs
    attention = work / (device.speed or ATTENTION * device.peak("bf16"))
    back = attention * _BACKWARD[training.attention]
    memory = MOVING * device.bandwidth
    scores = 2 * tokens * model.heads / tp * pairs / memory if unfused and device.speed is None else 0.0
    cheap = kernels = casts = 0.0
    if device.speed is None:
        soft, rest = _moved(model, training, sizes, experts)
        cheap, kernels = tokens * soft / memory, tokens * rest / memory
        count = _KERNELS + (_EXPERT_KERNELS * model.experts / sizes.ep if experts else 0)
        launches = LAUNCH * count
        if training.precision == "fp8":
            # Each input is read for its largest value, read again, and written in both directions; so are gradients.
            casts = sum(6 * each.rows * each.inner * each.times for each in products if not each.plain) / memory
        kernels += launches / 3
    latent = 0.0
    if training.recompute == "selective" and model.attention_weights is not None:
        latent = _matrix(products[0], training.precision, device)  # q, k and v from their latents (MLA)
    forward = {"matrices": matrices, "attention": attention + SCORES[0] * scores, "kernels": cheap + kernels + casts}
    backward = {
        "matrices": 2 * matrices,
        "attention": back + SCORES[1] * scores,
        "kernels": 2 * (cheap + kernels + casts),
        "recomputation": _again(training, forward, cheap) + latent,
    }
    return forward, backward


def _again(training: Training, forward: dict[str, float], cheap: float) -> float:
    if training.recompute == "full":
        return sum(forward.values())
    if training.recompute == "operators":
        return forward["matrices"] / 2 + forward["kernels"]
    if training.recompute == "selective":
        return forward["attention"] if training.attention == "unfused" else cheap
    return 0.0


def _ends(
    model: Transformer, training: Training, sizes: Sizes, stage: int, device: Device
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the embedding of the first stage; output and loss of the last, in bfloat16 and single precision."""
    tokens, memory = training.tokens(sizes.cp), MOVING * device.bandwidth
    there = {"matrices": 0.0, "kernels": 0.0}
    if stage == 0 and device.speed is None:
        there["kernels"] += 3 * training.activation * tokens * model.hidden / memory
    if stage == sizes.pp - 1:
        heads = 1 + model.mtp_layers
        output = _Product(tokens, model.hidden, model.vocabulary / sizes.tp, heads, plain=True)
        there["matrices"] += _matrix(output, "bf16", device)
        if model.mtp_layers:
            joined = _Product(tokens, 2 * model.hidden, model.hidden / sizes.tp, model.mtp_layers)
            there["matrices"] += _matrix(joined, training.precision, device)
        if device.speed is None:
            there["kernels"] += heads * 14 * tokens * model.vocabulary / sizes.tp / memory
    return there, {"matrices": 2 * there["matrices"], "kernels": there["kernels"]}


def optimizer(model: Transformer, training: Training, sizes: Sizes, stage: int, device: Device) -> float:
    """Seconds of the optimizer on a stage: it reads gradients, reads and writes its state, writes parameters."""
    if device.speed is not None:
        return 0.0
    each = training.gradient + 2 * training.state + training.parameter
    count = 0.0
    for size, copies in zip(parameters(model, sizes, stage), (sizes.replicas, sizes.expert_replicas), strict=True):
        count += size / (max(1, copies // training.replicate) if training.zero else 1)
    return count * each / (MOVING * device.bandwidth)
