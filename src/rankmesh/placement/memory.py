"""Memory: the bytes that a device of one pipeline stage holds, part by part.

```
p parameters of the rank, n ranks that shard them, T tokens of the rank's microbatch, all bytes

weights          p · parameter                        zero 3: 2 of the rank's blocks, and the largest table
gradients        p · gradient                         zero 2, 3: p · gradient / n
optimizer        p · state                            zero 1 to 3: p · state / n
activations      per block and token of every microbatch in flight; h below is hidden / tp with sequence parallelism
  attention      2 h + 2 h (norm, its output) + 2 (q + k + v) / tp + attended 2 / tp
                 flash: 4 heads / tp (log-sum-exp);  unfused: scores 5 · heads · keys met / tp; dropout: h
  feed-forward   2 h + 2 h + 2 f / tp (in, twice if gated) + 2 f / tp (out); dropout: h
  experts        the same for top_k tokens in place of one, and these, 2 · top_k · hidden; shared experts
  fp8            inputs of matrix products, but attended values, take 1 byte in place of 2
  selective      without scores (unfused); without the outputs of norms and activation functions (flash), and without
                 q, k and v where they are computed from latents (MLA)
  operators      2 (2 h + q + k / tp + attended / tp + first of f / tp)     every second product is kept
  full           2 h, and one whole block while it is computed again
logits           last stage: T · vocabulary / tp · LOGITS
working space    one block's backward pass: T · 2 · (2 hidden + matrices · f / tp); where tp splits the tokens, inputs
                 and gradients of all of tp: 5 hidden in place of 2, on the last stage 7
fragments        what the allocator keeps beside: FRAGMENTS of activations, logits and working space
```

Microbatches in flight: of stage i of p, ``p − i`` with 1F1B; with ``v`` virtual stages the warm-up's
``2 (p − 1 − i) + (v − 1) p + 1`` parts of ``1 / v`` (Narayanan et al. 2021); with dualpipe ``(p + 1) / 2`` of each of
the two stages that a device holds, and all else of both (DeepSeek-AI 2024, table 2). Activations are as in
Korthikanti et al. 2022, whose 34 h + 5 · heads · sequence a test states.
"""

from __future__ import annotations

from math import ceil

from rankmesh.core.model import Sizes, Training, Transformer
from rankmesh.placement.steps import blocks, parameters

__all__ = ["FRAGMENTS", "LIBRARIES", "LOGITS", "block_activations", "in_flight", "memory", "stage_memory"]

# Bytes of one logit while the loss is computed: in single precision, its log-softmax, and the gradient.
LOGITS = 12
# Share of activations, logits and working space that the allocator keeps beyond them.
FRAGMENTS = 0.06
# Bytes that CUDA, NCCL and kernels take of a device, outside of the allocator.
LIBRARIES = 2e9


def in_flight(sizes: Sizes, training: Training, stage: int) -> float:
    """Microbatches whose activations a stage keeps at once, in units of all of its layers.

    >>> in_flight(Sizes(pp=4), Training(batch=8, sequence=1), 0)
    4.0
    >>> in_flight(Sizes(pp=4), Training(batch=8, sequence=1, virtual_stages=2), 0)
    5.5
    """
    microbatches, v = training.microbatches(sizes.dp), training.virtual_stages
    if training.schedule == "dualpipe":
        return min(microbatches, (sizes.pp + 1) / 2)
    if v == 1 or sizes.pp == 1:
        return max(1.0, min(microbatches, float(sizes.pp - stage)))
    return max(1.0, min(microbatches * v, 2 * (sizes.pp - 1 - stage) + (v - 1) * sizes.pp + 1) / v)


