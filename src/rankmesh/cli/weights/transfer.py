"""``rankmesh transfer``: what moves between two layouts: bytes by rank and by level, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rankmesh.cli.columns import bytes_text, print_facts, print_table
from rankmesh.cli.console import write, write_filled
from rankmesh.cli.options import LIMIT, Cluster, WorldSize, cluster_of, noted, source_of
from rankmesh.cli.patterns import patterns, reasons
from rankmesh.cli.shell import Answer
from rankmesh.cli.weights.layout import config_of, cut_text
from rankmesh.core.documents import INDEX, parse_json, read_text, refused_as
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError, MissingExtra, quoted, quoted_path
from rankmesh.placement.transfer_cost import links, seconds
from rankmesh.readers.model import described
from rankmesh.transfer.layouts.known import KNOWN, known
from rankmesh.transfer.layouts.layout import Layout
from rankmesh.transfer.layouts.sides import layout
from rankmesh.transfer.planning.tensors_file import read_tensors
from rankmesh.transfer.planning.transfer import Transfer

__all__ = ["command"]

_SIDE_HELP = (
    "With --model a framework and its sizes (megatron:tp=4,pp=2; vllm:tp=8; sglang:tp=8,ep=8; transformers:tp=2,fsdp=4)"
    "; with --tensors any SPEC (tp=4,pp=2); else a file that rankmesh layout --json wrote."
)
_FORM = "write it with rankmesh layout --json"
Shardings = Mapping[str, Sharding]


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=_SIDE_HELP)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The layout to move to, in the same form.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="MODEL", help="A name (llama3-8b), a config.json, or its folder."),
    ] = None,
    tensors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='How each tensor is sharded, JSON or YAML: {"name": {"shape": [...], "dtype": "bfloat16", '
            '"source": {"cut": ["tp", null], "at": {"pp": 1}}, "target": {...}}}; also view, parts, padded.',
        ),
    ] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, metavar="RANK", help="The first rank of the target; default: 0.")
    ] = None,
    cluster: Cluster = None,
    ranks: Annotated[int, typer.Option(min=0, metavar="N", help="List the N busiest ranks.")] = 16,
    world_size: WorldSize = None,
) -> Answer:
    """Plan what moves between two layouts: bytes by rank and by level, the least possible, the busiest ranks.

    A rank receives only the elements that it does not have, each from one of the nearest ranks that have it. The
    busiest sender sends as little as possible. With --model, common models need no installed framework: rankmesh
    contains their shardings. Both sides begin at rank 0, as when a trainer and an engine share their GPUs; --offset
    puts the target on other ranks.

    $ rankmesh transfer --model llama3-8b megatron:tp=4,pp=2 vllm:tp=8
    $ rankmesh transfer --model qwen3-30b-a3b transformers:fsdp=8 sglang:tp=8,ep=8 --cluster host=8
    $ rankmesh transfer trainer.json engine.json       # each written by rankmesh layout --json
    $ rankmesh transfer tp=4,dp=2,pp=2 tp=2,dp=4 --tensors tensors.json
    $ rankmesh transfer tp=8,dp=8,pp=16 tp=8,dp=64 --offset 1024 --tensors tensors.json --cluster host=8,leaf=192
    """
    left_out: dict[str, str] = {}
    placed_on: Sequence[str] = ()
    if tensors is None:
        ours, theirs, left_out = _layouts(source, target, model, offset or 0)
    elif model is None:
        specs = [noted(source_of(spec, world_size)) for spec in (source, target)]
        here, there = (spec.plan.mesh for spec in specs)
        ours, theirs = read_tensors(tensors, here, there if offset is None else _shifted(there, offset))
        placed_on = specs[0].hosts or specs[1].hosts
    else:
        raise typer.BadParameter("--tensors and --model both say what moves; leave one out")
    world = max(one.mesh.rank_range.stop for side in (ours, theirs) for one in side.values())
    if world > LIMIT:
        raise LayoutError(f"the layouts have {world:,} ranks, but the command plans up to {LIMIT:,}; give smaller ones")
    moves = Transfer(ours, theirs, None if cluster is None else cluster_of(cluster, world, placed_on=placed_on))
    return Answer(lambda: _as_data(moves) | {"left_out": left_out}, lambda: _print(moves, ranks, left_out))


def _layouts(source: str, target: str, model: Path | None, offset: int) -> tuple[Shardings, Shardings, dict[str, str]]:
    """Return the shardings of the tensors that both sides have, and why others are left out."""
    ours, theirs = _layout(source, model), _layout(target, model)
    left_out: dict[str, str] = {}
    for side, other in ((ours, theirs), (theirs, ours)):
        left_out |= {name: f"{side.side}: {why}" for name, why in side.refused.items()}
        for name in side.shardings.keys() - other.shardings.keys() - other.refused.keys():
            left_out[name] = f"{other.side} does not have it"
    names = [name for name in ours.shardings if name in theirs.shardings]
    if not names:
        raise LayoutError(f"{quoted(source)} and {quoted(target)} have no tensor in common; give layouts of one model")
    placed = theirs.shardings
    if offset:
        meshes = {id(one.mesh): _shifted(one.mesh, offset) for one in placed.values()}
        placed = {name: replace(one, mesh=meshes[id(one.mesh)]) for name, one in placed.items()}
    return {name: ours.shardings[name] for name in names}, {name: placed[name] for name in names}, left_out


def _layout(text: str, model: Path | None) -> Layout:
    """Return the layout that a file has, or that a framework gives a model: by rankmesh's table, else by its loader."""
    if Path(text).is_file():
        with refused_as(LayoutError, f"layout {quoted_path(text)}", _FORM, path=text):
            return Layout.from_dict(parse_json(read_text(text, INDEX.size), INDEX))
    if model is None:
        raise LayoutError(
            f"{quoted(text)} does not say which tensors move; add --model llama3-8b, or --tensors FILE, or give "
            "files that rankmesh layout --json wrote",
            received=text,
        )
    config = config_of(model)
    try:
        return known(text, config, described) or layout(text, config)
    except MissingExtra as error:
        raise MissingExtra(
            f"how {quoted(text)} shards {quoted(config['model_type'])} is known for {', '.join(KNOWN)}; {error}",
            **error.values,
        ) from error


