"""``python -m bench``: live groups, large worlds and getters against the peers, side by side, in the same run.

```
live       real gloo ranks on this machine              planning   plans of large worlds: no process group at all
dry        one rank of a large world, backend "fake"    getters    what one question to a live group costs
```

A comparison is reported on stderr as it is done. Tables go to stdout, figures and page to files where asked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.report import load, machine, page
from bench.results import Comparison

__all__ = ["main"]

SECTIONS = ("live", "dry", "planning", "getters")
QUICK = ["--ranks", "8", "--worlds", "64", "--rounds", "1", "--limit", "30", "--loaded"]


def _sizes(text: str) -> list[int]:
    sizes = [int(size) for size in text.split(",")]
    if any(size < 8 or size % (8 if size < 1024 else 1024) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are multiples of 8, from 1024 on of 1024, as in 8,32,2048")
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=_sizes, default=[8, 16, 32, 64], help="live worlds; default %(default)s")
    parser.add_argument("--worlds", type=_sizes, default=[1024, 4096, 32768, 131072], help="dry worlds")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side; default %(default)s")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections; default all")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one run may take")
    parser.add_argument("--quick", action="store_true", help="8 ranks, small worlds, one round: seconds, not figures")
    parser.add_argument("--loaded", action="store_true", help="measure, though the load is above the number of cores")
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--markdown", type=Path, help="write docs/benchmarks.md with these figures")
    parser.add_argument("--from", type=Path, dest="source", help="take the figures of an earlier --json")
    return parser


def _comparisons(given: argparse.Namespace) -> Iterator[Comparison]:
    # Before the first fork: children find all of it imported, and no import is in a time.
    import torch.distributed  # noqa: F401

    import rankmesh.runtime  # noqa: F401
    from bench.contests import CONTESTS
    from bench.getters import getters
    from bench.live import live
    from bench.worlds import dry, planning

    rounds, limit = given.rounds, given.limit
    if "live" in given.only:
        yield from (live(contest, ranks, rounds, limit) for ranks in given.ranks for contest in CONTESTS)
    if "dry" in given.only:
        yield from (dry(contest, world, rounds, limit) for world in given.worlds for contest in CONTESTS)
    if "planning" in given.only:
        for world in given.worlds:
            yield from planning(world, rounds, limit)
    if "getters" in given.only:
        yield from getters(rounds, limit)


def _measured(given: argparse.Namespace) -> dict[str, Any]:
    before, done = load(), []
    for comparison in _comparisons(given):
        done.append(asdict(comparison))
        found = [f"{name} {stat.median:.3g} times faster" for name, stat in comparison.both.ratios.items()]
        found += [f"{side}: {why}" for side, why in comparison.failures.items()]
        title = f"{comparison.section}, {comparison.ranks:,} ranks, {comparison.what} ({comparison.peer})"
        sys.stderr.write(f"{title}: {', '.join(found) or 'done'}\n")
    about = machine() | {"system": platform.system(), "load": {"before": before, "after": load()}}
    versions = {name: _version(name) for name in ("rankmesh", "torch", "megatron-core", "numpy")}
    settings = {name: getattr(given, name) for name in ("ranks", "worlds", "rounds", "limit")}
    return {"machine": about, "versions": versions, "settings": settings, "comparisons": done}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main(message: Sequence[str]) -> int:
    """Measure or read the figures, show and write them. Return 1 if rankmesh failed, 2 if the machine is busy."""
    given = _parser().parse_args([*(QUICK if "--quick" in message else ()), *message])
    now, cores = os.getloadavg()[0], os.cpu_count() or 1
    if now > cores and not (given.source or given.loaded):
        sys.stderr.write(
            f"error: the load is {now:.2f} on {cores} cores, so times would be those of other work, too; "
            f"wait until it is below {cores}, or add --loaded\n"
        )
        return 2
    found = json.loads(given.source.read_text(encoding="utf-8")) if given.source else _measured(given)
    sys.stdout.write(page("results", results=found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(page("benchmarks", results=found), encoding="utf-8")
    failed = [item for item in found["comparisons"] if "ours" in item["failures"]]
    for item in failed:
        sys.stderr.write(f"rankmesh failed on {item['what']}: {item['failures']['ours']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
