"""Gloo: what a group costs by itself, without rankmesh, without a store on a network, and without Python between.

```
size   at once: all pairs when it is made     late: a device of its own, pairs when they first talk
       made, used                             made, used               processor time of one member, milliseconds
```

The members are threads of one process, so that what they wait for each other is nobody's time. It is what is left of a
connect when nothing is asked of the store: the floor under the figures of live groups.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from bench.gloo_text import RESULTS, gloo_section

__all__ = ["measured"]

_SIZES = (2, 4, 8, 16, 32)
_number = count()


def measured(rounds: int) -> dict[str, Any]:
    """By size and way: milliseconds of a member's processor time to make a group and to use it first, each round."""
    store = HashStore()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in _SIZES:
        shared = [_device(late=False) for _ in range(size)]
        ways: dict[str, list[tuple[float, float]]] = {"at once": [], "late": []}
        for _ in range(rounds):
            for way, rows in ways.items():
                rows.append(_made_and_used(store, shared if way == "at once" else None, size))
        found[str(size)] = ways
    return {"torch": torch.__version__, "load": os.getloadavg()[0], "idle": _idle(20), "sizes": found}


def _made_and_used(store: Any, shared: Sequence[Any] | None, size: int) -> tuple[float, float]:
    prefix = PrefixStore(str(next(_number)), store)
    groups: list[Any] = [None] * size

    def make(member: int) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
        options._devices = [shared[member] if shared else _device(late=True)]
        options._threads, options._timeout = 1, timedelta(seconds=30)
        groups[member] = ProcessGroupGloo(prefix, member, size, options)

    def use(member: int) -> None:
        one = torch.ones(1)
        groups[member].allreduce([one]).wait()

    return _spent(make, size), _spent(use, size)


def _spent(work: Callable[[int], None], size: int) -> float:
    started = time.process_time()
    members = [threading.Thread(target=work, args=(member,)) for member in range(size)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    return (time.process_time() - started) / size * 1e3


def _device(*, late: bool) -> Any:
    return ProcessGroupGloo.create_default_device(lazy_init=late)


def _idle(devices: int) -> float:
    """Milliseconds of processor time that one device takes in a second in which nobody talks."""
    kept = [_device(late=True) for _ in range(devices)]
    before, started = time.process_time(), time.monotonic()
    time.sleep(2)
    return (time.process_time() - before) / (time.monotonic() - started) / len(kept) * 1e3


def _main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gloo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    given.json.write_text(json.dumps(measured(given.rounds), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(gloo_section(given.json)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # closing the groups of so many threads takes longer than the measurement


if __name__ == "__main__":
    _main(sys.argv[1:])
