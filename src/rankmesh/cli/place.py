"""``rankmesh place``: the rank order of a layout that costs least on a cluster, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.cluster import described
from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import note, out, write, write_json
from rankmesh.cli.options import (
    DevicesPerHost,
    Hosts,
    Json,
    RequiredCluster,
    Spec,
    Variables,
    WorldSize,
    noted,
    source_of,
    words_of,
)
from rankmesh.cli.shell import save as write_file
from rankmesh.errors import quoted
from rankmesh.placement import Placed, Traffic, place
from rankmesh.placement.report import HOSTS, by_host, duration, saving, searched

__all__ = ["EXAMPLES", "command", "within_of"]

EXAMPLES = """\
$ rankmesh place dp=4,tp=8 --cluster host=8,leaf=4 --within tp=host
$ rankmesh place megatron:world=288,tp=8,ep=9 --cluster host=8,nvlink=9,leaf=4 --within tp=host,ep=nvlink --json
$ rankmesh place plan.json --cluster cluster.json --traffic traffic.json --save placed.json
"""


def within_of(text: str) -> dict[str, str]:
    """``tp=host,ep=nvlink`` as a mapping.

    >>> within_of("tp=host, ep=nvlink")
    {'tp': 'host', 'ep': 'nvlink'}
    """
    found = {}
    for item in words_of([text]):
        kind, equals, level = (part.strip() for part in item.partition("="))
        if not equals or not kind or not level:
            raise typer.BadParameter(
                f"--within {quoted(item)} is no KIND=LEVEL; write a kind and a level, such as tp=host"
            )
        found[kind] = level
    return found


def command(
    spec: Spec,
    cluster: RequiredCluster,
    within: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=LEVEL", help="Keep every group of a kind inside a level (tp=host); may be repeated."
        ),
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What a step sends: {kind: [{collective, bytes, times}]}.")
    ] = None,
    hosts: Hosts = None,
    gpus_per_node: DevicesPerHost = None,
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help="nccl or gloo: how collectives are done.")
    ] = "nccl",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan with its rank map, which is a SPEC.")
    ] = None,
    world_size: WorldSize = None,
    variables: Variables = None,
    json: Json = False,
) -> None:
    """Find the rank order of a layout that costs least on a cluster; show before, after, and why."""
    source = noted(source_of(spec, world_size, variables))
    machine = described(cluster, hosts=hosts, gpus_per_node=gpus_per_node, world_size=source.plan.world_size)
    sent = None if traffic is None else Traffic.read(traffic)
    found = place(source.plan, machine, within=within_of(",".join(within or ())), traffic=sent, backend=backend)
    if save is not None:
        write_file(save, found.plan.to_json() + "\n")
    if json:
        for text in found.notes:
            note(f"note: {text}")
        write_json(found.to_dict())
    else:
        _print(found)


def _print(found: Placed) -> None:
    write(f"{found.order} on {found.cluster}")
    write(saving(found))
    write("")
    kinds = sorted(found.kinds, key=lambda kind: kind.cost - kind.before)
    columns = [
        Column("group", [kind.name for kind in kinds], style="bold"),
        Column("within, before", [kind.level_before for kind in kinds]),
        Column("after", [kind.level for kind in kinds]),
        Column("before", [duration(kind.before) for kind in kinds], right=True),
        Column("after", [duration(kind.cost) for kind in kinds], right=True),
        Column("asked", [f"within {found.within[kind.name]}" if kind.name in found.within else "" for kind in kinds]),
    ]
    print_columns(out(), columns if found.within else columns[:-1])
    write("")
    holds = by_host(found, HOSTS + 1)
    hosts = list(holds)[:HOSTS]
    ranks_column = Column("holds", [holds[host] for host in hosts], fit=True)
    print_columns(out(), [Column("host", hosts, style="bold"), ranks_column])
    if len(holds) > HOSTS:
        write("... --json lists all hosts")
    write("")
    size = len(found.rank_map)
    shown = ", ".join(map(str, found.rank_map[:32])) + (f", ... {size:,} ranks; --json lists them" if size > 32 else "")
    ascending = all(rank == number for number, rank in enumerate(found.rank_map, start=min(found.rank_map)))
    write("rank map: unchanged, ranks in ascending order" if ascending else f"rank map: {shown}")
    write(searched(found))
    for text in found.notes:
        note(f"note: {text}")
