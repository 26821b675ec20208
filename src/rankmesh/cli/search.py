"""``rankmesh search``: sizes and orders for a world, a cluster and a model, by predicted step time."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any

import typer

from rankmesh.cli.cluster import described
from rankmesh.cli.columns import Column, print_columns, print_facts
from rankmesh.cli.console import note, out, progress_bar, write, write_json
from rankmesh.cli.options import Json, RequiredCluster
from rankmesh.core.documents import parse, read_text, refused_as
from rankmesh.errors import PlacementError, quoted, quoted_path
from rankmesh.placement import Training
from rankmesh.placement.assumptions import assumptions
from rankmesh.placement.devices import DEVICES, device
from rankmesh.placement.model import ATTENTION, CONTEXT, PRECISION, RECOMPUTE, SCHEDULE
from rankmesh.placement.report import duration
from rankmesh.placement.search import FREE, Found, search
from rankmesh.readers.model import read_model

__all__ = ["EXAMPLES", "command", "speed_of"]

EXAMPLES = """\
$ rankmesh search --world 64 --cluster host=8,leaf=8 --model config.json --batch 256 --sequence 4096
$ rankmesh search --world 1024 --cluster cluster.json --model train.sh --json
$ rankmesh search --world 512 --cluster host=8,leaf=64 --model llama3-70b --batch 512 --sequence 8192 --explain 2
$ rankmesh search --world 64 --cluster host=8,leaf=8 --model llama3-8b --batch 256 --sequence 4096 --speed 40%
"""


_SUCH_AS = {"batch": 256, "sequence": 4096}


def _training(stated: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Training, tuple[str, ...]]:
    """Return how the model is trained, options before its file; and what the search is free to choose."""
    chosen = {**stated, **{name: value for name, value in given.items() if value is not None}}
    missing = [name for name in ("batch", "sequence") if name not in chosen]
    if missing:
        such_as = " ".join(f"--{name} {_SUCH_AS[name]}" for name in missing)
        raise typer.BadParameter(f"no {' and no '.join(missing)} is given; add {such_as}, or yours")
    return Training(**chosen), tuple(name for name in FREE if name not in chosen)


def speed_of(text: str, peak: float) -> tuple[float, str]:
    """Return FLOP/s from TFLOP/s, a share of the peak, or a file of ``measure --json``; and where they are from.

    >>> speed_of("400", 989e12), speed_of("40%", 1000e12)
    ((400000000000000.0, 'as given'), (400000000000000.0, '40% of the peak, as given'))
    """
    share = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return _measured_speed(text), f"the slowest rank's matrix products in {quoted_path(text)}"
    if not 0 < number < inf or (share and number > 100):
        raise typer.BadParameter(
            f"--speed {quoted(text)} is no speed; give TFLOP/s as 400, or a share of the peak as 40%"
        )
    return (number / 100 * peak, f"{number:g}% of the peak, as given") if share else (number * 1e12, "as given")


def _measured_speed(path: str) -> float:
    form = "write one with rankmesh measure SPEC --json > measured.json, or give TFLOP/s as 400, or a share as 40%"
    with refused_as(PlacementError, f"--speed {quoted_path(path)}", form, path=path):
        data = parse(read_text(path))
        speed = data.get("speed") if isinstance(data, dict) else None
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < inf:
        raise PlacementError(f"--speed {quoted_path(path)} has no speed of a device; {form}", path=path)
    return float(speed)


def _count(name: str, text: str) -> Any:
    return typer.Option(name, min=1, metavar="N", help=text)


def _known(name: str, words: tuple[str, ...], text: str) -> Any:
    return typer.Option(name, metavar="WORD", help=f"{text}: {', '.join(words)}.")


def command(
    world: Annotated[int, typer.Option("--world", "-w", min=1, metavar="N", help="Ranks.")],
    cluster: RequiredCluster,
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="FILE", help="config.json, a Megatron script, numbers, llama3-8b."),
    ],
    batch: Annotated[int | None, _count("--batch", "Sequences of one step.")] = None,
    sequence: Annotated[int | None, _count("--sequence", "Tokens of a sequence.")] = None,
    vocabulary: Annotated[int | None, _count("--vocabulary", "Rows of the embedding, with its padding.")] = None,
    microbatch: Annotated[
        int | None, _count("--microbatch", "Sequences of one pass; without, the best of 1, 2, 4, 8.")
    ] = None,
    virtual_stages: Annotated[
        int | None, _count("--virtual-stages", "Parts of each pipeline stage (interleaved); without, the best.")
    ] = None,
    schedule: Annotated[str | None, _known("--schedule", SCHEDULE, "Of the pipeline")] = None,
    recompute: Annotated[
        str | None, _known("--recompute", RECOMPUTE, "Activations computed again; without, as few as fit")
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="Where tp is above 1; without, yes."),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(min=0, max=3, metavar="0-3", help="Sharded: optimizer (1), gradients (2), weights (3, FSDP)."),
    ] = None,
    replicate: Annotated[int | None, _count("--replicate", "Copies of the shards (HSDP).")] = None,
    precision: Annotated[str | None, _known("--precision", PRECISION, "Of matrix products")] = None,
    attention: Annotated[str | None, _known("--attention", ATTENTION, "Kernel of attention")] = None,
    context: Annotated[str | None, _known("--context", CONTEXT, "Context parallel attention")] = None,
    overlap: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Communication that hides: of dp,cp,pp,tp,ep; without, dp,cp,pp."),
    ] = None,
    device_name: Annotated[
        str, typer.Option("--device", metavar="NAME", help=f"One of {', '.join(DEVICES)}.")
    ] = "h100",
    memory: Annotated[
        float | None, typer.Option(min=0.1, metavar="GB", help="Of one device; without, the device's.")
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            metavar="TFLOPS|N%|FILE", help="Of one device: 400, 40% of its peak, or measure --json; without, modelled."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="List the K best.")] = 10,
    explain: Annotated[int, typer.Option(min=1, metavar="N", help="Show seconds and memory of row N by part.")] = 1,
    json: Json = False,
) -> None:
    """Rank sizes and orders of a layout by the predicted time of a step: predicted, not measured."""
    given = {
        "batch": batch,
        "sequence": sequence,
        "microbatch": microbatch,
        "virtual_stages": virtual_stages,
        "schedule": schedule,
        "recompute": recompute,
        "sequence_parallel": sequence_parallel,
        "zero": zero,
        "replicate": replicate,
        "precision": precision,
        "attention": attention,
        "context": context,
        "overlap": None if overlap is None else tuple(name for name in overlap.split(",") if name),
    }
    transformer, stated = read_model(model, vocabulary=vocabulary)
    how, free = _training(stated, given)
    machine, of = described(cluster, world_size=world), device(device_name)
    flops, speed_from = (None, "") if speed is None else speed_of(speed, of.peak(how.precision))
    capacity = None if memory is None else memory * 1e9
    with progress_bar("searching", "layouts") as (progress, _):
        rows = search(world, machine, transformer, how, top=max(top, explain), device=of, speed=flops,
                      capacity=capacity, free=free, progress=progress)  # fmt: skip
    assumed = assumptions(
        transformer, how, of, machine, speed=flops, speed_from=speed_from, capacity=capacity, free=free
    )
    if explain > len(rows):
        raise typer.BadParameter(f"--explain {explain} is beyond the {len(rows)} layouts that fit")
    if json:
        write_json({"rows": [each.to_dict() for each in rows], "assumptions": assumed})
    else:
        _print_rows(rows[:top])
        _print_parts(rows[explain - 1], explain)
        write("\nassumed")
        print_facts(out(), ((name.replace("_", " "), text) for name, text in assumed.items()))
    note("predicted, not measured; docs/benchmarks.md has predictions beside published runs")


def _print_rows(rows: tuple[Found, ...]) -> None:
    sizes = [
        Column(axis, [str(getattr(each.sizes, axis)) for each in rows], right=True)
        for axis in ("tp", "cp", "pp", "dp", "ep", "etp")
    ]
    experts = any(each.sizes.ep > 1 for each in rows)
    columns = [
        Column("row", [str(number) for number in range(1, len(rows) + 1)], right=True),
        *sizes[: 6 if experts else 4],
        Column("order", [each.order for each in rows]),
        Column("micro", [str(each.training.microbatch) for each in rows], right=True),
        Column("virtual", [str(each.training.virtual_stages) for each in rows], right=True),
        Column("recompute", [each.training.recompute for each in rows]),
        Column("step", [duration(each.seconds) for each in rows], right=True),
        Column("TFLOP/s", [f"{each.tflops:.0f}" for each in rows], right=True),
        Column("memory", [f"{each.memory / 1e9:.1f} GB" for each in rows], right=True),
    ]
    print_columns(out(), columns)


def _print_parts(found: Found, number: int) -> None:
    step, names = found.step, list(dict.fromkeys((*found.step.parts, *found.step.hidden)))
    shown = [name for name in names if step.parts.get(name, 0) > 0 or step.hidden.get(name, 0) > 0]
    write(f"\nrow {number}: seconds of a step on the busiest stage, and what hides behind them")
    columns = [
        Column("part", shown),
        Column("seconds", [duration(step.parts.get(name, 0.0)) for name in shown], right=True),
        Column("share", [f"{step.parts.get(name, 0.0) / step.seconds:.1%}" for name in shown], right=True),
        Column("hidden", [duration(step.hidden[name]) if step.hidden.get(name) else "" for name in shown], right=True),
    ]
    print_columns(out(), columns)
    write(f"\nrow {number}: memory of the fullest device")
    parts = {name: size for name, size in found.memory_by_part.items() if size}
    columns = [
        Column("part", list(parts)),
        Column("memory", [f"{size / 1e9:.2f} GB" for size in parts.values()], right=True),
    ]
    print_columns(out(), columns)
