"""Sync against a plain copy, a raw socket, and what others do, in one world, in turn; and the plan of a large model.

```
python -m bench.sync
python -m bench.sync --limits      processor time beside the socket's at other sizes, and nothing else
```

Two trainer ranks (FSDP: rows) and two engine ranks (tensor parallel), with the shapes of Llama 3 8B at a tenth of the
width. Each round every method brings a version once, and its result is checked; a first round does not count. A rate is
taken in one round: a method's to the plain copy's, or to the raw socket's, with as many bytes. Socket and
gloo are measured again at other sizes, and between two emulated hosts, over a link of 10 Gbit/s (as root).
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

import rankmesh as rm
from bench.emulated import emulated, require
from bench.processes import run_world
from bench.report import load, machine, options, record
from bench.results import Sample, by_round, in_turn, ratios, spread, taken
from rankmesh.transfer.sync.layouts import Layouts

FOLDER = Path("/dev/shm/rankmesh-bench-sync")  # noqa: S108  - shared memory is what is measured
TRAINER, ENGINE = rm.Mesh(dp=2), rm.Mesh(tp=2, offset=2)
# Brings a version; returns the seconds that this rank took.
Move = Callable[[int], float]


def llama(width: int = 10, words: int = 128256) -> tuple[dict[str, rm.Sharding], dict[str, rm.Sharding]]:
    """Return both layouts of Llama 3 8B at 1/``width`` of its width, with its layers and a vocabulary of ``words``."""
    hidden, ffn, kv = (max(1, round(n / width / 16)) * 16 for n in (4096, 14336, 1024))
    shapes: dict[str, tuple[tuple[int, int], tuple[str | None, str | None]]]
    shapes = {"embedding": ((words, hidden), ("tp", None)), "head": ((words, hidden), ("tp", None))}
    for layer in range(32):
        for name, shape, cut in (
            ("q", (hidden, hidden), ("tp", None)),
            ("k", (kv, hidden), ("tp", None)),
            ("v", (kv, hidden), ("tp", None)),
            ("o", (hidden, hidden), (None, "tp")),
            ("gate", (ffn, hidden), ("tp", None)),
            ("up", (ffn, hidden), ("tp", None)),
            ("down", (hidden, ffn), (None, "tp")),
        ):
            shapes[f"{layer}.{name}"] = shape, cut
    source = {n: rm.Sharding(TRAINER, ("dp", None), shape, "bfloat16") for n, (shape, _) in shapes.items()}
    return source, {n: rm.Sharding(ENGINE, cut, shape, "bfloat16") for n, (shape, cut) in shapes.items()}


def kimi() -> tuple[dict[str, rm.Sharding], dict[str, rm.Sharding]]:
    """Return Kimi-K2's shardings, one tensor for a layer's stack of expert matrices, for 1,024 and 512 ranks."""
    trainer = rm.Mesh(tp=8, dp=16, pp=8).with_view("expert", ep=64, edp=2, pp=8, shared=("pp",))
    engine = rm.Mesh(tp=8, dp=64).with_view("expert", ep=128, edp=4)
    source, target = {}, {}
    for layer in range(61):
        at = {"pp": layer * 8 // 61}
        dense: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
            "q_a": ((1536, 7168), (None, None)),
            "q_b": ((64 * 192, 1536), ("tp", None)),
            "kv_a": ((576, 7168), (None, None)),
            "kv_b": ((64 * 256, 512), ("tp", None)),
            "o": ((7168, 64 * 128), (None, "tp")),
        }
        ffn = 18432 if layer == 0 else 2048
        dense |= {"gate": ((ffn, 7168), ("tp", None)), "up": ((ffn, 7168), ("tp", None))}
        dense |= {"down": ((7168, ffn), (None, "tp"))}
        for name, (shape, cut) in dense.items():
            source[f"{layer}.{name}"] = rm.Sharding(trainer, cut, shape, "bfloat16", at)
            target[f"{layer}.{name}"] = rm.Sharding(engine, cut, shape, "bfloat16")
        for expert, shape in (("gate_up", (4096, 7168)), ("down", (7168, 2048))) if layer else ():
            cut = ("ep", None, None)
            whole = (384, *shape)
            source[f"{layer}.experts.{expert}"] = rm.Sharding(trainer, cut, whole, "bfloat16", at, view="expert")
            target[f"{layer}.experts.{expert}"] = rm.Sharding(engine, cut, whole, "bfloat16", view="expert")
    for name, at in (("embedding", {"pp": 0}), ("head", {"pp": 7})):
        source[name] = rm.Sharding(trainer, ("tp", None), (163840, 7168), "bfloat16", at)
        target[name] = rm.Sharding(engine, ("tp", None), (163840, 7168), "bfloat16")
    return source, target


def planned() -> dict[str, Any]:
    """Time the plan of the large model: all of it, and then the part of one rank."""
    layouts = kimi()
    found: dict[str, Any] = {"parameters": sum(s.bytes // s.itemsize for s in layouts[0].values())}
    for name in ("direct", "stored"):
        started = time.perf_counter()
        moves = getattr(Layouts(*layouts), name)
        found[name] = {"bytes": moves.bytes, "bound": moves.lower_bound, "digest": moves.digest[:12]}
        planned = time.perf_counter()
        moves.of(1024)
        found[name] |= {"all": planned - started, "one": time.perf_counter() - planned}
    return found


class Side:
    """One rank's part: its shards, and what a version must be."""

    def __init__(self, rank: int, store: Any, address: str = "127.0.0.1", sizes: Sequence[int] = ()) -> None:
        self.rank, self.store, self.address, self.trains = rank, store, address, rank < 2
        self.layouts = llama(*sizes)
        self.moves = rm.Transfer(*self.layouts)
        mine = self.layouts[0 if self.trains else 1]
        self.tensors = {n: torch.zeros(s.of(rank).shape, dtype=torch.bfloat16) for n, s in mine.items()}
        self.copy = {n: t.clone() for n, t in self.tensors.items()}

    def cut(self, name: str, version: int) -> Any:
        """Return this rank's shard of a version."""
        (box,) = self.layouts[0 if self.trains else 1][name].of(self.rank).boxes
        rows, columns = (torch.arange(start, stop, dtype=torch.int32) for start, stop in box)
        return ((rows[:, None] * 31 + columns[None, :] + version) % 127).to(torch.bfloat16)

    def fill(self, version: int) -> None:
        """Fill a trainer's tensors with a version, an engine's with -1."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.cut(name, version)) if self.trains else tensor.fill_(-1)

    def check(self, version: int) -> None:
        """Check that an engine has a version."""
        for name, tensor in self.tensors.items():
            if not self.trains and not torch.equal(tensor, self.cut(name, version)):
                raise AssertionError(f"{name} on rank {self.rank}")


def clocked(call: Callable[[], object]) -> Move:
    """Return a method that takes the seconds of a call."""
    return lambda _: taken(call)["wall"]


def plain_copy(side: Side) -> Move:
    """Copy all tensors of this rank, in memory that is there."""
    return clocked(lambda: [side.copy[name].copy_(tensor) for name, tensor in side.tensors.items()])


def pair_sizes(side: Side) -> dict[tuple[int, int], int]:
    """Return how many bytes go from each trainer rank to each engine rank."""
    pairs = [(source, target) for source in (0, 1) for target in (2, 3)]
    return {pair: sum(m.bytes for m in side.moves.of(pair[1]).receives if m.source == pair[0]) for pair in pairs}


def plain_gloo(side: Side) -> Move:
    """Send as many bytes between these ranks in one message of gloo for each pair, from and into one buffer."""
    sizes = {pair: size for pair, size in pair_sizes(side).items() if side.rank in pair}
    buffers = {pair: torch.ones(size, dtype=torch.uint8) for pair, size in sizes.items()}

    def move() -> None:
        calls = [
            dist.isend(buffer, target) if side.trains else dist.irecv(buffer, source)
            for (source, target), buffer in buffers.items()
        ]
        for call in calls:
            call.wait()  # type: ignore[union-attr]  # not None: this rank is in the group

    return clocked(move)


def raw_socket(side: Side) -> Move:
    """Send as many bytes between these ranks over TCP, a thread for each pair, from and into one buffer."""
    sizes = pair_sizes(side)
    connections = {}
    if not side.trains:
        listening = socket.create_server((side.address, 0))
        side.store.set(f"address/{side.rank}", json.dumps(listening.getsockname()))
        for _ in (0, 1):
            one = listening.accept()[0]
            connections[one.recv(1)[0], side.rank] = one
    else:
        for target in (2, 3):
            one = socket.create_connection(tuple(json.loads(side.store.get(f"address/{target}"))))
            one.sendall(bytes([side.rank]))
            connections[side.rank, target] = one
    # Written once: of memory that never was, the kernel sends one page of zeros again and again, from its cache.
    buffers = {pair: bytearray(b".") * sizes[pair] for pair in connections}

    def transfer(pair: tuple[int, int]) -> None:
        view = memoryview(buffers[pair])
        if side.trains:
            connections[pair].sendall(view)
            connections[pair].recv(1)
            return
        while view:
            view = view[connections[pair].recv_into(view, len(view)) :]
        connections[pair].sendall(b".")

    def move() -> None:
        with ThreadPoolExecutor(len(connections)) as threads:
            list(threads.map(transfer, connections))

    return clocked(move)


def synced(side: Side, folder: Path | None) -> Move:
    """Publish and receive with rankmesh.Sync; over files one after the other, over gloo at once."""
    at: Any = folder or PrefixStore("copy", side.store)
    sync = rm.Sync(*side.layouts, side.tensors, at=at, budget=64 << 20, timeout=60)

    def move(version: int) -> float:
        started = time.perf_counter()
        if side.trains:
            sync.publish(version)
        seconds = time.perf_counter() - started
        if folder:
            dist.barrier()
            started = time.perf_counter()
        if not side.trains:
            sync.receive()
            seconds = time.perf_counter() - started
            side.tensors = dict(sync.tensors)
        return seconds

    return move


METHODS: dict[str, Callable[[Side], Move]] = {
    "copy": plain_copy,
    "files": lambda side: synced(side, FOLDER),
    "socket": raw_socket,
    "gloo_plain": plain_gloo,
    "gloo": lambda side: synced(side, None),
}


LINK = 10_000
LINKED = ("socket", "gloo_plain", "gloo")
# Parts of the width and vocabularies with which a version has about 1, 64, 356 and 480 MB.
SIZES = ((256, 12_800), (32, 96_000), (10, 128_256), (8, 128_256))


def measured(side: Side, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Run each method once a round, in turn, on this rank."""

    def timed(move: Move) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            used = time.process_time()
            return {"seconds": move(number + 1), "processor": time.process_time() - used}

        return sample

    def fill(name: str, number: int) -> None:
        if name == names[0] or not side.trains:
            side.fill(number)

    def check(name: str, number: int) -> None:
        if name in ("files", "gloo"):
            side.check(number)

    methods = {name: timed(METHODS[name](side)) for name in names}
    found = in_turn(methods, rounds, before=fill, after=check, memory=True)
    return {"found": found, "bytes_in": side.moves.bytes_in(side.rank)}


