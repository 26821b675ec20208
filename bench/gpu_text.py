"""The section of docs/benchmarks.md on NCCL: what ``bench/gpu.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["gpu_section"]


def gpu_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    machine = found["machine"]
    yield from ("", "## On a GPU", "")
    yield (
        "Time from an initialised NCCL world until every group exists (built), and until each has been used "
        f"(used). Ranks share {machine['gpus']} {machine['gpu']}; NCCL {machine['nccl']}, torch {machine['torch']}, "
        f"{found['cores']} cores. Medians of {found['rounds']} alternating rounds, with the lowest and the highest. "
        "Ranks that share a GPU use it one after the other, so these times do not predict those of a job with a GPU "
        "for each rank. Device memory is that of all ranks together. In a world bound to its device, groups are splits "
        "of its communicator. `python -m bench.gpu`"
    )
    head = "| groups | ranks | by | built | used | device memory |"
    yield from ("", head, "| --- | ---: | --- | ---: | ---: | ---: |")
    for item in found["comparisons"]:
        for side, by in (("ours", "rankmesh"), ("theirs", item["peer"])):
            yield f"| {item['what']} | {item['ranks']} | {by} | {' | '.join(_cells(item, side))} |"
    tests = found["tests"]
    yield (
        f"\n`make test-gpu` on {tests['date']}: ranks share one {tests['gpu']}; torch {tests['torch']}, NCCL "
        f"{tests['nccl']}, {tests['cores']} cores. The hangs of `tests/gpu/test_hangs.py` were not run then."
    )
    yield from ("", "| tests | passed | seconds |", "| --- | ---: | ---: |")
    for what, passed, seconds in tests["rows"]:
        yield f"| {what} | {passed} | {seconds} |"


def _cells(item: Mapping[str, Any], side: str) -> tuple[str, str, str]:
    if side in item["failures"]:
        # Of an error of NCCL what is between the place in torch's source and the version.
        failure = item["failures"][side]
        return failure.partition(".cpp:")[2].partition(", ")[2].partition(" (")[0] or failure, "-", "-"
    stats = item["both"][side]
    memory = f"{stats['device_bytes']['median'] / 2**20:,.0f} MiB"
    return _time(stats["built"]), _time(stats["used"]), memory


def _time(stat: Mapping[str, float]) -> str:
    return f"{stat['median']:.3g} s ({stat['low']:.3g} – {stat['high']:.3g})"
