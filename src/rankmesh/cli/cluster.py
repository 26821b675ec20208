"""``rankmesh cluster``: the machine, from a file, from the launcher, or from the ranks of this job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import note, out, write, write_json
from rankmesh.cli.options import GpusPerNode, Hosts, Json, Timeout, cluster_of
from rankmesh.errors import ClusterError, MissingExtra, extra
from rankmesh.launch.started import Launch, started_by
from rankmesh.placement import Cluster
from rankmesh.placement.report import speed
from rankmesh.placement.slurm import slurm_job

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command", "print_cluster"]

EXAMPLES = """\
$ rankmesh cluster host=8:450GB,nvlink=9,leaf=4:50GB
$ rankmesh cluster topology.conf --hosts 'node[1-4]' --gpus-per-node 8 --json
$ kubectl get nodes -o json > nodes.json; rankmesh cluster nodes.json
$ nvidia-smi topo -m > topo.txt; rankmesh cluster topo.txt --hosts 'node[1-4]'
$ srun rankmesh cluster
$ torchrun --nproc-per-node 8 -m rankmesh cluster --json > cluster.json
"""

_SHOWN = 32


def command(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLUSTER]",
            help="host=8:450GB,nvlink=9,leaf=4, or a file: our own JSON or YAML, topology.conf, topology.yaml, nodes "
            "of kubectl, AWS's instance topology, {host: switch}, nvidia-smi topo -m. Default: the hosts of this "
            "job's ranks.",
        ),
    ] = None,
    hosts: Hosts = None,
    gpus_per_node: GpusPerNode = None,
    timeout: Timeout = 60.0,
    json: Json = False,
) -> None:
    """Show the cluster: its levels, its hosts in natural order, and which ranks are where."""
    launch = started_by() if file is None else None
    if launch is not None and launch.world_size > 1:
        found = _asked(launch, timeout)
        if launch.rank:
            return
    elif file is None and "SLURM_JOB_NODELIST" not in os.environ:
        raise ClusterError(
            "no cluster is given, and this process is in no job that describes one; give a string (host=8,leaf=4) or a "
            "file, or run the command on the ranks of a job (srun, torchrun)"
        )
    else:
        found = cluster_of(file, hosts=hosts, gpus_per_node=gpus_per_node)
    for text in found.notes:
        note(f"note: {text}")
    if json:
        write_json(found.to_dict())
    else:
        print_cluster(out(), found)


def _asked(launch: Launch, timeout: float) -> Cluster:
    """Return the cluster as the ranks of this job find it; without torch, as Slurm describes it."""
    try:
        with extra("torch"):
            import rankmesh as rm

            find, init = rm.discover, rm.init
    except MissingExtra:
        if launch.launcher != "slurm":
            raise
        return slurm_job(os.environ)
    import warnings

    with warnings.catch_warnings(), init("gloo", timeout=timeout):
        warnings.simplefilter("ignore")  # they are printed as notes
        return find(timeout=timeout)


def print_cluster(console: Console, cluster: Cluster) -> None:
    """Print the size, the levels with what they cost, and the hosts with their units and ranks."""
    write(str(cluster))
    write("")
    levels = cluster.levels
    uplinks = [level.uplink for level in levels]
    units = [len(set(row.tolist())) for row in cluster.units]
    columns = [
        Column("level", [level.name for level in levels]),
        Column("units", [f"{count:,}" for count in units], right=True),
        Column("latency", [f"{level.latency * 1e6:.3g} µs" for level in levels], right=True),
        Column("bandwidth", [speed(level.bandwidth) for level in levels], right=True),
    ]
    if cluster.default_levels:
        given = ["default" if level.assumed else "given" for level in levels]
        columns.append(Column("source", given))
    if any(uplinks):
        columns.append(Column("uplink", ["" if each is None else speed(each) for each in uplinks], right=True))
    print_columns(console, columns)
    if cluster.default_levels:
        write("default: assumed, not measured (rankmesh measure --save)")
    write("")
    print_columns(console, _hosts(cluster))
    if len(cluster.hosts) > _SHOWN:
        write(f"and {len(cluster.hosts) - _SHOWN:,} more hosts; --json lists them")


def _hosts(cluster: Cluster) -> list[Column]:
    hosts, start, ranks = cluster.hosts[:_SHOWN], 0, []
    for host in hosts:
        ranks.append(_range(cluster.ranks[start : start + host.devices].tolist()))
        start += host.devices
    places: list[Column] = [
        Column(level.name, [host.places[number] for host in hosts])
        for number, level in enumerate(cluster.levels[cluster.host_level + 1 :])
    ]
    return [
        Column("host", [host.name for host in hosts]),
        Column("devices", [f"{host.devices:,}" for host in hosts], right=True),
        *places,
        Column("ranks", ranks),
    ]


def _range(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
