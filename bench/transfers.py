"""Transfers against what others do, in one world, in turn: bytes on the wire, seconds, peak memory.

```
make bench-transfers        as root: in a network namespace of its own, so that all bytes of its loopback are the
                            transfer's
python -m bench.transfers --limits      processor time beside what moves or copies as many bytes, without peers
```

Each case is 16 gloo ranks with one model; each round every method moves it once, and its result is checked. What is
planned or connected once (plans, groups, first messages) is done in a round before, which does not count.

Memory is measured as in `bench.memory`; the targets' pages are resident before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import rankmesh as rm
from bench.processes import run_world
from bench.report import load, machine, options, record
from bench.results import Sample, by_round, in_turn, ratios, spread, taken

RANKS = 16
LOADED = (
    "torch._dynamo",
    "megatron.core.resharding",
    "megatron.core.resharding.copy_services.gloo_copy_service",
    "rankmesh.transfer.live.run",
)
BUDGET = 16 << 20
Method = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A pair of layouts of one model; the source has stages, the target none."""

    title: str
    source: rm.Mesh
    target: rm.Mesh


CASES = {
    "refit": Case("TP4·PP2·DP2 on ranks 0–15 to TP2·DP4 on ranks 0–7", rm.Mesh(tp=4, dp=2, pp=2), rm.Mesh(tp=2, dp=4)),
    "apart": Case("TP4·PP2 on ranks 0–7 to TP2·DP4 on ranks 8–15", rm.Mesh(tp=4, pp=2), rm.Mesh(tp=2, dp=4, offset=8)),
}


