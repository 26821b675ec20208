"""Predict: the seconds of a step of one layout, part by part: computation, bubble, what communication does not hide.

```
t(i)   seconds of one microbatch on stage i: computation (compute.py), and what is not hidden of tp, cp, ep, pp
u(i)   the same where no other stage is active: less than t(i) if groups of different stages share an uplink
m      microbatches of a replica            v   virtual stages

step = (m − 1) max t + max u + (Σ u − max u) / v + what is not hidden of dp + optimizer
(1F1B; interleaved: Narayanan 2021; the first microbatch passes the stages alone, and each further one follows t later)

dualpipe: a device holds stages i and p − 1 − i, t(i) is the mean of both, and the bubble is (p / 2 − 1) (F + B / 2)
of a forward and a backward pass, half of which (gradients of weights) fills it (DeepSeek-AI 2024, table 2).

hidden, where ``Training.overlap`` has it
dp     zero 0, 1: the reduction behind the backward pass of the last microbatch, the gather behind the forward pass
       zero 2, 3: in every microbatch
cp     a ring behind attention             pp   with virtual stages
tp     all but one part of tp, behind the matrix products (asynchronous tensor parallelism, user buffers)
ep     behind the computation of another microbatch (a schedule that computes two at a time)
```

Placements of one layout are predicted together: each number is then an array, one value a placement.

Computation loses CONTENTION of what hides behind it. Groups of one kind run at once and share links, as in ``cost``;
different kinds do not wait for each other's links.

gloo: a connection carries an output, then a gradient (``cost``): two messages for each microbatch that does not pass
the stages alone. The first and the last stage send one of them, and wait for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import TypeVar

import numpy as np

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES, Device
from rankmesh.core.model import Sizes, Training, Transformer
from rankmesh.core.picks import ends
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.megatron_core import megatron_mesh
from rankmesh.core.spec import GroupSpec
from rankmesh.core.strided import IntArray
from rankmesh.placement.compute import Work, optimizer, stage_work
from rankmesh.placement.cost import FloatArray, HopCounts, bitwise, devices_of, seconds
from rankmesh.placement.steps import Roles, blocks, stage_messages
from rankmesh.placement.traffic import Message

__all__ = ["COMPUTE", "Links", "Prediction", "Step", "bubble", "least", "predict", "search_plan"]

# Seconds of one placement, or of each of several.
Seconds = float | FloatArray
_Some = TypeVar("_Some", float, Seconds)

# Share of the time of hidden communication that computation loses to it: units and memory that it takes.
CONTENTION = 0.1
COMPUTE = ("matrices", "attention", "kernels", "recomputation", "optimizer")


@dataclass(frozen=True)
class Step:
    """A predicted step: seconds by part, which make ``seconds``, and of communication that hides behind others."""

    parts: Mapping[str, float]
    hidden: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def compute(self) -> float:
        """Seconds that the busiest stage computes."""
        return sum(value for name, value in self.parts.items() if name in COMPUTE)

    @property
    def bubble(self) -> float:
        """Seconds that it waits for the pipeline to fill and to drain."""
        return self.parts.get("bubble", 0.0)

    @property
    def communication(self) -> float:
        """Seconds that it waits for others."""
        return self.seconds - self.compute - self.bubble


def search_plan(sizes: Sizes, training: Training) -> Plan:
    """Return the groups of a layout that send enough to count, in Megatron's order."""
    mesh = megatron_mesh(sizes.world, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp)
    dense, experts = _shards(sizes.replicas, training), _shards(sizes.expert_replicas, training)
    specs = [
        GroupSpec("tp"),
        GroupSpec("cp"),
        GroupSpec("pp"),
        GroupSpec("embd", axes="pp", pick=ends),
        GroupSpec("intra_dp_cp", "dp-cp", levels=dense, level=0),
        GroupSpec("inter_dp_cp", "dp-cp", levels=dense, level=1),
        GroupSpec("ep", view="expert"),
        GroupSpec("ep_tp", "etp", view="expert"),
        GroupSpec("intra_ep_dp", "edp", view="expert", levels=experts, level=0),
        GroupSpec("inter_ep_dp", "edp", view="expert", levels=experts, level=1),
    ]
    return Plan(mesh, specs)


