"""The arguments that subcommands have in common, each with its help and its completion."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from rankmesh import placement as topology
from rankmesh.cli.complete import group_names, preset_names, spec_names
from rankmesh.cli.console import note
from rankmesh.cli.shell import DEBUG
from rankmesh.errors import LayoutError, quoted
from rankmesh.readers.source import Source, read

__all__ = [
    "CLUSTER_HELP",
    "LIMIT",
    "SPEC_HELP",
    "Backend",
    "Cluster",
    "Debug",
    "DevicesPerHost",
    "GpusPerNode",
    "GroupName",
    "Hosts",
    "Json",
    "PresetName",
    "Spec",
    "Timeout",
    "Variables",
    "WorldSize",
    "cluster_of",
    "config_of",
    "note_configs",
    "source_of",
    "variables_of",
]

# Whole-world arrays of every kind stay below a gigabyte up to here.
LIMIT = 2**22


def _debug(value: bool) -> bool:
    if value:
        os.environ[DEBUG] = "1"
    return value


SPEC_HELP = (
    "An axis string (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2), a preset (llama3-405b), "
    "a saved plan (plan.json), or a training config (train.sh, train.toml, config.yaml, ds.json)."
)

Spec = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=spec_names)]
GroupName = Annotated[
    str, typer.Argument(metavar="NAME", help="A kind of group, such as dp_cp.", autocompletion=group_names)
]
PresetName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One preset in detail.", autocompletion=preset_names)
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        "-w",
        min=1,
        metavar="N",
        help="Ranks in the world: fills a * in SPEC, and is for a config that does not say.",
    ),
]
CLUSTER_HELP = (
    "The machine: host=8,nvlink=9,leaf=4 (innermost first, one size may be *), or a file: rankmesh cluster --json, "
    "topology.conf, topology.yaml, {host: switch}, kubectl get nodes -o json, describe-instance-topology."
)
Cluster = Annotated[str | None, typer.Option(metavar="CLUSTER", help=CLUSTER_HELP)]
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", "-g", min=1, max=LIMIT, metavar="N", help="Ranks a node, without --cluster; presets know N."
    ),
]
Hosts = Annotated[
    str | None, typer.Option(metavar="LIST", help="The job's hosts in its launcher's order: node[1-4,7].")
]
DevicesPerHost = Annotated[
    int | None, typer.Option("--gpus-per-node", "-g", min=1, metavar="N", help="Where a file does not say it.")
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", "-b", metavar="NAME", help="gloo or nccl; default: nccl if each rank has a GPU."),
]
Timeout = Annotated[
    float, typer.Option("--timeout", "-t", min=1.0, metavar="SECONDS", help="How long ranks wait for each other.")
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A variable of the environment in which a launch script runs, or that a YAML names; may be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys, and nothing else, to stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_debug, is_eager=True, help=f"Show the traceback of an error ({DEBUG}=1)."),
]


def source_of(spec: str | Source, world_size: int | None = None, variables: Iterable[str] | None = None) -> Source:
    """The plan that the user means, of a size that the command can list; a source that was read stays as it is.

    ``variables`` are words NAME=VALUE.

    >>> source_of("tp=2,dp=*", 8).plan.mesh
    Mesh(tp=2, dp=4)
    """
    given = variables_of(variables or ())
    source = spec if isinstance(spec, Source) else read(spec, world_size=world_size, variables=given)
    if source.plan.world_size > LIMIT:
        raise LayoutError(
            f"the world has {source.plan.world_size:,} ranks, but the command lists up to {LIMIT:,}; ask the library "
            "for one rank: plan.of(rank)",
            world_size=source.plan.world_size,
            limit=LIMIT,
        )
    return source


def cluster_of(
    text: str, world_size: int, hosts: str | None = None, gpus_per_node: int | None = None
) -> topology.Cluster:
    """The cluster that the user means; a string fills a ``*`` with what the world leaves.

    >>> str(cluster_of("host=2,leaf=*", 8))
    '8 devices, 4 hosts of 2, levels host leaf'
    """
    if "=" in text and not Path(text).is_file():
        if gpus_per_node is not None:
            note(f"note: --gpus-per-node {gpus_per_node} is not used: {quoted(text)} says how many devices a host has")
        if "*" in text and not world_size:
            raise LayoutError(
                f"{quoted(text)} leaves a size open, and there is no world to infer it from; write the size"
            )
        size = world_size if "*" in text and world_size else None
        return topology.Cluster.parse(text, world_size=size, hosts=hosts)
    return topology.Cluster.read(text, hosts=hosts, gpus_per_node=gpus_per_node)


def variables_of(words: Iterable[str]) -> dict[str, str]:
    """The variables of words NAME=VALUE."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--set {quoted(word)} is no variable; write NAME=VALUE, such as TP=8")
        found[name] = value
    return found


def note_configs(*sources: Source) -> None:
    """Say on stderr which lines of a training config were read."""
    for source in sources:
        if source.config is not None:
            note(str(source.config))


def config_of(source: Source, name: str = "config") -> dict[str, Any]:
    """The same as data, under a key of its own; nothing for a SPEC that is no training config."""
    return {} if source.config is None else {name: source.config.to_dict()}
