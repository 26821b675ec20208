"""Every recorded hang, as the doctor tells it and as torch's own ``fr_trace`` does."""

from __future__ import annotations

import gzip
import importlib
import json
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankmesh.debug.doctor import doctor
from rankmesh.readers.source import read

__all__ = ["rows"]

_TELLING = ("Culprit", "missing ranks", "error msg", "Error type", "not joining")


def rows(folder: Path) -> list[dict[str, Any]]:
    """For each hang: what it is, what the doctor says first, and what torch's reader says."""
    hangs = importlib.import_module("tests.hangs.programs").HANGS
    return [_row(name, hang, folder / name) for name, hang in sorted(hangs.items())]


def _row(name: str, hang: Any, place: Path) -> dict[str, Any]:
    found = doctor(place, read(hang.spec).plan if hang.spec else None)
    first = found.causes[0]
    ranks = sorted({rank for cause in found.causes if cause.cause == first.cause for rank in cause.ranks})
    result = f"{first.cause}: {_ranks(ranks)}, `{first.group}`, call {first.call}"
    return {"hang": name.replace("_", " "), "size": hang.size, "doctor": result, "fr_trace": fr_trace(place)}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def fr_trace(folder: Path) -> str:
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
    """The lines of torch's reader that say something; of an error only the last one."""
    lines = [re.sub(r"\s+", " ", line.strip())[:120] for line in text.splitlines()]
    if status:
        error = next((line for line in reversed(lines) if "Error: " in line), "")
        return f"ends with an error: {error.rpartition('Error: ')[2]}".replace("|", "/")
    kept = list(dict.fromkeys(line for line in lines if any(token in line for token in _TELLING)))[:2]
    return "; ".join(kept).rstrip("|").replace("|", "/") or "nothing"
