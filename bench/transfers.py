"""Transfers against what others do, in one world, in turn: bytes on the wire, seconds, peak memory.

```
make bench-transfers        as root: in a network namespace of its own, so that all bytes of its loopback are the
                            transfer's
```

Each case is 16 gloo ranks with one model; each round every method moves it once, and its result is checked. What is
planned or connected once (plans, groups, first messages) is done in a round before, which does not count.

Memory is the highest resident size while a method runs, less that before it. The allocator first gives back what it
keeps of methods before: new buffers in memory that it kept would not show. The targets' pages are resident by then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import rankmesh as rm
from bench.memory import highest, resident
from bench.processes import run_world
from bench.report import record
from bench.results import spread

RANKS = 16
LOADED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
    "megatron.core.resharding",
    "megatron.core.resharding.copy_services.gloo_copy_service",
    "rankmesh.transfer.live.run",
)
BUDGET = 16 << 20
Method = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A pair of layouts of one model. ``stages``: of the source; the target has none."""

    title: str
    source: rm.Mesh
    target: rm.Mesh
    stages: int
    turned: bool = False


CASES = {
    "refit": Case(
        "TP4·PP2·DP2 on ranks 0–15 to TP2·DP4 on ranks 0–7", rm.Mesh(tp=4, dp=2, pp=2), rm.Mesh(tp=2, dp=4), 2
    ),
    "apart": Case(
        "TP4·PP2 on ranks 0–7 to TP2·DP4 on ranks 8–15", rm.Mesh(tp=4, pp=2), rm.Mesh(tp=2, dp=4, offset=8), 2
    ),
    "same": Case("TP4·DP4 to itself, rows to columns", rm.Mesh(tp=4, dp=4), rm.Mesh(tp=4, dp=4), 1, turned=True),
}


