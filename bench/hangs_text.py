"""The page of the doctor's and the watch's figures, from ``bench/hangs.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["page"]

_WHO = """\
# Who names what

The {count} hangs of `tests/hangs`, each recorded by real gloo processes, as `rankmesh doctor` tells them and as torch's
own `torch.distributed.flight_recorder.fr_trace` does. Torch's reader takes pickles of NCCL's form: it was given these
calls as such, with the members of the groups filled in, which gloo's recordings lack; a rank without calls has no file.
The first two telling lines of its output are shown. `python -m bench.hangs table` makes the table.

| hang | doctor | `fr_trace` |
| --- | --- | --- |"""

_AFTER = """
Torch's reader needs a file of every rank, and lists missing ranks group by group, causes and consequences alike: of a
ring of four it names two, of a skipped call the rank that waits too. Roots, sends and receives, and monitored barriers
are in no recording of gloo; the watch has them from the stacks.
"""

_SCALE = """\
## A large job

`python -m bench.hangs scale` writes the recordings of {ranks:,} ranks with {calls:,} calls each, in the forms that
torch publishes (frames in the pickles), the last rank one call behind; and has `rankmesh doctor DIR --json` read them,
which must name that rank. Time is of the whole command; memory is that of all its processes at the most. No such job
was run.

| files | size | time | processor | memory | load before |
| --- | --- | --- | --- | --- | --- |"""

_STEP = """
## What recording costs

`python -m bench.hangs step`: two gloo ranks, a step of eight matrix products and eight reductions of 512 KiB,
{step:.1f} ms. Blocks of two seconds without and with a watch take turns, {blocks} of each, in the same processes. Torch
2.13 has its recorder on by itself, so the watch is what `record=True` adds. The recorder by itself: the processor time
of a small reduction ({without:.1f} µs without, {with_it:.1f} µs with), in processes that take turns. Load {load:.1f}.

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
    for name, words in _RATIOS.items():
        yield f"| {words} | {' | '.join(f'{ratio:.4f}' for ratio in step[name])} |"
    if "alone" in step:
        without, with_it = (step["alone"][what][1] * 1e3 for what in ("without", "with"))
        yield (
            "\nThese scatter by more than a watch costs. By itself, while the program sleeps and with a recorder "
            f"that is full, it adds {with_it - without:.1f} ms of processor time a second ({with_it:.1f} with a watch, "
            f"{without:.1f} without), {(with_it - without) / 10:.2f} % of one core."
        )


_FORMS = {"pickle": "pickles", "json": "JSON", "gzip": "JSON, gzip"}
_RATIOS = {
    "wall": "watch: time of a step",
    "processor": "watch: processor time of a step",
    "call_ratio": "recorder: processor time of a small reduction",
}
