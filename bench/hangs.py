"""The doctor measured: how long it reads a large job, who names what beside torch's ``fr_trace``, what recording costs.

``python -m bench.hangs scale [RANKS] [CALLS]``   time, processor time and memory for one recording of each rank
``python -m bench.hangs table FOLDER``            every recorded hang: what the doctor says, and what ``fr_trace`` says
``python -m bench.hangs step [ROUNDS]``           a step of two ranks with and without recorder and watch, alternating
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import pickle
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rankmesh.doctor import doctor
from rankmesh.readers.source import read

RANKS, CALLS, WIDTH = 8192, 2000, 8


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# -- a large job ---------------------------------------------------------------------------------------------------


def _entry(number: int, group: tuple[str, str], done: bool, record: int) -> dict[str, Any]:
    return {
        "record_id": record,
        "pg_id": 1,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1795315552476996176 + record * 1000,
        "input_sizes": [[4, 2048]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2048]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": 1795315552476996176 + record * 1000,
        "time_discovered_completed_ns": 1795315552476996176 + record * 1000,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
        "thread_id": "139848781085568",
        "thread_name": "python",
    }


def _write(folder: Path, ranks: int, calls: int, form: str) -> None:
    """One file a rank: half of its calls along tp, half along dp; the last rank is one call short along dp."""
    for column in range(WIDTH):
        for row in range(ranks // WIDTH):
            rank = row * WIDTH + column
            groups = {
                f"tp/0/{row}": (f"tp@dp{row}", range(row * WIDTH, (row + 1) * WIDTH)),
                f"dp/0/{column}": (f"dp@tp{column}", range(column, ranks, WIDTH)),
            }
            late = rank == ranks - 1
            entries = [
                _entry(place // 2 + 1, (name, groups[name][0]), place < calls - 1 or column < WIDTH - 1, place)
                for place in range(calls - late)
                for name in [list(groups)[place % 2]]
            ]
            config = {n: {"name": n, "desc": d, "ranks": str(list(members))} for n, (d, members) in groups.items()}
            data = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
            (folder / f"nccl_trace_rank_{rank}").write_bytes(_FORMS[form](data))


_FORMS = {
    "json": lambda data: json.dumps(data).encode(),
    "gzip": lambda data: gzip.compress(json.dumps(data).encode(), 1),
    "pickle": lambda data: pickle.dumps(data, protocol=2),
}


def scale(ranks: int = RANKS, calls: int = CALLS, form: str = "gzip") -> None:
    """Read the recordings of one large job."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        _write(Path(folder), ranks, calls, form)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        command = "import sys; from rankmesh.doctor import doctor; print(doctor(sys.argv[1]).verdict)"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", command, folder], stdout=subprocess.PIPE, text=True)  # noqa: S603
        peak = _peak(process)
        verdict = process.communicate()[0].strip()
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        size >>= 20
        _say(f"{ranks} x {calls} {form}, {size} MiB: {wall:.1f} s, {cpu:.1f} s of processor, {peak} MiB")
        _say(verdict[:200])


def _peak(process: subprocess.Popen[str]) -> int:
    """The most memory of the process and its readers together, in MiB."""
    most = 0
    while process.poll() is None:
        family = [process.pid, *_children(process.pid)]
        most = max(most, sum(map(_resident, family)))
        time.sleep(0.1)
    return most >> 10


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


# -- beside fr_trace -----------------------------------------------------------------------------------------------