def block_activations(model: Transformer, training: Training, sizes: Sizes, *, experts: bool, recompute: str) -> float:
    """Bytes that one block keeps for one token of the rank's share of the sequence."""
    tp = sizes.tp
    hidden = model.hidden / training.split(tp)
    inner, mask = model.queries + model.keys + model.values, hidden * training.dropout
    two = training.activation
    if recompute == "full":
        return two * hidden
    rows, wide, cut = 1.0, model.ffn_hidden_size, tp
    if experts:
        # Routed tokens leave their rank: its share of all that are routed in its ep group is as much as it sends.
        rows = model.top_k / training.split(tp)
        wide, cut = model.expert_width, 1
    first = (model.matrices - 1) * wide / cut * rows
    if recompute == "operators":
        routed = two * rows * model.hidden if experts else 0.0
        return two * (2 * hidden + (model.queries + model.keys + model.attended) / tp + wide / cut * rows) + routed
    # Inputs of matrix products in FP8 are kept in it.
    into = 1 if training.precision == "fp8" else two
    norm, product, inner = into * hidden, into * wide / cut * rows, two * inner
    score = 4 * model.heads / tp
    if training.attention == "unfused":
        score = 0.0 if recompute == "selective" else 5 * model.heads * training.sequence / tp
    elif recompute == "selective":
        norm = product = 0.0
        inner = 0 if model.attention_weights is not None else inner
    attention = two * hidden + norm + (inner + two * model.attended) / tp + score + mask
    feed = two * hidden + norm + two * first + product + mask
    if experts:
        feed += into * rows * model.hidden + two * model.matrices * model.shared_ffn_hidden_size / tp
    return attention + feed


def stage_memory(model: Transformer, training: Training, sizes: Sizes, stage: int) -> dict[str, float]:
    """Bytes of one device of a stage, by part; see the table above."""
    dense, routed = parameters(model, sizes, stage)
    layers, experts = blocks(model, sizes, stage)
    found = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for count, copies in ((dense, sizes.replicas), (routed, sizes.expert_replicas)):
        ranks = max(1, copies // training.replicate)
        found["gradients"] += count * training.gradient / (ranks if training.zero > 1 else 1)
        found["optimizer"] += count * training.state / (ranks if training.zero else 1)
        found["weights"] += count * training.parameter if training.zero < 3 else 0.0
    if training.zero > 2:
        table = model.vocabulary * model.hidden / sizes.tp if stage in (0, sizes.pp - 1) else 0.0
        found["weights"] = training.parameter * (2 * (dense + routed) / max(1, layers) + table)
    tokens = training.tokens(sizes.cp)
    flying = in_flight(sizes, training, stage)
    kinds = ((layers - experts, False), (experts, True))

    def kept(with_experts: bool, recompute: str) -> float:
        return tokens * block_activations(model, training, sizes, experts=with_experts, recompute=recompute)

    activations = sum(count * kept(with_experts, training.recompute) for count, with_experts in kinds) * flying
    if training.recompute != "none":
        activations += max(kept(with_experts, "none") for count, with_experts in kinds if count)
    found["activations"] = activations
    found["logits"] = tokens * model.vocabulary / sizes.tp * LOGITS if stage == sizes.pp - 1 else 0.0
    found["working space"] = tokens * _working(model, training, sizes, stage)
    found["fragments"] = FRAGMENTS * (found["activations"] + found["logits"] + found["working space"])
    return found


def _working(model: Transformer, training: Training, sizes: Sizes, stage: int) -> float:
    """Bytes a token of what one block's backward pass needs: gradients, and inputs gathered from all of tp."""
    wide = max(model.ffn_hidden_size / sizes.tp, model.top_k * (model.moe_ffn_hidden_size or 0))
    if training.split(sizes.tp) == 1:
        return training.activation * (2 * model.hidden + model.matrices * wide)
    gathered = 5 + 2 * (stage == sizes.pp - 1)  # two inputs, three gradients; the output's input and gradient
    return training.activation * (gathered * model.hidden + model.matrices * wide)


def memory(model: Transformer, training: Training, sizes: Sizes) -> dict[str, float]:
    """Bytes by part of the device that holds most: of the first, the middle and the last stage.

    >>> llama = Transformer(layers=32, hidden=4096, heads=32, ffn_hidden_size=14336, vocabulary=128256, kv_heads=8,
    ...                     gated=True, tied=False)
    >>> parts = memory(llama, Training(batch=64, sequence=8192, recompute="full", zero=3), Sizes(dp=64))
    >>> round(parts["optimizer"] / 1e9, 2), round(sum(parts.values()) / 1e9)
    (1.51, 22)
    """
    stages = sorted({0, ceil(sizes.pp / 2) - 1, sizes.pp - 1, min(1, sizes.pp - 1)})
    found = [stage_memory(model, training, sizes, stage) for stage in stages]
    if training.schedule == "dualpipe":
        others = (stage_memory(model, training, sizes, sizes.pp - 1 - stage) for stage in stages)
        found = [{name: one[name] + other[name] for name in one} for one, other in zip(found, others, strict=True)]
    return max(found, key=lambda parts: sum(parts.values()))