def shardings(case: Case, hidden: int, layers: int) -> tuple[dict[str, rm.Sharding], dict[str, rm.Sharding]]:
    """Return a transformer's matrices on both sides."""
    source, target = {}, {}
    for layer in range(layers):
        at = {"pp": layer * case.source.axes["pp"] // layers}
        sizes = {
            "qkv": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "up": (4 * hidden, hidden),
            "down": (hidden, 4 * hidden),
        }
        for name, shape in sizes.items():
            dim = int(name in ("out", "down"))
            cut = tuple("tp" if d == dim else None for d in range(2))
            source[f"{layer}.{name}"] = rm.Sharding(case.source, cut, shape, at=at)
            target[f"{layer}.{name}"] = rm.Sharding(case.target, cut, shape)
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
        """Check that every target shard is what it should be."""
        import torch

        for name, tensor in self.into.items():
            if not torch.equal(tensor, self._cut(name, self.target[name])):
                raise AssertionError(f"{name} on rank {self.rank}")
            tensor.fill_(-1)


def ours(side: Side) -> Method:
    """Move with rankmesh, within its budget."""
    return lambda: side.moves.run(side.tensors, side.into, BUDGET)


def megatron(side: Side) -> Method:
    """Move with Megatron-Core's planner and its copies over gloo (megatron.core.resharding)."""
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
    """Replace streams and pinned memory, which Megatron's copies ask for on any machine."""
    import torch

    empty, stream = torch.empty, MagicMock()
    with (
        patch.multiple(torch.cuda, Stream=stream, current_stream=stream, synchronize=stream),
        patch("torch.cuda.stream", lambda _: nullcontext()),
        patch("torch.empty", lambda *size, pin_memory=False, **how: empty(*size, **how)),
    ):
        yield


METHODS: dict[str, Callable[[Side], Method]] = {"rankmesh": ours, "megatron": megatron}


def _wire() -> int:
    """Return the bytes that the loopback has carried."""
    text = Path("/proc/self/net/dev").read_text(encoding="utf-8")
    return int(next(line for line in text.splitlines() if line.strip().startswith("lo:")).split(":")[1].split()[0])


def measured(case: Case, rounds: int, hidden: int, layers: int) -> Callable[[int, Any], dict[str, Any]]:
    """Run each method once a round, in turn, on each rank."""

    def body(rank: int, _store: Any) -> dict[str, Any]:
        import torch.distributed as dist

        side = Side(case, hidden, layers, rank)

        def timed(method: Method) -> Callable[[int], Sample]:
            def sample(_: int) -> Sample:
                wire = _wire()
                dist.barrier()
                seconds = taken(lambda: (method(), dist.barrier()))["wall"]
                return {"seconds": seconds, "wire": _wire() - wire}

            return sample

        methods = {name: timed(make(side)) for name, make in METHODS.items()}
        return {"found": in_turn(methods, rounds, after=lambda *_: side.check(), memory=True)}

    return body


def run(name: str, rounds: int, hidden: int, layers: int) -> dict[str, Any]:
    """Measure one case: medians with the lowest and the highest."""
    # Loaded once, before the ranks are forked: sixteen of them would load it at the same time.
    for module in LOADED:
        import_module(module)
    case, begun = CASES[name], load()
    moves = rm.Transfer(*shardings(case, hidden, layers))
    reports = run_world(RANKS, measured(case, rounds, hidden, layers), limit=280).checked()
    methods = {
        method: {
            "seconds": spread(by_round(reports, method, "seconds")),
            "wire": spread(by_round(reports[:1], method, "wire")),
            "memory": spread(by_round(reports, method, "memory")),
        }
        for method in METHODS
    }
    return {
        "title": case.title,
        "rounds": rounds,
        "load": [begun, load()],
        "bytes": moves.bytes,
        "lower_bound": moves.lower_bound,
        "whole": sum(sharding.bytes for sharding in shardings(case, hidden, layers)[0].values()),
        "methods": methods,
    }


# -- limits -----------------------------------------------------------------------------------------------------------

LIMIT_RANKS, LIMIT_MEGABYTES = (4, 8, 16), (1, 64, 512)
# Bytes of a message, as rankmesh's longest.
MESSAGE = 4 << 20


def limit_shardings(kind: str, ranks: int, megabytes: int) -> tuple[dict[str, rm.Sharding], dict[str, rm.Sharding]]:
    """Return both sides of a transfer that moves, or copies, about so many bytes in all."""
    layers = 4
    if kind == "moves":
        case, whole = Case("", rm.Mesh(tp=ranks // 4, pp=2), rm.Mesh(tp=ranks // 2, offset=ranks // 2)), 1.0 * megabytes
    else:
        case, whole = Case("", rm.Mesh(tp=1, dp=ranks, pp=1), rm.Mesh(tp=2, dp=ranks // 2)), 2 * megabytes / ranks
    return shardings(case, max(64, int((whole * 1e6 / 48 / layers) ** 0.5) // 64 * 64), layers)


def beside_limit(kind: str, ranks: int, megabytes: int, rounds: int) -> Callable[[int, Any], dict[str, Any]]:
    """Run the transfer and its limit in turn: the processor time of each on one rank, its threads included."""

    def body(rank: int, _store: Any) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        source, target = limit_shardings(kind, ranks, megabytes)
        moves = rm.Transfer(source, target)
        numbers = {name: float(number) for number, name in enumerate(source, 1)}
        tensors = {name: torch.full(s.of(rank).shape, numbers[name]) for name, s in source.items() if s.holds(rank)}
        into = {name: torch.zeros(s.of(rank).shape) for name, s in target.items() if s.holds(rank)}
        part = moves.of(rank)
        ends = [(m.source, False, m.bytes) for m in part.receives] + [(m.target, True, m.bytes) for m in part.sends]
        sizes = {end: sum(size for *other, size in ends if tuple(other) == end) for end in {end[:2] for end in ends}}
        buffers = {end: torch.ones(size, dtype=torch.uint8).split(MESSAGE) for end, size in sizes.items()}
        here, there = (torch.ones(part.bytes_copied, dtype=torch.uint8) for _ in range(2))

        def limit() -> None:
            calls = [
                dist.isend(one, peer) if sending else dist.irecv(one, peer)
                for (peer, sending), messages in sorted(buffers.items(), key=lambda item: item[0][1])
                for one in messages
            ]
            there.copy_(here)
            for call in calls:
                call.wait()  # type: ignore[union-attr]  # not None: this rank is in the group

        methods: dict[str, Callable[[int], Sample]] = {
            "rankmesh": lambda _: taken(lambda: moves.run(tensors, into, 4 * BUDGET)),
            "limit": lambda _: taken(limit),
        }
        found = in_turn(methods, rounds)
        if not all((into[name] == numbers[name]).all() for name in into):
            raise AssertionError(f"rank {rank} has other numbers")
        return {"bytes": part.bytes_in + part.bytes_copied, "found": found}

    return body


def limits(rounds: int) -> dict[str, Any]:
    """Measure the processor time of all ranks beside the limit, at all numbers of ranks and sizes."""
    import_module("rankmesh.transfer.live.run")
    rows = []
    for kind, ranks, megabytes in product(("moves", "stays"), LIMIT_RANKS, LIMIT_MEGABYTES):
        reports = run_world(ranks, beside_limit(kind, ranks, megabytes, rounds), limit=280).checked()
        ours, least = (by_round(reports, name, "processor", sum) for name in ("rankmesh", "limit"))
        row = {"kind": kind, "ranks": ranks, "bytes": sum(report["bytes"] for report in reports)}
        rows.append(row | {"ratio": ratios(ours, least), "rankmesh": spread(ours), "limit": spread(least)})
    return {"limits": rows, "limits_load": load()}


def _megatron(peers: Path) -> Path:
    """Return the folder of the newest megatron-core, with the planner of its head."""
    fetch = import_module("tests.peers.fetch")
    fetch.fetch("megatron-core", fetch.MEGATRON[-1], peers)
    return Path(fetch.folder("megatron-core", fetch.MEGATRON[-1], peers))


def main() -> None:
    """Measure, and write the figures."""
    parser = options("transfers", __doc__, rounds=5)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default=",".join(CASES), help="cases to measure anew; the others stay as they are")
    parser.add_argument("--peers", type=Path, help="the folder of `python -m tests.peers.fetch`")
    parser.add_argument("--limits", action="store_true", help="measure processor time beside the limits alone")
    given = parser.parse_args()
    before = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    if given.limits:
        record(given.json, before | limits(given.rounds))
        return
    if "RANKMESH_BENCH_INSIDE" not in os.environ:
        _megatron(given.peers)
        inside = f"ip link set lo up && exec {sys.executable} -m bench.transfers " + " ".join(sys.argv[1:])
        environment = {**os.environ, "RANKMESH_BENCH_INSIDE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        raise SystemExit(subprocess.call(["unshare", "-n", "sh", "-c", inside], env=environment))  # noqa: S603, S607
    sys.path.insert(0, str(_megatron(given.peers)))
    import_module("tests.peers.stand_ins").triton()
    known = before.get("cases", {})
    found = known | {case: run(case, given.rounds, given.hidden, given.layers) for case in given.only.split(",")}
    versions = {name: version(name) for name in ("rankmesh", "torch", "megatron-core")}
    settings = {"hidden": given.hidden, "layers": given.layers, "budget": BUDGET, "ranks": RANKS}
    document = {"machine": machine(), "versions": versions, "settings": settings}
    document |= {"cases": {case: found[case] for case in CASES if case in found}}
    record(given.json, {"limits": [], "limits_load": 0.0} | before | document)


if __name__ == "__main__":
    main()