def shardings(case: Case, hidden: int, layers: int) -> tuple[dict[str, rm.Sharding], dict[str, rm.Sharding]]:
    """A transformer's matrices on both sides; ``turned``: what is cut by rows is cut by columns in the end."""
    source, target = {}, {}
    for layer in range(layers):
        at = {"pp": layer * case.stages // layers} if case.stages > 1 else None
        sizes = {
            "qkv": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "up": (4 * hidden, hidden),
            "down": (hidden, 4 * hidden),
        }
        for name, shape in sizes.items():
            dim = int(name in ("out", "down"))
            cuts = [tuple("tp" if d == (dim ^ turned) else None for d in range(2)) for turned in (False, case.turned)]
            source[f"{layer}.{name}"] = rm.Sharding(case.source, cuts[0], shape, at=at)
            target[f"{layer}.{name}"] = rm.Sharding(case.target, cuts[1], shape)
    return source, target


class Side:
    """One rank's part of a case: its source shards, empty target shards, and what must come."""

    def __init__(self, case: Case, hidden: int, layers: int, rank: int) -> None:
        import torch

        self.case, self.rank = case, rank
        self.source, self.target = shardings(case, hidden, layers)
        self.moves = rm.Transfer(self.source, self.target)
        self.tensors = {name: self._cut(name, s) for name, s in self.source.items() if s.holds(rank)}
        self.into = {name: torch.empty(s.of(rank).shape) for name, s in self.target.items() if s.holds(rank)}

    def _cut(self, name: str, sharding: rm.Sharding) -> Any:
        import torch

        (box,) = sharding.of(self.rank).boxes
        rows, columns = (torch.arange(start, stop) for start, stop in box)
        whole = rows[:, None] * sharding.shape[1] + columns[None, :] + list(self.source).index(name)
        return (whole % 8191).float()

    def check(self) -> None:
        """Every target shard is what it should be."""
        import torch

        for name, tensor in self.into.items():
            if not torch.equal(tensor, self._cut(name, self.target[name])):
                raise AssertionError(f"{name} on rank {self.rank}")
            tensor.fill_(-1)


def ours(side: Side) -> Method:
    """rankmesh, within its budget."""
    return lambda: side.moves.run(side.tensors, side.into, BUDGET)


def _placements(sharding: rm.Sharding) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    dim = next(d for d, axes in enumerate(sharding.cut or ()) if axes)
    return [Replicate(), Shard(dim)]


def _device_meshes(side: Side) -> tuple[Any, Any]:
    """The (dp, tp) meshes of the source's stages and of the target, as each rank has them."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    meshes = []
    for mesh in (side.case.source, side.case.target):
        stages = mesh.axes.get("pp", 1)
        ranks = torch.arange(mesh.size).view(stages, -1, mesh.axes["tp"]) + mesh.offset
        made = [DeviceMesh("cpu", stage, mesh_dim_names=("dp", "tp")) for stage in ranks]
        meshes.append(next((one for one in made if side.rank in one.mesh), None))
    return meshes[0], meshes[1]


def full_tensor(side: Side) -> Method:
    """DTensor's full_tensor on the source, a broadcast to all, and each rank's part of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    ours, _ = _device_meshes(side)

    def move() -> None:
        for name, sharding in side.source.items():
            whole = torch.empty(sharding.shape)
            if name in side.tensors:
                whole = DTensor.from_local(
                    side.tensors[name], ours, _placements(sharding), run_check=False
                ).full_tensor()
            dist.broadcast(whole, next(rank for rank in range(RANKS) if sharding.holds(rank)))
            if name in side.into:
                (box,) = side.target[name].of(side.rank).boxes
                side.into[name].copy_(whole[tuple(slice(*edges) for edges in box)])

    return move


def redistribute(side: Side) -> Method:
    """DTensor's redistribute, which knows one mesh."""
    from torch.distributed.tensor import DTensor

    ours, _ = _device_meshes(side)

    def move() -> None:
        for name, sharding in side.source.items():
            given = DTensor.from_local(side.tensors[name], ours, _placements(sharding), run_check=False)
            side.into[name].copy_(given.redistribute(placements=_placements(side.target[name])).to_local())

    return move


def checkpoint(side: Side) -> Method:
    """torch's distributed checkpoint, saved to memory (tmpfs) and loaded under the target."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import DTensor

    ours, theirs = _device_meshes(side)
    members = [rank for rank in range(RANKS) if rank in side.case.target]
    group = dist.new_group(members)
    folder = Path("/dev/shm/rankmesh-transfers")  # noqa: S108  - a file system in memory is the kindest to it

    def move() -> None:
        saved = {
            n: DTensor.from_local(t, ours, _placements(side.source[n]), run_check=False)
            for n, t in side.tensors.items()
        }
        save(saved, checkpoint_id=folder)
        if side.rank in members:
            wanted = {
                n: DTensor.from_local(t, theirs, _placements(side.target[n]), run_check=False)
                for n, t in side.into.items()
            }
            load(wanted, checkpoint_id=folder, process_group=group)
        dist.barrier()
        if side.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()

    return move


def megatron(side: Side) -> Method:
    """Megatron-Core's planner and its copies over gloo (megatron.core.resharding), of the newest release."""
    import torch
    import torch.distributed as dist

    resharding = import_module("megatron.core.resharding")
    services = import_module("megatron.core.resharding.copy_services.gloo_copy_service")
    models = []
    for mesh, shardings, tensors in (
        (side.case.source, side.source, side.tensors),
        (side.case.target, side.target, side.into),
    ):
        model: Any = torch.nn.Module()
        groups = {axis: [(g.ranks, dist.new_group(list(g.ranks))) for g in mesh.groups(axis)] for axis in mesh.axes}
        single = [dist.new_group([rank]) for rank in range(RANKS)][side.rank]
        local = {axis: next((pg for ranks, pg in made if side.rank in ranks), single) for axis, made in groups.items()}
        model.pg_collection = SimpleNamespace(**{axis: local.get(axis, single) for axis in ("tp", "dp", "pp")})
        for name, tensor in tensors.items():
            parameter: Any = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.tensor_model_parallel, parameter.partition_stride = True, 1
            parameter.partition_dim = next(d for d, axes in enumerate(shardings[name].cut or ()) if axes)
            model.register_parameter(name.replace(".", "_"), parameter)
        models.append(model)
    with _without_gpu():
        service = services.GlooCopyService()
        plan = resharding.build_local_reshard_plan(*models)

    def move() -> None:
        with _without_gpu():
            resharding.execute_reshard_plan(plan, *models, service=service)

    return move


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Streams that are none and memory that is not pinned, which Megatron's copies ask for on any machine."""
    import torch

    empty, stream = torch.empty, MagicMock()
    with (
        patch.multiple(torch.cuda, Stream=stream, current_stream=stream, synchronize=stream),
        patch("torch.cuda.stream", lambda _: nullcontext()),
        patch("torch.empty", lambda *size, pin_memory=False, **how: empty(*size, **how)),
    ):
        yield


METHODS: dict[str, tuple[Callable[[Side], Method], tuple[str, ...]]] = {
    "rankmesh": (ours, ("refit", "apart", "same")),
    "megatron": (megatron, ("refit", "apart")),
    "full_tensor": (full_tensor, ("refit", "apart", "same")),
    "redistribute": (redistribute, ("same",)),
    "checkpoint": (checkpoint, ("refit", "apart", "same")),
}


def _wire() -> int:
    """Bytes that the loopback has carried."""
    text = Path("/proc/self/net/dev").read_text(encoding="utf-8")
    return int(next(line for line in text.splitlines() if line.strip().startswith("lo:")).split(":")[1].split()[0])


def measured(case_name: str, rounds: int, hidden: int, layers: int) -> Callable[[int, Any], Mapping[str, Any]]:
    """What each rank does: each method once a round, in turn."""

    def body(rank: int, _store: Any) -> Mapping[str, Any]:
        import torch.distributed as dist

        side = Side(CASES[case_name], hidden, layers, rank)
        methods = {name: make(side) for name, (make, cases) in METHODS.items() if case_name in cases}
        found: dict[str, list[list[float]]] = {name: [] for name in methods}
        for number in range(rounds + 1):
            for name, method in methods.items():
                before = resident()
                dist.barrier()
                wire = _wire() if rank == 0 else 0
                dist.barrier()
                started = time.perf_counter()
                method()
                dist.barrier()
                seconds, grown = time.perf_counter() - started, highest() - before
                carried = _wire() - wire if rank == 0 else 0
                dist.barrier()
                side.check()
                if number:
                    found[name].append([seconds, carried, grown])
        moves = side.moves
        facts = {
            "bytes": moves.bytes,
            "lower_bound": moves.lower_bound,
            "whole": sum(s.bytes for s in side.source.values()),
        }
        return {"rank": rank, "found": found, **facts}

    return body


def run(case: str, rounds: int, hidden: int, layers: int) -> dict[str, Any]:
    """The figures of one case: medians with the lowest and the highest."""
    # Loaded once, before the ranks are forked: sixteen of them would load it at the same time.
    for name in LOADED:
        import_module(name)
    load = os.getloadavg()[0]
    outcome = run_world(RANKS, measured(case, rounds, hidden, layers), limit=280)
    if outcome.failure:
        raise SystemExit(f"{case}: {outcome.failure}")
    reports = sorted(outcome.reports, key=lambda report: report["rank"])
    methods = {}
    for name in reports[0]["found"]:
        runs = [report["found"][name] for report in reports]
        seconds = [max(local[i][0] for local in runs) for i in range(rounds)]
        memory = [max(local[i][2] for local in runs) for i in range(rounds)]
        wire = [runs[0][i][1] for i in range(rounds)]
        methods[name] = {"seconds": spread(seconds), "wire": spread(wire), "memory": spread(memory)}
    facts = {key: reports[0][key] for key in ("bytes", "lower_bound", "whole")}
    return {
        "title": CASES[case].title,
        "rounds": rounds,
        "load": [load, os.getloadavg()[0]],
        **facts,
        "methods": methods,
    }


def _megatron(peers: Path) -> Path:
    """Where the newest release of megatron-core is, whose planner is that of its head."""
    fetch = import_module("tests.peers.fetch")
    fetch.fetch("megatron-core", fetch.MEGATRON[-1], peers)
    return Path(fetch.folder("megatron-core", fetch.MEGATRON[-1], peers))


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description="Transfers against what others do, in one run.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default=",".join(CASES), help="cases to measure anew; the others stay as they are")
    parser.add_argument("--peers", type=Path, required=True, help="the folder of `python -m tests.peers.fetch`")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("transfers.json"))
    given = parser.parse_args()
    if "RANKMESH_BENCH_INSIDE" not in os.environ:
        _megatron(given.peers)
        inside = f"ip link set lo up && exec {sys.executable} -m bench.transfers " + " ".join(sys.argv[1:])
        environment = {**os.environ, "RANKMESH_BENCH_INSIDE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        raise SystemExit(subprocess.call(["unshare", "-n", "sh", "-c", inside], env=environment))  # noqa: S603, S607
    sys.path.insert(0, str(_megatron(given.peers)))
    import_module("tests.peers.stand_ins").triton()
    import torch

    known = json.loads(given.json.read_text(encoding="utf-8"))["cases"] if given.json.exists() else {}
    found = {case: run(case, given.rounds, given.hidden, given.layers) for case in given.only.split(",")}
    cases = {case: {**known, **found}[case] for case in CASES if case in {**known, **found}}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    versions = {"rankmesh": rm.__version__, "torch": torch.__version__, "megatron-core": version("megatron-core")}
    settings = {"hidden": given.hidden, "layers": given.layers, "budget": BUDGET, "ranks": RANKS}
    document = {"machine": machine, "versions": versions, "settings": settings, "cases": cases}
    record(given.json, document)


if __name__ == "__main__":
    main()
