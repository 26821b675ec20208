"""``rankmesh search``: sizes and orders for a world, a cluster and a model, by predicted step time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rankmesh.cli.columns import Column, print_columns, print_facts
from rankmesh.cli.console import note, out, progress_bar, write, write_json
from rankmesh.cli.options import Json, RequiredCluster, cluster_of
from rankmesh.cli.training import MODEL_HELP, trained, with_training
from rankmesh.placement.assumptions import assumptions
from rankmesh.placement.report import duration
from rankmesh.placement.search import Found, search

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\
$ rankmesh search --world 64 --cluster host=8,leaf=8 --model config.json --batch 256 --sequence 4096
$ rankmesh search --world 1024 --cluster cluster.json --model train.sh --json
$ rankmesh search --world 512 --cluster host=8,leaf=64 --model llama3-70b --batch 512 --sequence 8192 --explain 2
$ rankmesh search --world 64 --cluster host=8,leaf=8 --model llama3-8b --batch 256 --sequence 4096 --speed 40%
"""


@with_training
def command(
    world: Annotated[int, typer.Option("--world", "-w", min=1, metavar="N", help="Ranks.")],
    cluster: RequiredCluster,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help=MODEL_HELP)],
    options: Any,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="List the K best.")] = 10,
    explain: Annotated[int, typer.Option(min=1, metavar="N", help="Show seconds and memory of row N by part.")] = 1,
    json: Json = False,
) -> None:
    """Rank sizes and orders of a layout by the predicted time of a step: predicted, not measured."""
    given = trained(model, options)
    machine, how = cluster_of(cluster, world), given.training
    with progress_bar("searching", "layouts") as (progress, _):
        rows = search(world, machine, given.model, how, top=max(top, explain), device=given.device, speed=given.speed,
                      capacity=given.capacity, free=given.free, progress=progress)  # fmt: skip
    assumed = assumptions(
        given.model, how, given.device, machine, speed=given.speed, speed_from=given.speed_from,
        capacity=given.capacity, free=given.free,
    )  # fmt: skip
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