def _shards(copies: int, training: Training) -> tuple[int, int]:
    outer = training.replicate if copies % training.replicate == 0 else 1
    return copies // outer, outer


class Links:
    """The groups of a plan on a cluster, under one placement or several: the seconds of their messages."""

    def __init__(self, plan: Plan, cluster: Cluster, backend: str = "nccl", device: Device = DEVICES["h100"]) -> None:
        self.roles, self.backend = Roles.of(plan), backend
        self.ranks, self.machine, self.given = devices_of(plan, cluster, device)
        self._plain = plan.replace(rank_map=None)
        self.shared = any(level.uplink is not None for level in cluster.levels)
        self._positions: dict[tuple[str, int | None], IntArray] = {}
        self._devices = self.given[None]
        self._bits: bool | None = None
        self._counts: dict[tuple[str, int | None], HopCounts] = {}
        self._only: Collection[str] | None = None

    def of(self, plan: Plan) -> Links:
        """Return the links of another plan of the same ranks, in their order."""
        other = copy(self)
        other.roles, other._plain = Roles.of(plan), plan.replace(rank_map=None)
        other._positions, other._counts = {}, {}
        return other

    def forget(self) -> None:
        """Drop the positions, which take memory; their counts stay."""
        self._positions = {}

    def under(self, devices: IntArray) -> Links:
        """Return the links under other placements: the device of each position, ``(placements, positions)``."""
        other = copy(self)
        other._devices, other._counts, other._bits = devices, {}, None
        return other

    def only(self, names: Collection[str]) -> Links:
        """Return links over which the messages of all other kinds take no time."""
        other = copy(self)
        other._only = names
        return other

    @property
    def many(self) -> int:
        """The number of placements."""
        return len(self._devices)

    def seconds(self, name: str, messages: Sequence[Message], stage: int | None = None) -> Seconds:
        """Seconds of a step that these messages of a kind take, of all groups at once or of the groups of one stage."""
        free = self._only is not None and name not in self._only
        if free or not messages or self._plain.groups(name).size < 2:
            return 0.0
        found = seconds(messages, self.costs(name, stage if self.shared else None))
        return float(found[0]) if self.many == 1 else found

    def counts(self, name: str, stage: int | None = None) -> HopCounts:
        """Return the hops of a kind; with ``stage``, of its groups there, or of all where the kind joins stages."""
        if (name, stage) not in self._counts:
            groups = self.positions(name, stage)
            stages = self._stages(groups[:, 0])
            self._counts[name, stage] = HopCounts(
                groups, self.machine, self._devices, backend=self.backend, stages=stages
            )
        return self._counts[name, stage]

    def costs(self, name: str, stage: int | None = None) -> HopCounts:
        """Return the hops of a kind, for levels and seconds: of its first group alone if all groups lie alike.

        They do if no uplink is shared, and positions, devices and units are told apart by bits: the bits in which two
        groups differ are then the same for all of their members.
        """
        if not self._uniform:
            return self.counts(name, stage)
        if (name, -1) not in self._counts:
            groups = self._plain.groups(name).array_of(np.zeros(1, dtype=np.int64))[:1]
            here = self._plain.mesh.rank_range.positions(groups)
            self._counts[name, -1] = HopCounts(here, self.machine, self._devices, backend=self.backend)
        return self._counts[name, -1]

    @property
    def _uniform(self) -> bool:
        if self._bits is None:
            self._bits = not self.shared and self.machine.binary and bitwise(self._devices)
        return self._bits

    def positions(self, name: str, stage: int | None = None) -> IntArray:
        """Return the groups of a kind, or its groups on one stage, as positions ``(groups, size)``."""
        if (name, stage) not in self._positions:
            if stage is None:
                found = self._plain.mesh.rank_range.positions(self._plain.groups(name).array)
            else:
                whole = self.positions(name)
                here = whole[(self._stages(whole) == stage).all(axis=1)]
                found = here if len(here) else whole
            self._positions[name, stage] = found
        return self._positions[name, stage]

    def _stages(self, positions: IntArray) -> IntArray:
        """Return the pipeline stage of each position; 0 where the mesh has none."""
        mesh = self._plain.mesh
        stages: IntArray = positions // mesh.strides["pp"] % mesh.axes["pp"] if "pp" in mesh.axes else 0 * positions
        return stages