def table(folder: str) -> str:
    """What the doctor and torch's reader say of each recorded hang, as Markdown."""
    hangs = importlib.import_module("tests.hangs.programs").HANGS
    lines = ["| hang | doctor | `fr_trace` |", "| --- | --- | --- |"]
    for name, hang in sorted(hangs.items()):
        place = Path(folder) / name
        if place.is_dir():
            found = doctor(place, read(hang.spec).plan if hang.spec else None)
            first = found.causes[0] if found.causes else None
            said = f"{first.cause}: {_ranks(first.ranks)}, `{first.group}`, call {first.call}" if first else "nothing"
            lines.append(f"| {name.replace('_', ' ')} | {said} | {fr_trace(place, hang.size)} |")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def fr_trace(folder: Path, size: int) -> str:
    """What torch's reader says of the same recordings, as the pickles that it takes, members filled in for it."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as other:
        for file in folder.glob("rank*.json.gz"):
            data = json.loads(gzip.decompress(file.read_bytes()))
            if data["entries"]:
                (Path(other) / f"trace_{data['rankmesh']['rank']}").write_bytes(pickle.dumps(_for_torch(data)))
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", other, "-p", "trace_"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603
    return _summary(done.stdout + done.stderr, done.returncode)


def _for_torch(data: dict[str, Any]) -> dict[str, Any]:
    config = {
        name: {**about, "ranks": str(list(about["ranks"]))}
        for name, about in data["pg_config"].items()
        if isinstance(about["ranks"], list)
    }
    stacks = data.get("stacks", [])
    entries = [
        {
            **entry,
            "frames": stacks[entry["frames"]] if "frames" in entry else [],
            "process_group": tuple(entry["process_group"]),
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "state": "completed" if entry["retired"] else entry["state"],
        }
        for entry in data["entries"]
    ]
    return {**data, "pg_config": config, "entries": entries}


def _summary(text: str, status: int) -> str:
    """The lines of torch's reader that say something."""
    telling = (
        "Culprit",
        "missing ranks",
        "error msg",
        "Error type",
        "not joining",
        "AssertionError",
        "ValueError",
        "KeyError",
    )
    lines = [line.strip() for line in text.splitlines() if any(word in line for word in telling)]
    kept = list(dict.fromkeys(re.sub(r"\s+", " ", line)[:120] for line in lines))[:2]
    return "; ".join(kept).replace("|", "/") or ("ends with an error" if status else "nothing")


# -- what recording costs ------------------------------------------------------------------------------------------

_STEP = """
import os, sys, time, statistics
record = sys.argv[1] == "on"
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000" if record else "0"
import torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=120))
if record:
    from rankmesh import watch
    here = watch.start(sys.argv[4])
weight, grad = torch.randn(512, 512), torch.randn(256, 512)
def step():
    out = grad
    for _ in range(8):
        out = torch.relu(out @ weight) * 0.01
        dist.all_reduce(out)
for _ in range(20):
    step()
times = []
for _ in range(int(sys.argv[5])):
    started = time.perf_counter()
    step()
    times.append(time.perf_counter() - started)
if rank == 0:
    print(statistics.median(times))
if record:
    here.close()
"""


def _step(record: str, steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        rest = (f"{folder}/store", f"{folder}/recordings", str(steps))
        ranks = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, "-W", "ignore", "-c", _STEP, record, str(rank), *rest],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return float(said[0])


def step(rounds: int = 5, steps: int = 300) -> None:
    """The median step of two ranks, without and with recorder and watch, in turn."""
    ratios = []
    for number in range(rounds):
        first, second = ("off", "on") if number % 2 == 0 else ("on", "off")
        times = {first: _step(first, steps), second: _step(second, steps)}
        ratios.append(times["on"] / times["off"])
        _say(f"off {times['off'] * 1e3:.3f} ms  on {times['on'] * 1e3:.3f} ms  ratio {ratios[-1]:.4f}")
    _say(f"median ratio {statistics.median(ratios):.4f}")


def main() -> None:
    """Run one of the three."""
    what, *rest = sys.argv[1:]
    if what == "scale":
        ranks, calls, form = [*rest, *(str(RANKS), str(CALLS), "gzip")[len(rest) :]]
        scale(int(ranks), int(calls), form)
    elif what == "table":
        _say(table(rest[0]))
    else:
        step(*map(int, rest))


if __name__ == "__main__":
    main()
