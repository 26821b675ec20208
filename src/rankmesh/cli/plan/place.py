"""``rankmesh place``: the rank order of a layout whose step is predicted to be the quickest, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankmesh.cli.console import note, write
from rankmesh.cli.options import GpusPerNode, Hosts, Reading, RequiredCluster, Spec, cluster_of, file_option, words_of
from rankmesh.cli.shell import Answer
from rankmesh.cli.shell import save as write_file
from rankmesh.cli.training import MODEL_HELP, Trained, TrainingOptions, trained
from rankmesh.core.clusters.hardware import device
from rankmesh.errors import quoted
from rankmesh.placement import Traffic, place
from rankmesh.placement.report import lines
from rankmesh.placement.search import settled

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster
    from rankmesh.core.plan import Plan

__all__ = ["command", "within_of"]


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
                f"--within {quoted(item)} is not a KIND=LEVEL; write a kind and a level, such as tp=host"
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
    traffic: Annotated[Path | None, file_option("What a step sends: {kind: [{collective, bytes, times}]}.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="FILE", help=f"{MODEL_HELP} Default: a usual transformer.")
    ] = None,
    *,
    options: TrainingOptions,
    hosts: Hosts = None,
    gpus_per_node: GpusPerNode = None,
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help="Predict the collectives of nccl or gloo.")
    ] = "nccl",
    save: Annotated[Path | None, file_option("Write the plan with its rank map, usable as SPEC.")] = None,
    hostfile: Annotated[
        Path | None, file_option("Write the host of each rank in this order, for SLURM_HOSTFILE.")
    ] = None,
    reading: Reading,
) -> Answer:
    """Find the rank order of a layout whose step is predicted to be the quickest; show before, after, and why.

    Communication that overlaps with computation costs nothing, as in search. With a traffic file instead of a model,
    all communication costs.

    $ rankmesh place dp=4,tp=8 --cluster host=8,leaf=4 --within tp=host
    $ rankmesh place megatron:world=288,tp=8,ep=9 --cluster host=8,nvlink=9,leaf=4 --within tp=host,ep=nvlink --json
    $ rankmesh place tp=8,dp=16,pp=2 --cluster host=8,leaf=32 --model llama3-70b --batch 256 --sequence 8192
    $ rankmesh place plan.json --cluster cluster.json --traffic traffic.json --save placed.json --hostfile placed.hosts
    """
    source = reading.source(spec)
    machine = cluster_of(cluster, source.plan.world_size, hosts, gpus_per_node, placed_on=source.hosts)
    if model is not None and traffic is not None:
        raise typer.BadParameter("--model and --traffic both say what a step sends; give one of the two")
    unused = [name for name, value in vars(options).items() if value is not None and name != "device_name"]
    if model is None and unused:
        raise typer.BadParameter(f"--{unused[0].replace('_', '-')} is of a model; add --model FILE")
    work = {} if model is None else _work(source.plan, machine, trained(model, options))
    work |= {} if traffic is None else {"traffic": Traffic.read(traffic)}
    work.setdefault("device", device(options.device_name))
    found = place(source.plan, machine, within=within_of(",".join(within or ())), backend=backend, **work)
    if save is not None:
        write_file(save, found.to_json() + "\n")
    if hostfile is not None:
        write_file(hostfile, "".join(f"{name}\n" for name in found.hostfile()))
    written = [None if file is None else str(file) for file in (save, hostfile)]
    return Answer(
        found.to_dict, lambda: write("\n".join(lines(found, *written))), notes=[f"note: {text}" for text in found.notes]
    )


def _work(plan: Plan, machine: Cluster, given: Trained) -> dict[str, Any]:
    """Return the arguments of ``place`` for a model; what is not given of its training is chosen as ``search`` does."""
    how = settled(plan, machine, given.model, given.training, device=given.device, free=given.free)
    if how is None:
        note(
            f"note: this layout fits into a device with no microbatch and recomputation that is known; it is placed "
            f"with a microbatch of {given.training.microbatch}"
        )
    elif given.free:
        chosen = ", ".join(f"{name.replace('_', ' ')} {getattr(how, name)}" for name in given.free)
        note(f"note: chosen as search does: {chosen}")
    return {"model": given.model, "training": how or given.training, "device": given.device}