@dataclass(frozen=True)
class _Stage:
    """One kind of stage: work and waits of a microbatch (``unshared``: of the first one), and seconds once a step."""

    work: Work
    waits: Mapping[str, Seconds]
    unshared: Mapping[str, Seconds]
    once: Mapping[str, Seconds]
    hidden: Mapping[str, Seconds]
    optimizer: float

    @property
    def seconds(self) -> Seconds:
        return self.work.seconds + sum(self.waits.values())

    @property
    def first(self) -> Seconds:
        """Seconds of a microbatch while no other stage is active."""
        return self.work.seconds + sum(self.unshared.values())


def _kinds_of_stages(model: Transformer, training: Training, sizes: Sizes) -> Iterator[tuple[tuple[int, ...], int]]:
    """Return the stages of one device of each kind, and how many devices of a pipeline are like it."""
    found: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for stage in range(sizes.pp):
        both = tuple(sorted((stage, sizes.pp - 1 - stage)))
        kept = both if training.schedule == "dualpipe" else (stage,)
        key = tuple((blocks(model, sizes, each), each == 0, each == sizes.pp - 1) for each in kept)
        found.setdefault(key, []).append(kept)
    return ((devices[0], len(devices)) for devices in found.values())


def _mean(parts: Sequence[Mapping[str, _Some]]) -> dict[str, _Some]:
    return {name: sum(each.get(name, 0.0) for each in parts) / len(parts) for name in dict.fromkeys(chain(*parts))}


def _joined(stages: Sequence[_Stage]) -> _Stage:
    """Return the device that holds these stages, and computes equally many microbatches of each."""
    if len(stages) == 1:
        return stages[0]
    work = Work(_mean([each.work.forward for each in stages]), _mean([each.work.backward for each in stages]))
    once = {name: len(stages) * value for name, value in _mean([each.once for each in stages]).items()}
    waits, unshared, hidden = (_mean([getattr(each, of) for each in stages]) for of in ("waits", "unshared", "hidden"))
    return _Stage(work, waits, unshared, once, hidden, sum(each.optimizer for each in stages))


def _most(*values: Seconds) -> Seconds:
    return max(values) if all(isinstance(value, float) for value in values) else reduce(np.maximum, values)


def _least(*values: Seconds) -> Seconds:
    return min(values) if all(isinstance(value, float) for value in values) else reduce(np.minimum, values)


def bubble(stages: Sequence[tuple[Seconds, int]], virtual_stages: int = 1) -> Seconds:
    """Seconds that the busiest stage waits in a step: a microbatch's seconds of stages, and how many take as long.

    >>> bubble([(2.0, 4)]), bubble([(2.0, 4)], virtual_stages=2), bubble([(3.0, 1), (2.0, 2)])
    (6.0, 3.0, 4.0)
    """
    together = sum(seconds * count for seconds, count in stages)
    return (together - _most(*(seconds for seconds, _ in stages))) / virtual_stages


