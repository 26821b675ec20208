"""Predicted steps and collectives beside published ones: ``python -m bench.published`` writes ``published.json``.

Rows, their sources and what they leave open are in ``tests/placement/published.json`` and ``collectives.json``. What a
row leaves open is chosen as ``rankmesh search`` chooses it; sizes and virtual stages are open in every row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rankmesh as rm
from bench.report import options, record
from rankmesh.cli.console import note
from rankmesh.core.clusters.cluster import Cluster, Host, Level
from rankmesh.core.clusters.hardware import SHARE, Device, device
from rankmesh.core.model import Sizes
from rankmesh.placement import Message, Training, Transformer
from rankmesh.placement.compute import flops
from rankmesh.placement.predict import Links
from rankmesh.placement.search import evaluate, search

__all__ = ["COLLECTIVES", "FIGURES", "ROWS", "collectives", "compare", "free_of", "published_seconds", "row_of"]

ROWS = Path(__file__).parents[1] / "tests" / "placement" / "published.json"
COLLECTIVES = ROWS.with_name("collectives.json")
FIGURES = Path(__file__).with_name("published.json")


def row_of(row: Mapping[str, Any]) -> tuple[Sizes, Cluster, Transformer, Training, Device]:
    """Return what a row of the file means."""
    asked = row["sizes"]
    sizes = Sizes(**{"etp": asked.get("tp", 1), **asked})
    levels = Level.all_unmeasured(("host", "leaf"))
    hosts = tuple(Host(f"node{number}", 8, ("leaf0",)) for number in range(-(-sizes.world // 8)))
    of = device(row["device"])
    of = replace(of, bandwidth=row.get("bandwidth", of.bandwidth), memory=row.get("memory_size", of.memory))
    if "peak" in row:
        of = replace(of, matrix={name: each * row["peak"] / of.peak("bf16") for name, each in of.matrix.items()})
    return sizes, Cluster(levels, hosts), Transformer(**row["model"]), Training(**row["training"]), of


def published_seconds(row: Mapping[str, Any], model: Transformer, training: Training, world: int) -> float:
    """Return the seconds of the published step, from its tokens or TFLOP/s a device where it has those."""
    figures = row["published"]
    if "seconds" in figures:
        return float(figures["seconds"])
    tokens = training.batch * training.sequence
    if "tokens" in figures:
        return float(tokens / figures["tokens"] / world)
    work = flops(model, training)
    if figures["of"] != "model":  # Megatron's own count: everything twice forward, the whole square of attention
        h, layers = model.hidden, model.layers
        work = 96 * tokens * layers * h**2 * (1 + training.sequence / 6 / h + model.vocabulary / 16 / layers / h)
    return float(work / figures["tflops"] / 1e12 / world)


def free_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the training that the search chooses: those that the row leaves open, and virtual stages."""
    interleaved = row["training"].get("schedule", "1f1b") == "1f1b"
    return tuple({**dict.fromkeys(row["free"]), **({"virtual_stages": None} if interleaved else {})})


def collectives() -> list[dict[str, Any]]:
    """Return the published collectives with what is predicted of them."""
    data = json.loads(COLLECTIVES.read_text(encoding="utf-8"))
    machines = {name: _machine(machine) for name, machine in data["machines"].items()}
    return [row | {"predicted": _collective(row, machines[row["machine"]])} for row in data["rows"]]


def _machine(machine: Mapping[str, Any]) -> Links:
    """Return one group of all devices; ``port`` in GB/s and ``ports`` of a host, where they are not the device's."""
    cluster = Cluster.parse(machine["cluster"])
    changes: dict[str, Any] = {}
    if "port" in machine:
        port = machine["port"] * 1e9 * SHARE["network"]
        changes |= {"bandwidth": port, "uplink": machine["ports"] * port, "assumed": False}
    if "latency" in machine:
        changes["latency"] = cluster.levels[-1].latency + machine["latency"] * 1e-6
    if changes:
        cluster = cluster.with_levels((*cluster.levels[:-1], replace(cluster.levels[-1], **changes)))
    plan = rm.Plan(rm.Mesh(dp=cluster.size), [rm.GroupSpec("dp")])
    return Links(plan, cluster, device=device(machine["device"]))


def _collective(row: Mapping[str, Any], links: Links) -> float:
    """Return predicted seconds; sizes are those of nccl-tests: of an all-gather, the result."""
    ranks = links.counts("dp").size
    size = row["bytes"] / (ranks if row["collective"] == "all-gather" else 1)
    return float(links.seconds("dp", [Message(row["collective"], size)]))


def compare(row: Mapping[str, Any]) -> dict[str, Any]:
    """Compare one row of the table."""
    sizes, cluster, model, training, of = row_of(row)
    found = search(sizes.world, cluster, model, training, top=200, device=of, free=free_of(row))
    # The place of the row's sizes among those that fit; 0 where they do not fit.
    rank = next((number for number, each in enumerate(found, 1) if each.sizes == sizes), 0)
    chosen = next((each for each in found if each.sizes == sizes), None)
    here = chosen or evaluate(sizes, cluster, model, training, of)
    seconds = published_seconds(row, model, training, sizes.world)
    memory = row["published"].get("memory")
    return {
        "name": row["name"],
        "source": row["source"],
        "table": row.get("table", "main"),
        "sizes": dict(row["sizes"]),
        "rank": rank,
        "fitting": len(found),
        "published": seconds,
        "predicted": here.seconds,
        "ratio": here.seconds / seconds,
        "memory": here.memory / 2**30,
        "measured": memory and memory / 2**30,
        "chosen": {name: getattr(here.training, name) for name in free_of(row)},
        "parts": dict(here.step.parts),
    }


def main() -> None:
    """Compare every row, print them, and write the file that the document is made of."""
    given = options("published", __doc__).parse_args()
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    rows = []
    for row in data["rows"]:
        done = compare(row)
        rows.append(done)
        note(f"{done['name']:42} {done['ratio']:.2f} rank {done['rank']:>3}/{done['fitting']:<3}")
    record(given.json, {"rows": rows, "collectives": collectives()})


if __name__ == "__main__":
    main()
