"""``rankmesh cluster``: the machine, from a file, from the launcher, or from the ranks of this job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from rankmesh.cli.columns import print_table
from rankmesh.cli.console import note, write
from rankmesh.cli.options import GpusPerNode, Hosts, Timeout, cluster_of
from rankmesh.cli.shell import Answer
from rankmesh.cli.training import DEVICE_HELP
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.discovered import slurm_job
from rankmesh.core.clusters.hardware import device
from rankmesh.core.clusters.levels import in_words
from rankmesh.errors import ClusterError, MissingExtra, extra
from rankmesh.launch.started import Launch, started_by
from rankmesh.placement.report import speed

__all__ = ["command"]

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
    device_name: Annotated[str, typer.Option("--device", metavar="NAME", help=DEVICE_HELP)] = "h100",
    timeout: Timeout = 60.0,
) -> Answer | None:
    """Show the cluster: its levels, its hosts in natural order, and which ranks are where.

    $ rankmesh cluster host=8:450GB,nvlink=9,leaf=4:50GB
    $ rankmesh cluster topology.conf --hosts 'node[1-4]' --gpus-per-node 8 --json
    $ kubectl get nodes -o json > nodes.json; rankmesh cluster nodes.json
    $ nvidia-smi topo -m > topo.txt; rankmesh cluster topo.txt --hosts 'node[1-4]'
    $ srun rankmesh cluster
    $ torchrun --nproc-per-node 8 -m rankmesh cluster --json > cluster.json
    """
    launch = started_by() if file is None else None
    if launch is not None and launch.world_size > 1:
        found = _asked(launch, timeout)
        if launch.rank:
            return None
    elif file is None and "SLURM_JOB_NODELIST" not in os.environ:
        raise ClusterError(
            "no cluster is given, and this process is in no job that describes one; give a string (host=8,leaf=4) or a "
            "file, or run the command on the ranks of a job (srun, torchrun)"
        )
    else:
        found = cluster_of(file, hosts=hosts, gpus_per_node=gpus_per_node)
    for text in found.notes:
        note(f"note: {text}")
    links = in_words(found.levels, max(found.host_sizes), device(device_name))
    return Answer(lambda: found.to_dict() | {"links": links}, lambda: _print(found, links))


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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are printed as notes
        with init("gloo", timeout=timeout):
            return find(timeout=timeout)


def _print(cluster: Cluster, links: str) -> None:
    """Print the size, the levels with what they cost, and the hosts with their units and ranks."""
    write(f"{cluster}\n")
    rows = [
        (
            level.name,
            len(set(units.tolist())),
            f"{level.latency * 1e6:.3g} µs",
            speed(level.bandwidth),
            ("default" if level.assumed else "given") if cluster.default_levels else "",
            "" if level.uplink is None else speed(level.uplink),
        )
        for level, units in zip(cluster.levels, cluster.units, strict=True)
    ]
    print_table(("level", ">units", ">latency", ">bandwidth", "source", ">uplink"), rows)
    if cluster.default_levels:
        write(f"default: assumed, not measured (rankmesh measure --save); NCCL as on {links}")
    write("")
    places = [level.name for level in cluster.levels[cluster.host_level + 1 :]]
    print_table(("host", ">devices", *places, "ranks"), _hosts(cluster))
    if len(cluster.hosts) > _SHOWN:
        write(f"and {len(cluster.hosts) - _SHOWN:,} more hosts; --json lists them")


def _hosts(cluster: Cluster) -> Iterator[tuple[str | int, ...]]:
    start = 0
    for host in cluster.hosts[:_SHOWN]:
        ranks = cluster.ranks[start : start + host.devices].tolist()
        start += host.devices
        yield (host.name, host.devices, *host.places, _range(ranks))


def _range(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
