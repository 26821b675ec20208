"""Placement on emulated clusters, predicted and measured: ``make bench-cluster``, as root.

```
flat     node1 node2 node10 node11, two ranks each, links of 200 Mbit/s
racks    the same in racks of two, and a trunk of 100 Mbit/s between them
```

On each the cluster is measured and calibrated; every order of the axes and torchrun's own order (hosts as strings) are
predicted from that, and run; the placement that ``rm.place`` chooses is among them. Then one host's link is halved, and
``measure`` has to name it; and the example is trained under the worst and the chosen order.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rankmesh as rm
from bench.emulated import Emulated, emulated, problem
from rankmesh.placement import Traffic, place
from rankmesh.placement.measured import Measurement, calibrated

__all__ = ["kendall", "main", "placements", "study", "train"]

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
# Costs that differ by less than this part are tied, predicted or measured.
TIE = 0.05
RESULTS = Path(__file__).with_name("cluster.json")


def planned(rank_map: Sequence[int] | None = None) -> rm.Plan:
    """The layout that is placed."""
    return rm.Plan(rm.Mesh(**MESH, rank_map=rank_map), [rm.GroupSpec(name) for name in MESH])


def placements(size: int, hosts: Sequence[str], ranks: int) -> dict[str, tuple[int, ...]]:
    """Every order of the axes on hosts in natural order, and torchrun's: the same ranks on hosts sorted as strings."""
    found = {}
    for order in permutations(MESH):
        sizes = [MESH[axis] for axis in order]
        by_order = np.arange(size).reshape(sizes, order="F").transpose([order.index(axis) for axis in MESH])
        found["-".join(order)] = tuple(by_order.reshape(-1, order="F").tolist())
    strings = sorted(hosts)
    found["torchrun"] = tuple(hosts.index(host) * ranks + local for host in strings for local in range(ranks))
    return found


def step(groups: rm.LiveGroups) -> None:
    """The traffic of one step on this rank, kind after kind."""
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


