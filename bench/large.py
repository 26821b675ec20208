"""Large worlds: what planning costs one process, in processor time and in memory beside what is loaded anyway.

Each row is measured in a process of its own: ``python -m bench.large search 131072`` prints its figures as JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.megatron_core import megatron
from rankmesh.core.sharding import Sharding
from rankmesh.placement import Training, Transformer, place
from rankmesh.placement.search import search
from rankmesh.readers.source import read
from rankmesh.transfer import Transfer
from rankmesh.viz.overview import overview

__all__ = ["ROWS", "main", "table"]

_LLAMA = Transformer(126, 16384, 128, 53248, 128256, kv_heads=8, gated=True, tied=False)


def _cluster(world: int) -> Cluster:
    return Cluster.parse("host=8,leaf=32,spine=*", world_size=world)


def _plan(world: int) -> Plan:
    return megatron(world, tp=8, pp=16, cp=2)


def _show(world: int) -> object:
    return overview(read(f"megatron:world={world},tp=8,pp=16,cp=2"), cluster=_cluster(world))


def _every_rank(world: int) -> object:
    plan = _plan(world)
    return [plan.of(rank)["tp"].rank for rank in range(0, world, 64)]


def _shardings(mesh: Mesh, stages: int) -> dict[str, Sharding]:
    found = {}
    for layer in range(16):
        at = {"pp": layer * stages // 16} if stages > 1 else None
        found[f"{layer}.qkv"] = Sharding(mesh, ("tp", None), (18432, 16384), "bfloat16", at, parts=(16384, 1024, 1024))
        found[f"{layer}.proj"] = Sharding(mesh, (None, "tp"), (16384, 16384), "bfloat16", at)
        found[f"{layer}.norm"] = Sharding(mesh, (None,), (16384,), "bfloat16", at)
    return found


def _relayout(world: int) -> object:
    before, after = Mesh(tp=8, dp=world // 128, pp=16), Mesh(tp=16, dp=world // 128, pp=8)
    return Transfer(_shardings(before, 16), _shardings(after, 8)).of(world - 3)


def _to_engines(world: int) -> object:
    trainer, engines = Mesh(tp=8, dp=world // 256, pp=16), Mesh(tp=8, dp=world // 16, offset=world // 2)
    return Transfer(_shardings(trainer, 16), _shardings(engines, 1)).of(world - 3)


ROWS: dict[str, Callable[[int], object]] = {
    "search": lambda world: search(world, _cluster(world), _LLAMA, Training(batch=world // 16, sequence=8192)),
    "place": lambda world: place(_plan(world), _cluster(world), exact=False),
    "Transfer.of, another layout": _relayout,
    "Transfer.of, to engines": _to_engines,
    "show": _show,
    "plan.of, every 64th rank": _every_rank,
}


def table(worlds: Sequence[int]) -> str:
    """Return the rows as Markdown: processor seconds, and MB beside what is loaded."""
    lines = ["| work | ranks | seconds | MB |", "| --- | ---: | ---: | ---: |"]
    for name in ROWS:
        for world in worlds:
            command = [sys.executable, "-m", "bench.large", name, str(world)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  - this module
            found = json.loads(done.stdout)
            lines.append(f"| {name} | {world:,} | {found['seconds']:.2f} | {found['mb']:.0f} |")
    return "\n".join(lines) + "\n"


def main(name: str, world: int) -> None:
    """Do the work of one row, and print what it took."""
    ROWS[name](4096)  # what is loaded at the first use
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    ROWS[name](world)
    seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(json.dumps({"seconds": seconds, "mb": (after - before) / 1024}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
