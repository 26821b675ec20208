"""What a lost rank costs a job of rm.survive.

```
death of a rank ──notice──free──agree──connect──build──transfer──step──> the end of the first step after it
```

Each phase ends when the last member has come to its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.processes import free_port

__all__ = ["PHASES", "environment", "measured_losses"]

RANKS = 16
PHASES = {
    "notice": "noticed",
    "free": "freed",
    "agree": "agreed",
    "connect": "connected",
    "build": "built",
    "transfer": "transferred",
    "step": "stepped",
}
# Members of different places: on both stages, the one that serves the store, a spare that took over.
DEATHS = ((3, 2), (0, 4), (14, 6), (7, 8))
STOPPED = (9, 10)
STEPS = 12
_ROOT = Path(__file__).parents[1]
# Where no name server answers, each look-up of a name would take as long as the loss.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


def measured_losses(rounds: int, *, limit: float = 240.0) -> list[dict[str, Any]]:
    """Return what was lost at each death of each round."""
    return [loss for _ in range(rounds) for loss in _survived(limit)]


def _survived(limit: float) -> list[dict[str, Any]]:
    deaths = [_death(member, step) for member, step in DEATHS] + [_death(*STOPPED, "SIGSTOP")]
    size = RANKS + len(deaths)
    with _folder(deaths, steps=STEPS, spares=len(deaths)) as folder:
        _run(folder, size, limit)
        return _losses(folder)


def _death(member: int, step: int, how: str = "SIGKILL") -> dict[str, Any]:
    return {"member": member, "step": step, "how": how}


@contextmanager
def _folder(deaths: Sequence[Mapping[str, Any]], **given: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rankmesh-lost-") as name:
        folder = Path(name)
        (folder / "deaths.json").write_text(json.dumps(deaths), encoding="utf-8")
        (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
        yield folder


def environment() -> dict[str, str]:
    """Return the variables of a measured process, one thread each."""
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR", **RESOLVER}


def _run(folder: Path, size: int, limit: float) -> None:
    """Start one process for each rank, as a launcher does that leaves the others alone; wait for those that live."""
    from rankmesh.launch.table import torchrun_variables

    port, running = free_port(), []
    for rank in range(size):
        variables = torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port)
        with (folder / f"output-{rank}").open("w") as output:
            command = [sys.executable, "-m", "bench.lost_rank", str(folder)]
            given = {**environment(), **variables}
            running.append(subprocess.Popen(command, env=given, stdout=output, stderr=output, cwd=_ROOT))  # noqa: S603
    end = time.monotonic() + limit
    stopped = sum(1 for death in json.loads((folder / "deaths.json").read_text()) if death["how"] == "SIGSTOP")
    try:
        while sum(one.poll() is None for one in running) > stopped and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
            one.wait()


def _losses(folder: Path) -> list[dict[str, Any]]:
    """Of each death: how it was, the seconds until the last rank had done the step, by phase; the steps done again."""
    lines = [json.loads(line) for path in folder.glob("log-*.jsonl") for line in path.read_text().splitlines()]
    deaths = sorted((line for line in lines if line["what"] == "death"), key=lambda line: line["time"])
    if not deaths:
        raise RuntimeError(f"nobody came to the step in which to die: {_output(folder)}")
    found = []
    for number, death in enumerate(deaths):
        until = deaths[number + 1]["time"] if number + 1 < len(deaths) else float("inf")
        after = [line for line in lines if death["time"] < line["time"] < until]
        # The first time that each member came to each mark.
        marks = {what: _last(after, what, death) for what in PHASES.values()}
        if marks["stepped"] is None:
            raise RuntimeError(f"no step was done after {death}: {_output(folder)}")
        times = [death["time"], *(marks[what] or death["time"] for what in PHASES.values())]
        phases = {
            name: times[index + 1] - times[index]
            for index, name in enumerate(PHASES)
            if marks[PHASES[name]] is not None and (index == 0 or marks[list(PHASES.values())[index - 1]] is not None)
        }
        epoch = max(line.get("epoch", 0) for line in lines if line["time"] <= death["time"])
        done = [line for line in after if line["what"] == "stepped" and line["epoch"] > epoch]
        again = {line["step"] for line in done if line["step"] < death["step"]}
        found.append(
            {
                "how": death["how"],
                "seconds": (marks["stepped"] or 0) - death["time"],
                "phases": phases,
                "steps": len(again) + 1,
            }
        )
    return found


def _last(lines: Sequence[Mapping[str, Any]], what: str, death: Mapping[str, Any]) -> float | None:
    """When the last member came to a mark, which each does once after a death; to the end of the step of it."""
    first: dict[int, float] = {}
    for line in lines:
        if line["what"] == what and (what != "stepped" or line["step"] == death["step"]):
            first[line["member"]] = min(first.get(line["member"], float("inf")), line["time"])
    return max(first.values(), default=None)


def _output(folder: Path) -> str:
    texts = (path.read_text(errors="replace")[-300:] for path in sorted(folder.glob("output-*")))
    return " | ".join(text for text in texts if text)[-1500:]
