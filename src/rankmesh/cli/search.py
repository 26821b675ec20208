"""``rankmesh search``: sizes and orders for a world, a cluster and a model, by predicted step time."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from rankmesh.cli.cluster import described
from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import note, out, write_json
from rankmesh.cli.options import CLUSTER_HELP, Debug, Json
from rankmesh.placement import Training
from rankmesh.placement.report import duration
from rankmesh.placement.search import MEMORY, SPEED, Found, search
from rankmesh.readers.model import read_model

__all__ = ["EXAMPLES", "command", "searched"]

EXAMPLES = """\
$ rankmesh search --world 64 --cluster host=8,leaf=8 --model config.json --batch 256 --sequence 4096
$ rankmesh search --world 1024 --cluster cluster.json --model train.sh --json
$ rankmesh search --world 512 --cluster host=8,nvlink=8,leaf=8 --model llama3-70b --batch 512 --sequence 8192
"""


_SUCH_AS = {"batch": 256, "sequence": 4096}


def searched(
    world: int,
    cluster: str,
    model: str,
    *,
    top: int = 20,
    speed: float = SPEED,
    capacity: float = MEMORY,
    **training: Any,
) -> tuple[Found, ...]:
    """The best layouts; ``training`` are fields of ``Training``, which go before what the model's file says."""
    transformer, stated = read_model(model)
    chosen = {**stated, **{name: value for name, value in training.items() if value is not None}}
    missing = [name for name in ("batch", "sequence") if name not in chosen]
    if missing:
        such_as = " ".join(f"--{name} {_SUCH_AS[name]}" for name in missing)
        raise typer.BadParameter(f"no {' and no '.join(missing)} is given; add {such_as}, or yours")
    known = {field.name for field in fields(Training)}
    how = Training(**{name: value for name, value in chosen.items() if name in known})
    machine = described(cluster, world_size=world)
    return search(world, machine, transformer, how, top=top, speed=speed, capacity=capacity)


def command(
    world: Annotated[int, typer.Option("--world", "-w", min=1, metavar="N", help="Ranks.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", metavar="CLUSTER", help=CLUSTER_HELP)],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="FILE", help="config.json, a Megatron script, numbers, llama3-8b."),
    ],
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences of one step.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a sequence.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences of one pass.")] = None,
    memory: Annotated[float, typer.Option(min=0.1, metavar="GB", help="Of one device.")] = MEMORY / 1e9,
    speed: Annotated[float, typer.Option(min=0.001, metavar="TFLOPS", help="Of one device, in training.")] = SPEED
    / 1e12,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="List the K best.")] = 10,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Rank sizes and orders of a layout by the predicted time of a step: predicted, not measured."""
    found = searched(
        world,
        cluster,
        model,
        top=top,
        speed=speed * 1e12,
        capacity=memory * 1e9,
        batch=batch,
        sequence=sequence,
        microbatch=microbatch,
    )
    if json:
        write_json({"layouts": [each.to_dict() for each in found], "predicted": True})
    else:
        _print(found)
    note("predicted, not measured: no overlap, no congestion but uplinks; rankmesh measure says more of your cluster")


def _print(found: tuple[Found, ...]) -> None:
    columns = [
        *(
            Column(axis, [str(getattr(each, axis)) for each in found], right=True)
            for axis in ("tp", "cp", "pp", "dp", "ep")
        ),
        Column("order", [each.order for each in found]),
        Column("step", [duration(each.step) for each in found], right=True),
        Column("compute", [duration(each.compute) for each in found], right=True),
        Column("bubble", [duration(each.bubble) for each in found], right=True),
        Column("communication", [duration(each.communication) for each in found], right=True),
        Column("memory, at most", [f"{each.memory / 1e9:.1f} GB" for each in found], right=True),
    ]
    print_columns(out(), columns)
