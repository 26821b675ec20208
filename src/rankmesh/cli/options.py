"""The arguments that subcommands have in common, each with its help, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankmesh.cli.console import note
from rankmesh.cli.shell import DEBUG
from rankmesh.core.host_names import HOST_LIST
from rankmesh.errors import ClusterError, LayoutError, quoted
from rankmesh.readers.source import Source, read

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster as Machine

# Whole-world arrays of every kind stay below a gigabyte up to here.
LIMIT = 2**22


def _debug(value: bool) -> bool:
    if value:
        os.environ[DEBUG] = "1"
    return value


def file_option(text: str) -> Any:
    """Return the option of a file that a command reads or writes."""
    return typer.Option(metavar="FILE", help=text)


SPEC_HELP = (
    "An axis string (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2), a preset (llama3-405b), "
    "a saved plan (plan.json), or a training config (train.sh, train.toml, config.yaml, ds.json)."
)
CLUSTER_HELP = (
    "The machine: host=8,leaf=4 or host=8:450GB,leaf=4:50GB (innermost first, one size may be *), or a file: rankmesh "
    "cluster --json, topology.conf, topology.yaml, {host: switch}, nvidia-smi topo -m, kubectl get nodes -o json, "
    "describe-instance-topology."
)


Spec = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP)]
Kinds = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these kinds (tp,pp); may be repeated.")]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        "-w",
        min=1,
        metavar="N",
        help="Ranks in the world, for a * in SPEC or a config without a world size.",
    ),
]
Cluster = Annotated[str | None, typer.Option(metavar="CLUSTER", help=CLUSTER_HELP)]
RequiredCluster = Annotated[str, typer.Option("--cluster", "-c", metavar="CLUSTER", help=CLUSTER_HELP)]
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node",
        "-g",
        min=1,
        max=LIMIT,
        metavar="N",
        help="Devices per host, if no cluster or preset gives it.",
    ),
]
Hosts = Annotated[
    str | None, typer.Option(metavar="LIST", help="The job's hosts in its launcher's order: node[1-4,7].")
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
        help="An environment variable for a launch script, or one that a YAML names; may be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys, and nothing else, to stdout.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_debug,
        is_eager=True,
        expose_value=False,
        help=f"Show the traceback of an error ({DEBUG}=1).",
    ),
]


# -- what they mean --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The options by which a SPEC is read."""

    world_size: WorldSize = None
    variables: Variables = None

    def source(self, spec: str | Source) -> Source:
        """Return the plan of a SPEC; note on stderr which lines of a training config were read."""
        return noted(source_of(spec, self.world_size, self.variables))


def source_of(spec: str | Source, world_size: int | None = None, variables: Iterable[str] | None = None) -> Source:
    """Return the plan that the user means, of a size that the command can list; one that was read stays as it is.

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


def noted(source: Source) -> Source:
    """Print which lines of a training config were read to stderr, and return the source."""
    if source.config is not None:
        note(str(source.config))
    return source


def config_of(source: Source | None, name: str = "config") -> dict[str, object]:
    """Return, as data under a key, the lines that were read from a training config; empty for another SPEC."""
    return {} if source is None or source.config is None else {name: source.config.to_dict()}


def cluster_of(
    text: str | None,
    world_size: int = 0,
    hosts: str | None = None,
    gpus_per_node: int | None = None,
    *,
    placed_on: Sequence[str] = (),
) -> Machine:
    """Return the cluster of a string or a file; of None, the one of this process's Slurm job. Raises ``ClusterError``.

    A string fills a ``*`` with what the world leaves. A topology file inside a Slurm job is read for the hosts of the
    job. ``placed_on``: the hosts of a saved placement, whose order counts if the cluster has these hosts.

    >>> str(cluster_of("host=2,leaf=*", 8))
    '8 devices, 4 hosts of 2, levels host leaf'
    """
    from rankmesh.core.clusters.discovered import slurm_job
    from rankmesh.core.clusters.read import machine_of

    if text is None:
        return slurm_job(os.environ)
    if "=" not in text and hosts is None and gpus_per_node is None and "SLURM_JOB_NODELIST" in os.environ:
        with suppress(ClusterError):
            return slurm_job(os.environ, machine_of(Path(text)))
    if hosts is None and placed_on:
        try:
            return _cluster(text, world_size, placed_on, gpus_per_node)
        except ClusterError as error:
            if error.values.get("of") != HOST_LIST and "expected" not in error.values:
                raise
            note(f"note: {quoted(text)} has not the hosts on which the plan was placed; its own order of hosts is used")
    return _cluster(text, world_size, hosts, gpus_per_node)


def _cluster(text: str, world_size: int, hosts: str | Sequence[str] | None, gpus_per_node: int | None) -> Machine:
    from rankmesh.core.clusters.cluster import Cluster

    if "=" in text and not Path(text).is_file():
        if gpus_per_node is not None:
            note(f"note: --gpus-per-node {gpus_per_node} is not used: {quoted(text)} says how many devices a host has")
        if "*" in text and not world_size:
            raise LayoutError(
                f"{quoted(text)} leaves a size open, and there is no world to infer it from; write the size"
            )
        size = world_size if "*" in text and world_size else None
        return Cluster.parse(text, world_size=size, hosts=hosts)
    return Cluster.read(text, hosts=hosts, gpus_per_node=gpus_per_node)


def variables_of(words: Iterable[str]) -> dict[str, str]:
    """Return the variables of words NAME=VALUE."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--set {quoted(word)} is not a variable; write NAME=VALUE, such as TP=8")
        found[name] = value
    return found


def words_of(given: Sequence[str] | None) -> list[str]:
    """Return the words of an option that may be repeated, and takes several words at once.

    >>> words_of(["tp,pp", "dp"])
    ['tp', 'pp', 'dp']
    """
    return [word.strip() for text in given or () for word in text.split(",") if word.strip()]