def over_link(addresses: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure on a rank of an emulated cluster: the trainer is on the first of two hosts, the engine on the other."""
    rank, limit = dist.get_rank(), timedelta(seconds=60)
    store = TCPStore(addresses[0], 29900, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    return measured(Side(rank, store, addresses[rank // 2]), LINKED, rounds)


def linked(rounds: int) -> dict[str, Any]:
    """Measure over a link that is the limit, as it is between hosts."""
    require()
    with emulated([["host0", "host1"]], ranks=2, link=LINK, trunk=None, burst=1024) as there:
        reports = there.on_ranks(over_link, [there.address(host) for host in there.hosts], rounds)
    seconds = {name: by_round(reports, name, "seconds") for name in LINKED}
    medians = {name: spread(values) for name, values in seconds.items()}
    return {"link": LINK, "rounds": rounds, "seconds": medians, "to_socket": _to_socket(seconds)}


def run(rounds: int) -> dict[str, Any]:
    """Measure the seconds of each method in each round by rank, and the rates."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    begun = load()
    outcome = run_world(4, lambda rank, store: measured(Side(rank, store), list(METHODS), rounds), limit=280)
    shutil.rmtree(FOLDER, ignore_errors=True)
    reports = outcome.checked()
    trainer, engine = (
        {name: by_round(part, name, "seconds") for name in METHODS} for part in (reports[:2], reports[2:])
    )
    seconds = {}
    for name in METHODS:
        both_sides = zip(trainer[name], engine[name], strict=True)
        seconds[name] = [a + b if name in ("files", "copy") else max(a, b) for a, b in both_sides]
    return {
        "rounds": rounds,
        "load": [begun, load()],
        "bytes": sum(one["bytes_in"] for one in reports),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "rates": {
            "publish to files / copy": ratios(trainer["copy"], trainer["files"]),
            "receive from files / copy": ratios(engine["copy"], engine["files"]),
        },
        "to_socket": _to_socket(seconds),
        "memory": {name: max(by_round(reports, name, "memory")) for name in METHODS},
    }


def limits(rounds: int) -> dict[str, Any]:
    """Measure the processor time of all ranks beside the socket's, at all sizes."""
    rows = []
    for sizes in SIZES:
        side = partial(Side, sizes=sizes)
        outcome = run_world(4, lambda rank, store: measured(side(rank, store), LINKED, rounds), limit=280)  # noqa: B023
        reports = outcome.checked()
        used = {name: by_round(reports, name, "processor", sum) for name in LINKED}
        processor = {name: spread(values) for name, values in used.items()}
        size = sum(one["bytes_in"] for one in reports)
        rows.append({"bytes": size, "processor": processor, "to_socket": _to_socket(used)})
    return {"limits": rows, "limits_load": load()}


def _to_socket(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the rates over gloo, its own and ours, to the raw socket's, by method."""
    return {name: ratios(seconds["socket"], seconds[name]) for name in LINKED[1:]}


def main() -> None:
    """Measure, and write the figures."""
    parser = options("sync", __doc__, rounds=7)
    parser.add_argument("--limits", action="store_true", help="measure processor time beside the socket's alone")
    given = parser.parse_args()
    if given.limits:
        found = json.loads(given.json.read_text(encoding="utf-8"))
    else:
        found = {"machine": machine(), "llama": run(given.rounds)}
        found |= {"linked": linked(given.rounds), "kimi": planned()}
    record(given.json, found | limits(given.rounds))


if __name__ == "__main__":
    main()
