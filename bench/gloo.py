"""Gloo: what the groups of a contest cost by gloo alone, beside rankmesh and the peer.

```
gloo alone    each group of the plan once, made by ProcessGroupGloo's own constructor in one order; no agreement,
              no names, no registries of torch.distributed, one address and one question a member in the world's store
rankmesh      from the sizes to groups that have all been used once, and what of it is its own: plan, agreement, making
peer          the same kinds of group
```

A figure is processor time of all threads, of all ranks together, divided by the ranks. With more ranks than cores that
is what limits the time, and it says the same on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

import rankmesh.runtime
from bench.contests import CONTESTS, Contest, Sizes, missing
from bench.gloo_text import gloo_section
from bench.live import live_sizes, use
from bench.processes import run_world
from rankmesh.backend.gloo import EAGER_SIZE
from rankmesh.core.plan import Plan

__all__ = ["measured"]

_LONG = timedelta(seconds=60)


def measured(ranks: tuple[int, ...], rounds: int, show: Callable[[str], object]) -> dict[str, Any]:
    """By ranks and contest: milliseconds of processor time a rank of each side, by round, each side in turn."""
    found: list[dict[str, Any]] = []
    for size in ranks:
        for contest in CONTESTS:
            if missing(contest):
                continue
            sides = {"gloo alone": _single(contest), "rankmesh": contest.ours, contest.peer: contest.theirs}
            rows: dict[str, list[float]] = {side: [] for side in sides}
            steps: list[dict[str, float]] = []
            for _ in range(rounds):
                for side, make in sides.items():
                    rows[side].append(_spent(make, live_sizes(size)))
                steps.append(_steps(contest, live_sizes(size)))
            found.append({"ranks": size, "what": contest.what, "peer": contest.peer, "sides": rows, "steps": steps})
            show(f"{size} ranks, {contest.what}")
    return {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0], "contests": found}


# -- sides --------------------------------------------------------------------------------------------------------


def _single(contest: Contest) -> Callable[[Sizes], list[Any]]:
    return lambda sizes: _bare(contest.plan(sizes))


def _bare(plan: Plan) -> list[Any]:
    """The process groups of one rank by kind, and nothing around them: kinds that share have one, a rank alone none."""
    local, made = plan.of(dist.get_rank()), {}
    store, shared = dist.distributed_c10d._get_default_store(), _device(late=False)
    for group in local.communicators:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
        at_once = group.size <= EAGER_SIZE
        options._devices = [shared if at_once else _device(late=True)]
        options._threads, options._timeout = 1, _LONG
        made[group.name] = ProcessGroupGloo(PrefixStore(str(group), store), group.rank, group.size, options)
    return [made[group.canonical] for group in local.values() if group.size > 1]


def _device(*, late: bool) -> Any:
    return ProcessGroupGloo.create_default_device(lazy_init=late)


# -- figures ------------------------------------------------------------------------------------------------------


def _spent(make: Callable[[Sizes], list[Any]], sizes: Sizes) -> float:
    def body(rank: int, store: Any) -> dict[str, float]:
        before = time.process_time()
        groups = make(sizes)
        use(groups)
        dist.barrier()  # the server of the store works for all of them
        return {"ms": (time.process_time() - before) * 1e3}

    total: float = sum(report["ms"] for report in _reports(sizes, body))
    return total / sizes.world


def _steps(contest: Contest, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of processor time of the rank's own thread: the plan, the phases of connect, the first use."""

    def body(rank: int, store: Any) -> dict[str, float]:
        marks = [time.thread_time()]
        plan = contest.plan(sizes)
        plan.of(rank)
        marks.append(time.thread_time())
        live = rankmesh.runtime.connect(plan)
        marks.append(time.thread_time())
        use([group.pg for group in live.values()])
        marks.append(time.thread_time())
        took = [(after - before) * 1e3 for before, after in pairwise(marks)]
        return dict(zip(("plan", "connect", "first use"), took, strict=True))

    reports = _reports(sizes, body)
    return {step: sum(report[step] for report in reports) / sizes.world for step in reports[0]}


def _reports(sizes: Sizes, body: Callable[[int, Any], dict[str, float]]) -> tuple[Any, ...]:
    outcome = run_world(sizes.world, body, limit=120)
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    return outcome.reports


def _main(message: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gloo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="8,16,32,64", help="sizes of the worlds, in a row")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("gloo.json"))
    given = parser.parse_args(message)
    ranks = tuple(int(size) for size in given.ranks.split(","))
    found = measured(ranks, given.rounds, lambda done: sys.stderr.write(f"{done}\n"))
    given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(gloo_section(found)) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