def _shifted(mesh: Mesh, offset: int) -> Mesh:
    if mesh.offset:
        raise LayoutError(
            f"--offset {offset} contradicts the target's plan, which begins at rank {mesh.offset}; leave --offset out"
        )
    return mesh.replace(offset=offset)


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
        "equal": _equal(moves),
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


def _equal(moves: Transfer) -> list[dict[str, Any]]:
    """Return lines of tensors that differ in numbers of their names alone: one shape, cut by the same axes."""
    sent = np.bincount(moves.flows.tensor_class, moves.flows.bytes, len(moves.classes)).astype(np.int64)
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    for one, total in zip(moves.classes, sent.tolist(), strict=True):
        key = (one.source.shape, one.source.dtype, _placed(one.source), _placed(one.target))
        found.setdefault(key, {}).update(dict.fromkeys(one.names, total // len(one.names)))
    lines = []
    for (shape, dtype, source, target), moved in found.items():
        for pattern, names in patterns(moved).items():
            count = {"tensors": len(names), "bytes": len(names) * moves.target[names[0]].bytes}
            cut = {"shape": shape, "dtype": dtype, "source": source, "target": target}
            lines.append({"names": pattern, **cut, **count, "moved": sum(moved[name] for name in names)})
    return lines


def _placed(sharding: Sharding) -> str:
    """Return the axes that cut each dimension, and those that a tensor is on some positions of: ``tp, - at pp``."""
    return cut_text(sharding) + (f" at {', '.join(sharding.at)}" if sharding.at else "")


def _print(moves: Transfer, ranks: int, left_out: Mapping[str, str]) -> None:
    (sender, sent), (receiver, received) = _busiest(moves.outgoing), _busiest(moves.incoming)
    whole = sum(sharding.bytes for sharding in moves.target.values())
    facts = [
        ("tensors", f"{len(moves.target):,} of {len(moves.classes):,} classes, {bytes_text(whole)}"),
        ("moved", f"{bytes_text(moves.bytes)} between ranks; the least possible is {bytes_text(moves.lower_bound)}"),
        (
            "busiest",
            f"rank {sender} sends {bytes_text(sent)}; no plan does with less than {bytes_text(moves.sender_bound)}",
        ),
        ("", f"rank {receiver} receives {bytes_text(received)}"),
    ]
    facts += [("over " + name, bytes_text(total)) for name, total in moves.levels.items() if moves.cluster is not None]
    if moves.cluster is not None:
        for link in links(moves.flows, moves.cluster):
            facts.append(
                ("busiest link", f"{link.unit} to {link.level}: {bytes_text(link.out)} out, {bytes_text(link.into)} in")
            )
        facts.append(("predicted", f"{seconds(moves.flows, moves.cluster):.3g} s by the cluster's bandwidths"))
    facts.append(("digest", moves.digest))
    print_facts(facts)
    write("")
    rows = [
        (
            one["names"],
            " x ".join(map(str, one["shape"])),
            f"{one['source']} → {one['target']}",
            bytes_text(one["moved"]),
        )
        for one in _equal(moves)
    ]
    print_table(("tensors", "shape", "cut by", ">moved"), rows)
    for line in reasons(left_out):
        write_filled(f"left out: {line}")
    order = np.argsort(-(moves.outgoing + moves.incoming), kind="stable")[:ranks].tolist()
    if order:
        write("")
        sizes = [(str(rank), *(bytes_text(int(of[rank])) for of in (moves.outgoing, moves.incoming))) for rank in order]
        print_table((">rank", ">sends", ">receives"), sizes)