def _steps(cases: Mapping[str, tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Seconds of a step under each placement, on this rank: the median over rounds that take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, rank_map in cases.items():
            with rm.connect(planned(rank_map)) as groups:
                dist.barrier()
                step(groups)
                dist.barrier()
                started = time.perf_counter()
                step(groups)
                dist.barrier()
                if turn:
                    times[name].append(time.perf_counter() - started)
    return {name: median(found) for name, found in times.items()}


def _measured(sizes: Sequence[int]) -> Measurement:
    with rm.connect(planned()) as groups:
        return groups.measure(sizes)


def kendall(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b, where values that differ by less than ``TIE`` are tied.

    >>> kendall([1, 2, 3], [10, 20, 30]), kendall([1, 2, 3], [3, 2, 1]), kendall([1, 1.01, 3], [10, 10.2, 30])
    (1.0, -1.0, 1.0)
    """

    def sign(a: float, b: float) -> int:
        return 0 if abs(a - b) < TIE * max(a, b) else 1 if a > b else -1

    pairs = [(i, j) for j in range(len(left)) for i in range(j)]
    ours, theirs = ([sign(values[i], values[j]) for i, j in pairs] for values in (left, right))
    untied = (sum(map(abs, ours)) * sum(map(abs, theirs))) ** 0.5
    return float(sum(a * b for a, b in zip(ours, theirs, strict=True)) / untied)


def study(there: Emulated, rounds: int) -> dict[str, Any]:
    """Everything that is measured on one emulated cluster."""
    cases = placements(there.size, there.hosts, there.ranks)
    seen: Measurement = there.on_ranks(_measured, SIZES)[0]
    cluster = calibrated(there.cluster, planned(), seen)
    predicted = {
        name: place(planned(rank_map), cluster, traffic=TRAFFIC, backend="gloo").before
        for name, rank_map in cases.items()
    }
    chosen = place(planned(cases["torchrun"]), cluster, traffic=TRAFFIC, backend="gloo")
    cases["placed"], predicted["placed"] = chosen.rank_map, chosen.cost
    every = there.on_ranks(_steps, cases, rounds)
    measured = {name: max(found[name] for found in every) for name in cases}
    best = min(measured.values())
    return {
        "levels": [level.to_dict() for level in cluster.levels],
        "predicted": predicted,
        "measured": measured,
        "kendall": kendall([predicted[name] for name in cases], [measured[name] for name in cases]),
        "placed": {
            "order": chosen.order,
            "rank_map": list(chosen.rank_map),
            "over_best": measured["placed"] / best - 1,
        },
        "torchrun_over_placed": measured["torchrun"] / measured["placed"],
        "rank_maps": {name: list(rank_map) for name, rank_map in cases.items()},
    }


def slow_host(there: Emulated, host: str, rate: int) -> dict[str, Any]:
    """One host's link slowed: what ``measure`` says."""
    there.set_link(host, rate)
    try:
        seen: Measurement = there.on_ranks(_measured, SLOW)[0]
    finally:
        there.set_link(host, there.link)
    return {"slowed": host, "rate": rate, "named": list(seen.slow_hosts)}


def _load_example() -> None:
    """What the example and its optimizer import, once for all ranks that are forked from here."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_gpt"))
    from gpt import loop  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


def _trained(rank_map: tuple[int, ...], steps: int) -> tuple[list[float], float]:
    from gpt.layout import Sizes, rankmesh
    from gpt.loop import Run, Trainer
    from gpt.model import Shape

    shape = Shape(layers=2, hidden=128, heads=4, experts=0, sequence=64, batch=4, microbatches=1)
    with rankmesh(Sizes(**MESH), rank_map) as groups:
        trainer = Trainer(Run(shape, steps=steps + 1), groups, torch.device("cpu"))
        losses = [trainer.step(0).loss]
        dist.barrier()
        started = time.perf_counter()
        losses += [trainer.step(index).loss for index in range(1, steps + 1)]
        dist.barrier()
    return losses, (time.perf_counter() - started) / steps


def train(there: Emulated, cases: Mapping[str, Sequence[int]], steps: int) -> dict[str, Any]:
    """Seconds a step and losses of the example under each placement."""
    found = {}
    _load_example()
    for name, rank_map in cases.items():
        ranks = there.on_ranks(_trained, tuple(rank_map), steps)
        found[name] = {"seconds": max(seconds for _, seconds in ranks), "losses": ranks[0][0]}
    return found


def main(rounds: int = 3, steps: int = 5, tell: Callable[[str], object] = sys.stderr.write) -> dict[str, Any]:
    """All of it, as data; ``tell`` hears how far it is."""
    why = problem()
    if why is not None:
        raise SystemExit(f"error: {why}")
    started = time.perf_counter()
    # A launcher that ends this must not leave namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def done(what: str, found: object) -> None:
        tell(f"{time.perf_counter() - started:5.0f} s  {what}: {json.dumps(found)}\n")

    results: dict[str, Any] = {"link": LINK, "trunk": TRUNK, "traffic": TRAFFIC.to_dict(), "mesh": MESH, "tie": TIE}
    with emulated([tuple(host for rack in RACKS for host in rack)], link=LINK) as there:
        results["flat"] = study(there, rounds)
        done("flat", results["flat"])
        results["slow"] = [slow_host(there, host, LINK // 2) for host in there.hosts]
        done("slow", results["slow"])
    with emulated(RACKS, link=LINK, trunk=TRUNK) as there:
        results["racks"] = found = study(there, rounds)
        done("racks", found)
        worst = max(found["measured"], key=found["measured"].get)
        maps = found["rank_maps"]
        results["train"] = train(
            there, {worst: maps[worst], "torchrun": maps["torchrun"], "placed": maps["placed"]}, steps
        )
        done("train", results["train"])
    both = [results[name] for name in ("flat", "racks")]
    pairs = [(each["predicted"][name], each["measured"][name]) for each in both for name in each["measured"]]
    results["kendall"] = kendall([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return results


if __name__ == "__main__":
    found = main()
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({key: found[key] for key in ("kendall", "slow")}, indent=2) + "\n")
