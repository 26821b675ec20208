"""The doctor and the watch measured; what is found goes into ``bench/hangs.json``, and from there into the page.

```
python -m bench.hangs scale FORM [FOLDER]     reading a recording of each of 8,192 ranks: pickle, json, gzip
python -m bench.hangs switch                  what RANKMESH=watch costs a training step, in turn
python -m bench.hangs step                    what a watch costs while a program sleeps, and the recorder a call
python -m bench.hangs request [RANKS]         what the rank that diagnoses spends on a request of 16,384 ranks
```
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.recordings import documents, write
from bench.report import load, machine, record
from bench.watched import recorded, switched

RESULTS = Path(__file__).with_name("hangs.json")
RANKS, CALLS = 8192, 2000


def scale(form: str, kept: str | None = None, ranks: int = RANKS, calls: int = CALLS) -> dict[str, Any]:
    """Time one process that reads a folder, from start to end, with the most memory of it and its readers.

    The files are written before, into ``kept`` if it is given and empty; else they do not stay.
    """
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as other:
        folder = kept or other
        if not any(Path(folder).iterdir()):
            write(Path(folder), ranks, calls, form)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        begun, before = load(), _processor(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        command = [sys.executable, "-m", "rankmesh", "doctor", folder, "--json"]
        with tempfile.TemporaryFile() as answer:
            process = subprocess.Popen(command, stdout=answer)  # noqa: S603
            peak = _peak(process)
            answer.seek(0)
            found = json.load(answer)
        seconds = time.perf_counter() - started
        processor = _processor(resource.RUSAGE_CHILDREN) - before
    if [cause["ranks"] for cause in found["causes"]] != [[ranks - 1]] or len(found["recordings"]) != ranks:
        raise RuntimeError(f"the doctor names another rank, or has not read them all: {found['verdict']}")
    result = {"size": size, "seconds": seconds, "processor": processor, "memory": peak, "load": begun}
    sys.stderr.write(f"{ranks} x {calls} {form}: {result}\n")
    return result


def request(ranks: str = "16384") -> dict[str, Any]:
    """Read the recordings of all ranks from a store, as a watch does, and diagnose them."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

    from rankmesh.debug.doctor import diagnose
    from rankmesh.debug.watch.recordings import Recordings
    from rankmesh.debug.watch.requests import Pace
    from rankmesh.rendezvous import BoundedChannel, StoreChannel

    size, pace = int(ranks), Pace(300, int(ranks))
    recordings = Recordings("bench", None, BoundedChannel(StoreChannel(HashStore(), "bench")))
    for rank, document in documents(size, pace.calls):
        recordings.put(rank, 0, document, share=pace.calls)
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [*map(_processor, both)]
    started = time.perf_counter()
    found = diagnose(recordings.read_all(range(size), 0))
    seconds = time.perf_counter() - started
    processor = [_processor(who) - spent for who, spent in zip(both, before, strict=True)]
    if found.at_fault != (size - 1,):
        raise RuntimeError(f"another rank is named: {found.verdict}")
    result = {"ranks": size, "calls": pace.calls, "seconds": seconds, "processor": processor, "load": load()}
    sys.stderr.write(f"{result}\n")
    return result


def _processor(who: int) -> float:
    """Return the processor time of this process or of its children until now, in seconds."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _peak(process: subprocess.Popen[bytes]) -> int:
    """Return the most memory of the process and its readers, in bytes: resident pages, shared ones counted twice."""
    most = 0
    while process.poll() is None:
        most = max(most, _resident(process.pid))
        time.sleep(0.05)
    return most


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children, of those that have not ended."""
    try:
        children = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        pids = [int(child) for each in children for child in each.read_text().split()]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize() + sum(map(_resident, pids))


def main() -> None:
    """Measure one of them, keep it, and write the page."""
    what, *rest = sys.argv[1:]
    measures: dict[str, Callable[..., Any]] = {"scale": scale, "switch": switched, "step": recorded, "request": request}
    if what not in measures:
        sys.exit(__doc__)
    found = measures[what](*rest)
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    if what == "scale":
        results[what] |= {"ranks": RANKS, "calls": CALLS}
        results[what]["forms"][rest[0]] = found
    else:
        results[what] = found
    record(RESULTS, results | {"machine": machine()})


if __name__ == "__main__":
    main()