def least(model: Transformer, training: Training, sizes: Sizes, device: Device) -> float:
    """Seconds of a step without any communication: no layout of these sizes is predicted to take less."""
    stages = []
    for kept, count in _kinds_of_stages(model, training, sizes):
        each = [stage_work(model, training, sizes, stage, device).seconds for stage in kept]
        stages.append((sum(each) / len(each), count))
    waiting = 0.0 if training.schedule == "dualpipe" else bubble(stages, training.virtual_stages)
    return float(training.microbatches(sizes.dp) * max(each for each, _ in stages) + waiting)


def predict(model: Transformer, training: Training, device: Device, links: Links) -> Step:
    """Predict the step of a layout over these ``links``."""
    return Prediction(model, training, device, links.roles).step(links)


class Prediction:
    """The step of a layout under any links: the work and the messages of its stages are counted once."""

    def __init__(self, model: Transformer, training: Training, device: Device, roles: Roles) -> None:
        self._training, self._sizes = training, roles.layout
        sizes = roles.layout

        def loaded(stage: int) -> _Load:
            work = stage_work(model, training, sizes, stage, device)
            sent = stage_messages(roles, model, training, stage)
            return _Load(stage, work, sent, optimizer(model, training, sizes, stage, device))

        self._loads = [
            ([loaded(stage) for stage in kept], count) for kept, count in _kinds_of_stages(model, training, sizes)
        ]

    def step(self, links: Links) -> Step:
        """Return the step under the one placement of the links."""
        parts, hidden = ({name: float(value) for name, value in found.items()} for found in self._parts(links))
        return Step(parts, hidden)

    def seconds(self, links: Links) -> FloatArray:
        """Return the seconds of the step under each placement of the links."""
        found: FloatArray = np.zeros(links.many) + sum(self._parts(links)[0].values())
        return found

    def _parts(self, links: Links) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
        """Return the seconds of a step by part, and those that are hidden."""
        training, sizes = self._training, self._sizes
        microbatches = training.microbatches(sizes.dp)
        stages = [(_joined([_stage(training, load, links) for load in loads]), count) for loads, count in self._loads]
        busiest = _Busiest([stage for stage, _ in stages], links.many)
        parts = {name: microbatches * value for name, value in busiest.of(lambda stage: stage.work.parts).items()}
        parts["optimizer"] = max(stage.optimizer for stage, _ in stages)
        parts["bubble"] = bubble([(stage.first, count) for stage, count in stages], training.virtual_stages)
        if training.schedule == "dualpipe":
            forward, backward = (
                sum(busiest.of(of).values()) for of in (lambda each: each.work.forward, lambda each: each.work.backward)
            )
            parts["bubble"] = (sizes.pp / 2 - 1) * (forward + backward / 2)
        unshared = busiest.of(lambda stage: stage.unshared)
        for name, value in busiest.of(lambda stage: stage.waits).items():
            parts[name] = parts.get(name, 0.0) + (microbatches - 1) * value + unshared[name]
        for name in dict.fromkeys(name for stage, _ in stages for name in stage.once):
            parts[name] = parts.get(name, 0.0) + _most(*(stage.once.get(name, 0.0) for stage, _ in stages))
        return parts, busiest.of(lambda stage: stage.hidden)


@dataclass(frozen=True)
class _Load:
    """The work and the messages of one stage, which do not depend on the links."""

    stage: int
    work: Work
    sent: Mapping[str, list[Message]]
    optimizer: float


class _Busiest:
    """The stage that takes longest for a microbatch, under each placement."""

    def __init__(self, stages: Sequence[_Stage], many: int) -> None:
        self._stages = stages
        times = [stage.seconds for stage in stages]
        if many == 1 or len(stages) == 1:
            self._one: _Stage | None = max(stages, key=lambda stage: stage.seconds) if many == 1 else stages[0]
        else:
            self._one = None
            self._chosen = np.argmax([np.broadcast_to(time, many) for time in times], axis=0)

    def of(self, parts: Callable[[_Stage], Mapping[str, Seconds]]) -> dict[str, Seconds]:
        """Return these parts of the busiest stage, by name."""
        if self._one is not None:
            return dict(parts(self._one))
        each = [parts(stage) for stage in self._stages]
        return {
            name: np.choose(self._chosen, [one.get(name, 0.0) for one in each]) for name in dict.fromkeys(chain(*each))
        }


