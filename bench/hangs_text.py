"""The page of the doctor's and the watch's figures, from ``bench/hangs.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["page"]

_WHO = """\
# Diagnoses of hangs, compared

The {count} hangs of `tests/hangs`, recorded by gloo processes: what `rankmesh doctor` says, and the first two
informative lines of torch's own `torch.distributed.flight_recorder.fr_trace`. That reader takes pickles in NCCL's form,
so the recordings were converted for it, and the members of the groups, which gloo does not record, were added. A rank
without calls has no file. `python -m bench.hangs table` makes the table.

| hang | doctor | `fr_trace` |
| --- | --- | --- |"""

_AFTER = """
torch's reader needs a file of every rank. It lists missing ranks group by group, causes and consequences alike: for a
ring of four it names two, and for a skipped call also the rank that waits. Gloo records no roots, sends, receives or
monitored barriers; the watch reads them from the stacks.
"""

_SCALE = """\
## A large job

`python -m bench.hangs scale` writes recordings of {ranks:,} ranks with {calls:,} calls each, in the forms that torch
writes (pickles have frames). The last rank is one call behind, and `rankmesh doctor DIR --json` must name it. Time and
memory are of all its processes. No job of that size was run.

| files | size | time | processor | memory | load before |
| --- | --- | --- | --- | --- | --- |"""

_STEP = """
## What recording costs

`python -m bench.hangs step`: two gloo ranks, a step of eight matrix products and eight reductions of 512 KiB,
{step:.1f} ms. Blocks of two seconds without and with a watch alternate, {blocks} of each, in the same processes. In
torch 2.13 the recorder is on by default, so the watch is what `record=True` adds. The recorder alone: processor time of
a small reduction ({without:.1f} µs without, {with_it:.1f} µs with), in alternating processes. Load {load:.1f}.

| with / without | lowest | quartile | median | quartile | highest |
| --- | --- | --- | --- | --- | --- |"""


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    yield _WHO.format(count=len(results["table"]))
    yield from (f"| {row['hang']} | {row['doctor']} | {row['fr_trace']} |" for row in results["table"])
    yield _AFTER
    scale = results["scale"]
    yield _SCALE.format(**scale)
    for form, row in scale["forms"].items():
        yield (
            f"| {_FORMS[form]} | {row['size'] / 2**30:.2f} GiB | {row['seconds']:.0f} s | {row['processor']:.0f} s "
            f"| {row['memory'] / 2**30:.2f} GiB | {row['load']:.1f} |"
        )
    if results["step"]:
        yield from _step(results["step"])
    machine = results["machine"]
    yield ""
    yield f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}. From `bench/hangs.json`."


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    yield _STEP.format(
        step=step["step"] * 1e3,
        blocks=step["blocks"],
        without=step["call"]["without"] * 1e6,
        with_it=step["call"]["with"] * 1e6,
        load=step["load"],
    )
    for name, message in _RATIOS.items():
        yield f"| {message} | {' | '.join(f'{ratio:.4f}' for ratio in step[name])} |"
    if "alone" in step:
        without, with_it = (step["alone"][what][1] * 1e3 for what in ("without", "with"))
        yield (
            "\nThe ratios scatter by more than a watch costs. While the program sleeps, with a full recorder, "
            f"it adds {with_it - without:.1f} ms of processor time a second ({with_it:.1f} with a watch, "
            f"{without:.1f} without), {(with_it - without) / 10:.2f} % of one core."
        )


_FORMS = {"pickle": "pickles", "json": "JSON", "gzip": "JSON, gzip"}
_RATIOS = {
    "wall": "watch: time of a step",
    "processor": "watch: processor time of a step",
    "call_ratio": "recorder: processor time of a small reduction",
}
