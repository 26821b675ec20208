"""``rankmesh search``: sizes and orders for a world, a cluster and a model, by predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rankmesh.cli.columns import print_facts, print_table
from rankmesh.cli.console import progress_bar, write
from rankmesh.cli.options import RequiredCluster, cluster_of
from rankmesh.cli.shell import Answer
from rankmesh.cli.training import MODEL_HELP, TrainingOptions, trained
from rankmesh.placement.assumptions import assumptions
from rankmesh.placement.report import duration
from rankmesh.placement.search import Found, search

__all__ = ["command"]


def command(
    world: Annotated[int, typer.Option("--world", "-w", min=1, metavar="N", help="Ranks.")],
    cluster: RequiredCluster,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help=MODEL_HELP)],
    options: TrainingOptions,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="List the K best.")] = 10,
    explain: Annotated[int, typer.Option(min=1, metavar="N", help="Show seconds and memory of row N by part.")] = 1,
) -> Answer:
    """Rank sizes and orders of a layout by the predicted time of a step: predicted, not measured.

    $ rankmesh search --world 64 --cluster host=8,leaf=8 --model config.json --batch 256 --sequence 4096
    $ rankmesh search --world 1024 --cluster cluster.json --model train.sh --json
    $ rankmesh search --world 512 --cluster host=8,leaf=64 --model llama3-70b --batch 512 --sequence 8192 --explain 2
    $ rankmesh search --world 64 --cluster host=8,leaf=8 --model llama3-8b --batch 256 --sequence 4096 --speed 40%
    """
    given = trained(model, options)
    machine, how = cluster_of(cluster, world), given.training
    with progress_bar("searching", "layouts") as (progress, _):
        rows = search(world, machine, given.model, how, top=max(top, explain), device=given.device,
                      free=given.free, progress=progress)  # fmt: skip
    assumed = assumptions(given.model, how, given.device, machine, speed_from=given.speed_from, free=given.free)
    if explain > len(rows):
        raise typer.BadParameter(f"--explain {explain} is beyond the {len(rows)} layouts that fit")
    return Answer(
        lambda: {"rows": [each.to_dict() for each in rows], "assumptions": assumed},
        lambda: _print(rows, top, explain, assumed),
        notes=["predicted, not measured; docs/benchmarks.md has predictions beside published runs"],
    )


def _print(rows: Sequence[Found], top: int, explain: int, assumed: Mapping[str, str]) -> None:
    _print_rows(rows[:top])
    write("\nSPEC of each row, for show, place and connect")
    print_facts((str(number), each.spec) for number, each in enumerate(rows[:top], 1))
    _print_parts(rows[explain - 1], explain)
    write("\nassumed")
    print_facts((name.replace("_", " "), text) for name, text in assumed.items())


def _print_rows(rows: Sequence[Found]) -> None:
    axes = ["tp", "cp", "pp", "dp", *(["ep", "etp"] if any(each.sizes.ep > 1 for each in rows) else [])]
    fields = (">micro", ">virtual", "recompute", ">step", ">TFLOP/s", ">memory")
    cells: list[tuple[str | int, ...]] = [
        (
            number,
            *(str(getattr(each.sizes, axis)) for axis in axes),
            each.order,
            each.training.microbatch,
            each.training.virtual_stages,
            each.training.recompute,
            duration(each.seconds),
            f"{each.tflops:.0f}",
            f"{each.memory / 1e9:.1f} GB",
        )
        for number, each in enumerate(rows, 1)
    ]
    print_table((">row", *(f">{axis}" for axis in axes), "order", *fields), cells)


def _print_parts(found: Found, number: int) -> None:
    step = found.step
    write(f"\nrow {number}: seconds of a step on the busiest stage, and what hides behind them")
    seconds = {name: (step.parts.get(name, 0.0), step.hidden.get(name, 0.0)) for name in (*step.parts, *step.hidden)}
    rows = [
        (name, duration(part), f"{part / step.seconds:.1%}", duration(hidden) if hidden else "")
        for name, (part, hidden) in seconds.items()
        if part > 0 or hidden > 0
    ]
    print_table(("part", ">seconds", ">share", ">hidden"), rows)
    write(f"\nrow {number}: memory of the fullest device")
    sizes = [(name, f"{size / 1e9:.2f} GB") for name, size in found.memory_by_part.items() if size]
    print_table(("part", ">memory"), sizes)
