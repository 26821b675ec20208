"""Placement on emulated clusters, predicted and measured: ``make bench-cluster``, as root.

```
flat     node1 node2 node10 node11, two ranks each, links of 200 Mbit/s
racks    the same in racks of two, and a trunk of 100 Mbit/s between them
```

On each the cluster is measured and calibrated; every order of the axes and torchrun's own order (hosts as strings) are
predicted from that, and run; the placement that ``rm.place`` chooses is among them. Then one host's link is halved, and
``measure`` has to name it; the example is trained under the worst and the chosen order.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rankmesh as rm
from bench.emulated import Emulated, emulated, require
from bench.report import load, options, record
from rankmesh.core.measured import Measurement
from rankmesh.placement import Traffic, Training, Transformer, place, step_traffic
from rankmesh.placement.calibrated import calibrated

__all__ = ["fastest", "kendall", "main", "placements", "study", "train"]

RACKS = (("node1", "node2"), ("node10", "node11"))
LINK, TRUNK = 200, 100
MESH = {"tp": 2, "dp": 2, "pp": 2}
TRAFFIC = Traffic(
    {
        "tp": [{"collective": "all-reduce", "bytes": 512 * 2**10, "times": 4}],
        "dp": [{"collective": "all-reduce", "bytes": 1024 * 2**10}],
        "pp": [{"collective": "send/recv", "bytes": 256 * 2**10, "times": 2}],
    }
)
SIZES = (4 * 2**10, 512 * 2**10)
# A slow link shows in messages of this size.
SLOW = (256 * 2**10,)
# The example's model and batch.
EXAMPLE = {"layers": 2, "hidden": 128, "heads": 4, "sequence": 64, "batch": 4}
# Costs that differ by less than this part are tied, predicted or measured.
TIE = 0.05


def planned(rank_map: Sequence[int] | None = None) -> rm.Plan:
    """Return the layout that is placed."""
    return rm.Plan(rm.Mesh(**MESH, rank_map=rank_map), [rm.GroupSpec(name) for name in MESH])


def ordered(sizes: Mapping[str, int], order: Sequence[str]) -> tuple[int, ...]:
    """Return the rank at each position of a mesh whose axes are on the devices in this order, innermost first."""
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in order], order="F")
    return tuple(ranks.transpose([order.index(axis) for axis in sizes]).reshape(-1, order="F").tolist())


def placements(hosts: Sequence[str], ranks: int) -> dict[str, tuple[int, ...]]:
    """Return each order of the axes on hosts in natural order, and torchrun's: the ranks on hosts sorted as strings."""
    found = {"-".join(order): ordered(MESH, order) for order in permutations(MESH)}
    strings = sorted(hosts)
    found["torchrun"] = tuple(hosts.index(host) * ranks + local for host in strings for local in range(ranks))
    return found