def _stage(training: Training, load: _Load, links: Links) -> _Stage:
    sizes, stage, work, sent = links.roles.layout, load.stage, load.work, load.sent
    each = 1 / training.microbatches(sizes.dp)
    names, overlap = links.roles.names, training.overlap

    def all_of(role: str, of: int | None = None) -> Seconds:
        return links.seconds(names[role], sent.get(names[role], []), of) * each

    scalars = [message for message in sent.get(names["pp"], []) if message.collective == "all-reduce"]  # once a step
    total = links.seconds(names["pp"], scalars)
    ends = stage in (0, sizes.pp - 1)
    turns = 2 if ends and links.backend == "gloo" else 1  # what it sends, then what it receives
    tp, cp, ep, pp = all_of("tp"), all_of("cp"), all_of("ep"), all_of("pp") - total * each
    behind = {
        "tp": _least(tp * (1 - 1 / sizes.tp), work.parts["matrices"]) if "tp" in overlap else 0.0,
        "cp": _least(cp, work.parts["attention"]) if "cp" in overlap and training.context == "ring" else 0.0,
        "ep": _least(ep, work.seconds) if "ep" in overlap else 0.0,
        "pp": pp if "pp" in overlap and (training.virtual_stages > 1 or training.schedule != "1f1b") else 0.0,
    }
    waits = {"tp": tp - behind["tp"], "cp": cp - behind["cp"], "ep": ep - behind["ep"]}
    waits["ep"] += all_of("etp")
    waits["pp"] = turns * (pp - behind["pp"])
    hidden = {name: value / each for name, value in behind.items()}
    repeated, once, hidden["dp"] = _replicas(training, links, sent, work, each)
    waits["dp"] = repeated
    waits["contention"] = CONTENTION * sum(hidden.values()) * each
    unshared = waits | {"pp": pp - behind["pp"]}
    for name, roles in (("tp", ("tp",)), ("cp", ("cp",)), ("ep", ("ep", "etp"))) if links.shared else ():
        shared = sum(all_of(role) - all_of(role, stage) for role in roles)
        unshared[name] = _most(0.0, waits[name] - shared)
    return _Stage(work, waits, unshared, {"dp": once, "pp": total}, hidden, load.optimizer)


def _replicas(
    training: Training, links: Links, sent: Mapping[str, list[Message]], work: Work, each: float
) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds that replicas wait for each other: in every microbatch (``each`` of a step), once a step; and hidden."""
    names = links.roles.names
    reduced: Seconds = 0.0
    gathered: Seconds = 0.0
    for role in ("shards", "expert_shards"):
        for message in sent.get(names[role], []):
            took = links.seconds(names[role], [message])
            if message.collective == "all-gather":
                gathered += took
            else:
                reduced += took
    copied = sum(
        links.seconds(names[role], sent.get(names[role], [])) for role in ("replicas", "expert_replicas", "tied")
    )
    if training.zero > 2:  # gathered before each forward and each backward pass
        before, after = gathered * each / 2, gathered * each / 2 + reduced * each
    else:
        before, after = gathered, reduced * (each if training.zero > 1 else 1.0)
    if "dp" in training.overlap:
        before = _most(0.0, before - sum(work.forward.values()))
        after = _most(0.0, after - sum(work.backward.values()))
    repeated = (before if training.zero > 2 else 0.0) + (after if training.zero > 1 else 0.0)
    once = (before if training.zero <= 2 else 0.0) + (after if training.zero <= 1 else 0.0)
    return repeated, once + copied, gathered + reduced - once - repeated / each
