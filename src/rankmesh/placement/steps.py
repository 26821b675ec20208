"""The traffic of one training step of a transformer, kind by kind: bytes that a rank holds, times a step.

```
T = sequences of a microbatch · sequence / cp        H = T · hidden · activation bytes     m = microbatches of a replica
R = T · top           K = T · (keys + values) / tp · activation                 L = layers of the stage

tensor parallel (Shoeybi et al. 2019, section 3)     all-reduce H      · 4 m a dense layer, 2 m for one with experts
  first stage, last stage                            all-reduce H · m  (embedding; output), T · scalar · 3 m (loss)
with sequence parallelism (Korthikanti et al. 2022)  all-gather H/tp   · 6 m a dense layer, 3 m one with experts
                                                     reduce-scatter H  · 4 m, 2 m
context: all-gather (Llama 3, section 3.3.2)         all-gather K · L m, reduce-scatter K cp · L m
context: ring (Liu et al. 2023)                      ring K · (3 cp − 2) L m:  cp − 1 forward, 2 cp − 1 backward
context: all-to-all (Jacobs et al. 2023, Ulysses)    all-to-all (q + 2 k) and q of T/tp · 2 L m
pipeline, 1F1B (Narayanan et al. 2021)               send/recv H (sequence parallel: H/tp) · m forward, m backward
  interleaved in v chunks                            the same · v, of which the last stage's go round to the first
zero 0                                               all-reduce P · gradient
zero 1, sharded optimizer                            reduce-scatter n ⌈P/n⌉ · gradient, all-gather ⌈P/n⌉ · weight
zero 2, gradients too                                the same, reduce-scatter · m
zero 3, weights too (FSDP)                           reduce-scatter · m, all-gather twice · m: forward and backward
  copies of the shards (HSDP)                        all-reduce ⌈P/n⌉ · gradient
experts (Lepikhin et al. 2020)                       all-to-all R · hidden · 4 m, 8 bytes · experts · m of counts
  split over etp                                     all-reduce R · hidden · 2 m
tied embedding                                       all-reduce V/tp · hidden · gradient, first and last stage
clipping, loss                                       all-reduce of one scalar each
```

Layers that are computed again (``recompute="full"``) send what their forward pass sends once more.

``R`` is what a router that favours no expert sends. A kind gets the traffic of the stage that sends most of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rankmesh.core.model import Sizes, Training, Transformer
from rankmesh.core.plan import Plan
from rankmesh.placement.traffic import Message, Traffic

__all__ = ["Roles", "blocks", "parameters", "stage_messages", "step_traffic", "usual_work"]

# Which kind of a plan has a role: the first of these names that the plan has.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "ep": ("ep",),
    "etp": ("ep_tp", "etp"),
    "shards": ("intra_dp_cp", "fsdp", "dp_shard_cp", "dp_cp", "dp"),
    "expert_shards": ("intra_ep_dp", "efsdp", "ep_dp", "edp"),
    "replicas": ("inter_dp_cp", "dp_replicate"),
    "expert_replicas": ("inter_ep_dp", "edp_replicate"),
    "tied": ("embd",),
    "model": ("mp",),
    "expert_model": ("tp_ep_pp",),
    "loss": ("dp_cp", "loss", "dp"),
}


@dataclass(frozen=True)
class Roles:
    """The kind of a plan for each role, and its size; 1 where the plan has none."""

    names: Mapping[str, str]
    sizes: Mapping[str, int]
    layout: Sizes

    @classmethod
    def of(cls, plan: Plan) -> Roles:
        """Return the roles that the kinds of a plan have, by their names."""
        names = {role: next((name for name in known if name in plan.kinds), "") for role, known in _NAMES.items()}
        sizes = {role: plan.groups(name).size if name else 1 for role, name in names.items()}
        inner = {role: sizes[role] for role in ("tp", "cp", "pp", "ep", "etp")}
        replicas = max(1, plan.mesh.size // (sizes["tp"] * sizes["cp"] * sizes["pp"]))
        return cls(names, sizes, Sizes(dp=replicas, **inner))


class _Step:
    """The messages of one stage as they are added."""

    def __init__(self, model: Transformer, training: Training, roles: Roles, stage: int) -> None:
        self.model, self.training, self.roles, self.stage = model, training, roles, stage
        self.found: dict[str, list[Message]] = {}
        sizes = roles.layout
        self.tp, self.cp, self.pp, self.etp = sizes.tp, sizes.cp, sizes.pp, sizes.etp
        self.first, self.last = stage == 0, stage == self.pp - 1
        self.microbatches = training.microbatches(roles.layout.dp)
        self.again = training.recompute == "full"
        self.split = training.split(self.tp) > 1
        self.tokens = training.tokens(self.cp)
        self.whole = self.tokens * model.hidden * training.activation
        self.layers, self.experts = blocks(model, roles.layout, stage)

    def add(self, role: str, collective: str, size: float, times: float = 1) -> None:
        if self.roles.sizes[role] > 1 and size > 0 and times > 0:
            exact = int(size) if float(size).is_integer() else size
            often = int(times) if float(times).is_integer() else times
            self.found.setdefault(self.roles.names[role], []).append(Message(collective, exact, often))

    def tensor(self) -> None:
        dense, microbatches, whole = self.layers - self.experts, self.microbatches, self.whole
        halves = 2 * dense + self.experts  # attention, and feed-forward where it is not an expert
        ends = self.first + self.last
        if self.split:
            gathers = (3 + self.again) * halves + self.first + 2 * self.last
            self.add("tp", "all-gather", whole / self.tp, gathers * microbatches)
            self.add("tp", "reduce-scatter", whole, ((2 + self.again) * halves + ends) * microbatches)
        else:
            self.add("tp", "all-reduce", whole, ((2 + self.again) * halves + ends) * microbatches)
        if self.last:
            self.add("tp", "all-reduce", self.tokens * self.training.scalar, 3 * microbatches)

    def context(self) -> None:
        model, times = self.model, self.layers * self.microbatches
        unit = self.tokens / self.tp * self.training.activation
        keys = unit * (model.keys + model.values)
        if self.training.context == "all-gather":
            self.add("cp", "all-gather", keys, (1 + self.again) * times)
            self.add("cp", "reduce-scatter", keys * self.cp, times)
        elif self.training.context == "ring":
            self.add("cp", "ring", keys, (3 * self.cp - 2 + self.again * (self.cp - 1)) * times)
        else:
            self.add("cp", "all-to-all", unit * model.queries + keys, (2 + self.again) * times)
            self.add("cp", "all-to-all", unit * model.attended, (2 + self.again) * times)

    def pipeline(self) -> None:
        size = self.whole / self.training.split(self.tp)
        self.add("pp", "ring", size, 2 * (self.training.virtual_stages - 1) * self.microbatches)
        self.add("pp", "send/recv", size, ((not self.first) + (not self.last)) * self.microbatches)

    def expert(self) -> None:
        model, times = self.model, self.experts * self.microbatches
        rows = self.tokens * model.top_k / self.training.split(self.tp) * model.hidden * self.training.activation
        self.add("ep", "all-to-all", rows, (4 + 2 * self.again) * times)
        self.add("ep", "all-to-all", 8 * model.experts, times)
        if self.split:
            self.add("etp", "all-gather", rows, (2 + self.again) * times)
            self.add("etp", "reduce-scatter", rows * self.etp, (2 + self.again) * times)
        else:
            self.add("etp", "all-reduce", rows, (2 + self.again) * times)

    def data(self) -> None:
        dense, experts = parameters(self.model, self.roles.layout, self.stage)
        for role, copies, count in (("shards", "replicas", dense), ("expert_shards", "expert_replicas", experts)):
            self._gradients(role, copies, count)

    def _gradients(self, role: str, copies: str, count: float) -> None:
        training, ranks = self.training, self.roles.sizes[role]
        if training.zero == 0:
            self.add(role, "all-reduce", count * training.gradient)
            return
        each = ceil(count / ranks)
        reductions = self.microbatches if training.zero > 1 else 1
        gathers = 2 * self.microbatches if training.zero > 2 else 1
        self.add(role, "reduce-scatter", ranks * each * training.gradient, reductions)
        self.add(role, "all-gather", each * training.parameter, gathers)
        if training.replicate > 1:
            self.add(copies, "all-reduce", each * training.gradient)

    def rest(self) -> None:
        scalar = self.training.scalar
        if self.model.tied and (self.first or self.last) and self.pp > 1:
            self.add("tied", "all-reduce", self.model.vocabulary / self.tp * self.model.hidden * self.training.gradient)
        norms = ("shards", "model", *(("expert_shards", "expert_model") if self.model.experts else ()))
        for role in (*norms, "loss", "pp"):
            self.add(role, "all-reduce", scalar)


def blocks(model: Transformer, sizes: Sizes, stage: int) -> tuple[int, int]:
    """Return the blocks of a stage, and how many of them have experts; the last stage predicts later tokens, too."""
    counts = sizes.stages(model.layers)
    start = sum(counts[:stage])
    experts = int(model.expert_layers(start, start + counts[stage]))
    more = model.mtp_layers if stage == sizes.pp - 1 else 0
    return counts[stage] + more, experts + (more if model.experts else 0)


def parameters(model: Transformer, sizes: Sizes, stage: int) -> tuple[float, float]:
    """Return the parameters of one rank on a stage: the parameters that all replicas hold, and its experts'."""
    layers, experts = blocks(model, sizes, stage)
    split = layers * model.attention + (layers - experts) * model.matrices * model.hidden * model.ffn_hidden_size
    split += experts * model.shared
    table = model.vocabulary * model.hidden
    last = stage == sizes.pp - 1
    ends = (stage == 0) + last
    split += table * (min(ends, 1) if model.tied else ends)
    split += last * model.mtp_layers * 2 * model.hidden**2
    whole = layers * 2 * model.hidden + experts * model.experts * model.hidden + last * model.hidden
    return split / sizes.tp + whole, experts * model.experts / sizes.ep * model.expert / sizes.etp