def step(groups: rm.LiveGroups) -> None:
    """Send the traffic of one step on this rank, kind after kind."""
    for name, messages in TRAFFIC.items():
        group = groups[name]
        for message in messages:
            tensor = torch.ones(int(message.bytes) // 4)
            for _ in range(int(message.times)):
                if message.collective == "all-reduce":
                    dist.all_reduce(tensor, group=group.pg)
                elif group.is_first:
                    dist.send(tensor, group.next, group=group.pg)
                else:
                    dist.recv(tensor, group.prev, group=group.pg)


def _steps(cases: Mapping[str, tuple[int, ...]], rounds: int) -> dict[str, list[float]]:
    """Time a step under each placement on this rank; each round begins with another placement."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with rm.connect(planned(cases[name])) as groups:
                dist.barrier()
                step(groups)
                dist.barrier()
                started = time.perf_counter()
                step(groups)
                dist.barrier()
                if turn:
                    times[name].append(time.perf_counter() - started)
    return times


def fastest(every: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the seconds of a step under each placement: the slowest rank's of each round, and the least of these.

    What else runs on the machine makes a step longer, never shorter, so the least is nearest to what the links take.

    >>> fastest([{"placed": [1.0, 2.0, 9.0]}, {"placed": [1.5, 1.0, 9.0]}])
    {'placed': 1.5}
    """
    return {name: min(map(max, zip(*(found[name] for found in every), strict=True))) for name in every[0]}


def measured_levels(sizes: Sequence[int], plan: rm.Plan | None = None) -> Measurement:
    with rm.connect(plan or planned()) as groups:
        return groups.measure(sizes)


def once(cases: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the first name of each rank map: two names of one placement are one measurement.

    >>> once({"torchrun": (0, 2, 1), "other": (2, 1, 0), "placed": (0, 2, 1)})
    ['torchrun', 'other']
    """
    found: dict[tuple[int, ...], str] = {}
    for name, rank_map in cases.items():
        found.setdefault(tuple(rank_map), name)
    return list(found.values())


def kendall(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Kendall's tau-b, where values that differ by less than ``TIE`` are tied.

    >>> kendall([1, 2, 3], [10, 20, 30]), kendall([1, 2, 3], [3, 2, 1]), kendall([1, 1.01, 3], [10, 10.2, 30])
    (1.0, -1.0, 1.0)
    """

    def sign(a: float, b: float) -> int:
        return 0 if abs(a - b) < TIE * max(a, b) else 1 if a > b else -1

    pairs = [(i, j) for j in range(len(left)) for i in range(j)]
    ours, theirs = ([sign(values[i], values[j]) for i, j in pairs] for values in (left, right))
    untied = (sum(map(abs, ours)) * sum(map(abs, theirs))) ** 0.5
    return float(sum(a * b for a, b in zip(ours, theirs, strict=True)) / untied)


def study(there: Emulated, rounds: int, _: Mapping[str, Any]) -> dict[str, Any]:
    """Measure everything on one emulated cluster."""
    cases = placements(there.hosts, there.ranks)
    seen: Measurement = there.on_ranks(measured_levels, SIZES)[0]
    cluster = calibrated(there.cluster, planned(), seen)
    predicted = {
        name: place(planned(rank_map), cluster, traffic=TRAFFIC, backend="gloo").before
        for name, rank_map in cases.items()
    }
    chosen = place(planned(cases["torchrun"]), cluster, traffic=TRAFFIC, backend="gloo")
    cases["placed"], predicted["placed"] = chosen.rank_map, chosen.cost
    single = once(cases)
    found = fastest(there.on_ranks(_steps, {name: cases[name] for name in single}, rounds))
    measured = {name: found[next(one for one in single if cases[one] == rank_map)] for name, rank_map in cases.items()}
    return {
        "rounds": rounds,
        "levels": [level.to_dict() for level in cluster.levels],
        "predicted": predicted,
        "measured": measured,
        "kendall": kendall([predicted[name] for name in single], [measured[name] for name in single]),
        "placed": {"order": chosen.order, "over_best": measured["placed"] / min(measured.values()) - 1},
        "torchrun_over_placed": measured["torchrun"] / measured["placed"],
        "rank_maps": {name: list(rank_map) for name, rank_map in cases.items()},
    }


def slow_host(there: Emulated, host: str, rate: int) -> dict[str, Any]:
    """Slow one host's link; return which hosts ``measure`` names."""
    there.set_link(host, rate)
    try:
        seen: Measurement = there.on_ranks(measured_levels, SLOW)[0]
    finally:
        there.set_link(host, there.link)
    return {"slowed": host, "rate": rate, "named": list(seen.slow_hosts)}


def slow_hosts(there: Emulated, _rounds: int, _: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Halve each host's link in turn."""
    return [slow_host(there, host, there.link // 2) for host in there.hosts]


def load_example() -> None:
    """Import the example and its optimizer, once for all ranks that are forked from here."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_gpt"))
    from gpt import loop  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


def _trained(rank_map: tuple[int, ...], steps: int) -> tuple[list[float], list[float]]:
    """Train; return the losses, and the seconds of each step after the first."""
    from gpt.layout import Sizes, rankmesh
    from gpt.loop import Run, Trainer
    from gpt.model import Shape

    shape = Shape(**EXAMPLE, experts=0, microbatches=1)
    losses, seconds = [], []
    with rankmesh(Sizes(**MESH), rank_map) as groups:
        trainer = Trainer(Run(shape, steps=steps + 1), groups, torch.device("cpu"))
        for index in range(steps + 1):
            dist.barrier()
            started = time.perf_counter()
            losses.append(trainer.step(index).loss)
            dist.barrier()
            seconds.append(time.perf_counter() - started)
    return losses, seconds[1:]


def example_plan(rank_map: Sequence[int] | None = None) -> rm.Plan:
    """Return the layout of the example."""
    return rm.recipes.megatron(tp=MESH["tp"], dp=MESH["dp"], pp=MESH["pp"]).replace(rank_map=rank_map)


def described(
    shape: Mapping[str, int], replicas: int, microbatches: int = 1, **more: Any
) -> tuple[Transformer, Training]:
    """Return the example's model of a shape, and how it is trained."""
    from gpt.text import VOCABULARY

    sizes: dict[str, Any] = {name: shape[name] for name in ("layers", "hidden", "heads")}
    if "experts" in shape:
        sizes |= {"experts": shape["experts"], "top_k": shape["top"], "expert_every": 2}
    model = Transformer(**sizes, ffn_hidden_size=4 * shape["hidden"], vocabulary=VOCABULARY)
    four: dict[str, Any] = dict.fromkeys(("activation", "gradient", "parameter", "scalar"), 4)
    training = Training(
        batch=shape["batch"], microbatch=shape["batch"] // replicas // microbatches, sequence=shape["sequence"],
        context="all-gather", sequence_parallel=False, **four, **more,
    )  # fmt: skip
    return model, training


def train(there: Emulated, steps: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """Train the example in the order predicted dearest, torchrun's, and the placed one."""
    load_example()
    cluster = rm.Cluster.from_dict({**there.cluster.to_dict(), "levels": before["racks"]["levels"]})
    traffic = step_traffic(example_plan(), *described(EXAMPLE, MESH["dp"]))
    maps = placements(there.hosts, there.ranks)
    costs = {
        name: place(example_plan(rank_map), cluster, traffic=traffic, backend="gloo").before
        for name, rank_map in maps.items()
    }
    placed = place(example_plan(maps["torchrun"]), cluster, traffic=traffic, backend="gloo")
    worst = max((name for name in maps if name != "torchrun"), key=costs.__getitem__)
    maps["placed"], costs["placed"] = placed.rank_map, placed.cost
    found = {}
    for name in (worst, "torchrun", "placed"):
        ranks = there.on_ranks(_trained, tuple(maps[name]), steps)
        seconds = fastest([{name: seconds} for _, seconds in ranks])[name]
        found[name] = {"predicted": costs[name], "seconds": seconds, "losses": ranks[0][0]}
    return found


# What is measured, each on a cluster of its own that is there for a minute or two; `train` takes what `racks` found.
FLAT = (tuple(host for rack in RACKS for host in rack),)
PARTS: dict[str, tuple[Any, int | None, Callable[[Emulated, int, Mapping[str, Any]], Any]]] = {
    "flat": (FLAT, None, study),
    "slow": (FLAT, None, slow_hosts),
    "racks": (RACKS, TRUNK, study),
    "train": (RACKS, TRUNK, train),
}


def main(parts: Sequence[str], rounds: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure these parts; return them and the others as they were ``before``."""
    require()
    results = {**before, "link": LINK, "trunk": TRUNK, "traffic": TRAFFIC.to_dict(), "mesh": MESH, "tie": TIE}
    for part in parts:
        racks, trunk, measure = PARTS[part]
        started, begun = time.perf_counter(), load()
        with emulated(racks, link=LINK, trunk=trunk) as there:
            results[part] = measure(there, rounds, results)
        results.setdefault("load", {})[part] = [begun, load()]
        sys.stderr.write(f"{part}, {time.perf_counter() - started:.0f} s: {json.dumps(results[part])}\n")
    both = [results[name] for name in ("flat", "racks") if name in results]
    pairs = [(each["predicted"][name], each["measured"][name]) for each in both for name in once(each["rank_maps"])]
    return {**results, "kendall": kendall([one for one, _ in pairs], [other for _, other in pairs])}


if __name__ == "__main__":
    parser = options("cluster", __doc__, rounds=9)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure anew, of: %(default)s")
    given = parser.parse_args()
    known = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    record(given.json, main(given.only.split(","), given.rounds, known))
