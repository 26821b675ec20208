"""``rankmesh transfer``: what moves between two layouts: bytes by rank and by level, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from rankmesh.cli.columns import Column, print_columns, print_facts
from rankmesh.cli.console import out, write_json
from rankmesh.cli.options import Cluster, Json, WorldSize, cluster_of, noted, source_of, spec_argument
from rankmesh.core.mesh import Mesh
from rankmesh.errors import LayoutError
from rankmesh.transfer.planning.cost import links, seconds
from rankmesh.transfer.planning.tensors_file import read_tensors
from rankmesh.transfer.planning.transfer import Transfer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\
$ rankmesh transfer tp=4,dp=2,pp=2 tp=2,dp=4 --tensors tensors.json
$ rankmesh transfer tp=8,dp=8,pp=16 tp=8,dp=64 --offset 1024 --tensors tensors.json --cluster host=8,leaf=192
"""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _shifted(mesh: Mesh, offset: int) -> Mesh:
    if mesh.offset:
        raise LayoutError(
            f"--offset {offset} contradicts the target's plan, which begins at rank {mesh.offset}; leave --offset out"
        )
    data = mesh.to_dict()
    moved = {"rank_map": [rank + offset for rank in mesh.rank_map]} if mesh.rank_map else {}
    return Mesh.from_dict({**data, **moved, "offset": offset})


def command(
    source: Annotated[str, spec_argument("SOURCE")],
    target: Annotated[str, spec_argument("TARGET", "The layout to move to.")],
    tensors: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='How each tensor is sharded, JSON or YAML: {"name": {"shape": [...], "dtype": "bfloat16", '
            '"source": {"cut": ["tp", null], "at": {"pp": 1}}, "target": {...}}}; also view, parts, padded.',
        ),
    ],
    offset: Annotated[
        int | None, typer.Option(min=0, metavar="RANK", help="The first rank of the target; 0 if left out.")
    ] = None,
    cluster: Cluster = None,
    ranks: Annotated[int, typer.Option(min=0, metavar="N", help="List the N busiest ranks.")] = 16,
    world_size: WorldSize = None,
    json: Json = False,
) -> None:
    """Plan what moves between two layouts: bytes by rank and by level, the least possible, the busiest ranks.

    Each element that a rank needs comes from itself where it has it, else from one of the nearest that have it, and the
    busiest sender sends as little as it can.
    """
    sources = [noted(source_of(spec, world_size)) for spec in (source, target)]
    ours, theirs = (each.plan.mesh for each in sources)
    if offset is not None:
        theirs = _shifted(theirs, offset)
    world, placed_on = max(ours.rank_range.stop, theirs.rank_range.stop), sources[0].hosts or sources[1].hosts
    machine = None if cluster is None else cluster_of(cluster, world, placed_on=placed_on)
    moves = Transfer(*read_tensors(tensors, ours, theirs), machine)
    if json:
        write_json(_as_data(moves))
    else:
        _print(out(), moves, ranks)


def _as_data(moves: Transfer) -> dict[str, Any]:
    """Return the transfer as plain data with stable keys."""
    data: dict[str, Any] = {
        "bytes": moves.bytes,
        "lower_bound": moves.lower_bound,
        "levels": moves.levels,
        "busiest": {"out": _busiest(moves.outgoing), "in": _busiest(moves.incoming)},
        "sender_bound": moves.sender_bound,
        "tensors": len(moves.target),
        "kinds": len(moves.classes),
        "digest": moves.digest,
        "ranks": {"out": moves.outgoing.tolist(), "in": moves.incoming.tolist()},
    }
    if moves.cluster is not None:
        data["links"] = [vars(link) for link in links(moves.flows, moves.cluster)]
        data["seconds"] = seconds(moves.flows, moves.cluster)
    return data


def _busiest(totals: Any) -> list[int]:
    """Return the rank with the most bytes, and how many; rank 0 where nothing moves."""
    return [int(totals.argmax()), int(totals.max())] if len(totals) else [0, 0]


def _print(console: Console, moves: Transfer, ranks: int) -> None:
    (sender, sent), (receiver, received) = _busiest(moves.outgoing), _busiest(moves.incoming)
    whole = sum(sharding.bytes for sharding in moves.target.values())
    facts = [
        ("tensors", f"{len(moves.target):,} of {len(moves.classes):,} classes, {_size(whole)}"),
        ("moved", f"{_size(moves.bytes)} between ranks; the least possible is {_size(moves.lower_bound)}"),
        ("busiest", f"rank {sender} sends {_size(sent)}; no plan does with less than {_size(moves.sender_bound)}"),
        ("", f"rank {receiver} receives {_size(received)}"),
    ]
    facts += [("over " + name, _size(total)) for name, total in moves.levels.items() if moves.cluster is not None]
    if moves.cluster is not None:
        for link in links(moves.flows, moves.cluster):
            facts.append(("busiest link", f"{link.unit} to {link.level}: {_size(link.out)} out, {_size(link.into)} in"))
        facts.append(("predicted", f"{seconds(moves.flows, moves.cluster):.3g} s by the cluster's bandwidths"))
    facts.append(("digest", moves.digest))
    print_facts(console, facts)
    order = np.argsort(-(moves.outgoing + moves.incoming), kind="stable")[:ranks].tolist()
    if order:
        console.print()
        sizes = {"sends": moves.outgoing, "receives": moves.incoming}
        columns = [Column("rank", [str(rank) for rank in order], right=True)]
        columns += [Column(head, [_size(int(of[rank])) for rank in order], right=True) for head, of in sizes.items()]
        print_columns(console, columns)


def _size(count: int) -> str:
    """Format a number of bytes.

    >>> _size(512), _size(3 << 20), _size(1536)
    ('512 B', '3 MiB', '1.5 KiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
