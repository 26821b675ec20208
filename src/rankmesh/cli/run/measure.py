"""``rankmesh measure``: what every kind of group takes on real ranks, all of its groups at once; slow hosts by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.columns import print_table, ranks_text
from rankmesh.cli.console import progress_bar, write
from rankmesh.cli.options import CLUSTER_HELP, Backend, Kinds, Reading, Spec, Timeout, cluster_of, file_option, words_of
from rankmesh.cli.run.check import source_in_job
from rankmesh.cli.shell import Answer
from rankmesh.cli.shell import save as write_file
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.measured import Measurement
from rankmesh.core.plan import Plan
from rankmesh.errors import extra, quoted
from rankmesh.placement.calibrated import calibrated
from rankmesh.placement.report import duration, speed

__all__ = ["command", "sizes_of"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def sizes_of(text: str) -> tuple[int, ...]:
    """Return numbers of bytes, which people write with units.

    >>> sizes_of("4KiB, 1MB,7")
    (4096, 1000000, 7)
    """
    found = []
    for item in words_of([text]):
        match = re.fullmatch(r"([0-9]{1,12})\s*([A-Za-z]*)", item)
        if match is None or match[2].upper() not in _UNITS or int(match[1]) == 0:
            raise typer.BadParameter(f"--sizes {quoted(item)} is not a number of bytes; write 4096, 4KiB or 1MB")
        found.append(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(found)


def command(
    spec: Spec,
    sizes: Annotated[str, typer.Option(metavar="LIST", help="Bytes on each rank: 4KiB,1MiB.")] = "4KiB,256KiB,4MiB",
    groups: Kinds = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", metavar="CLUSTER", help=f"With --save. {CLUSTER_HELP}")
    ] = None,
    save: Annotated[Path | None, file_option("Write the cluster with measured levels, for place.")] = None,
    backend: Backend = None,
    timeout: Timeout = 120.0,
    *,
    reading: Reading,
) -> Answer | None:
    """Time the collectives of every kind of group on real processes; name slow groups and slow hosts.

    $ rankmesh measure tp=2,dp=2 --sizes 4KiB,1MiB
    $ srun rankmesh measure plan.json --json > measured.json
    $ torchrun --nproc-per-node 8 -m rankmesh measure tp=8 --json
    $ srun rankmesh measure 'tp=8,dp=*' --cluster cluster.json --save measured-cluster.json
    """
    source, launch = source_in_job(spec, reading)
    with progress_bar(f"measuring {source.plan.world_size} ranks", "cases") as (progress, stop):
        with extra("torch"):
            from rankmesh.debug.verification.measure import measure
        kinds = words_of(groups) or None
        found = measure(
            source.plan, sizes=sizes_of(sizes), kinds=kinds, backend=backend, timeout=timeout, progress=progress
        )
        stop()
    if launch.rank:
        return None
    if save is not None:
        machine = _machine(cluster, found, source.plan)
        write_file(save, json.dumps(calibrated(machine, source.plan, found).to_dict(), indent=2) + "\n")
    return Answer(found.to_dict, lambda: _print(found))


def _machine(text: str | None, found: Measurement, plan: Plan) -> Cluster:
    """Return the cluster to calibrate: as it is given, else the hosts as the ranks call them."""
    if text is not None:
        return cluster_of(text, plan.world_size)
    from rankmesh.core.clusters.discovered import Witness, discovered

    return discovered([Witness(rank, host, "", rank) for rank, host in enumerate(found.hosts)])


def _print(found: Measurement) -> None:
    rows = [
        (
            row.name,
            row.collective,
            row.bytes,
            duration(row.seconds),
            duration(row.isolated),
            speed(row.algbw),
            speed(row.busbw),
            _group(row.slowest.ranks, found),
        )
        for row in found.rows
    ]
    print_table(("group", "collective", ">bytes", ">at once", ">alone", ">algbw", ">busbw", "slowest group"), rows)
    write("")
    slow = found.slow_hosts
    write(f"slow hosts: {', '.join(slow)}" if slow else "no host stands out")


def _group(ranks: Sequence[int], found: Measurement) -> str:
    hosts = found.hosts_of(ranks)
    listed = ranks_text(ranks[:4], len(ranks))
    return f"{listed} on {', '.join(hosts[:3])}{' …' if len(hosts) > 3 else ''}"