def stage_messages(roles: Roles, model: Transformer, training: Training, stage: int) -> dict[str, list[Message]]:
    """Return the messages of one stage by kind, for a plan whose roles are known."""
    step = _Step(model, training, roles, stage)
    for part in (step.tensor, step.context, step.pipeline, step.expert, step.data, step.rest):
        part()
    return step.found


def step_traffic(plan: Plan, model: Transformer, training: Training) -> Traffic:
    """Return the traffic of a step: of each kind, what the busiest stage sends, as the others wait for it.

    >>> from rankmesh.core import recipes
    >>> model = Transformer(layers=2, hidden=8, heads=2, ffn_hidden_size=32, vocabulary=16)
    >>> plan = recipes.megatron(world_size=4, tp=2)
    >>> step_traffic(plan, model, Training(batch=2, sequence=4))["tp"][0]
    Message(collective='all-gather', bytes=32, times=15)
    """
    roles = Roles.of(plan)
    largest: dict[str, list[Message]] = {}
    for stage in sorted({0, roles.layout.pp // 2, roles.layout.pp - 1}):
        for name, messages in stage_messages(roles, model, training, stage).items():
            if _bytes(messages) > _bytes(largest.get(name, [])):
                largest[name] = messages
    return Traffic({name: largest[name] for name in plan.kinds if name in largest})


def _bytes(messages: list[Message]) -> float:
    return sum(message.bytes * message.times for message in messages)


def usual_work(roles: Roles) -> tuple[Transformer, Training]:
    """Return a usual transformer and its training, for the sizes of a plan.

    Blocks of hidden size 8192, four a stage, in bfloat16, with experts where ep cuts them. A replica has four
    microbatches a stage and at least 16: a batch of millions of tokens, whose gradients are reduced once.
    """
    sizes = roles.layout
    experts = 8 * sizes.ep if sizes.ep > 1 else 0
    model = Transformer(
        layers=4 * sizes.pp, hidden=8192, heads=64, kv_heads=8, ffn_hidden_size=28672, vocabulary=131072,
        gated=True, tied=False, experts=experts, top_k=2, moe_ffn_hidden_size=4096,
    )  # fmt: skip
    return model, Training(batch=max(16, 4 * sizes.pp) * sizes.dp, sequence=8192)
