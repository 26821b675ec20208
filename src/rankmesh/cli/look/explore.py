"""``rankmesh explore``: a page on which a layout is seen, played with and shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rankmesh.cli.console import note, write_json
from rankmesh.cli.options import Cluster, GpusPerNode, Json, Reading, Spec, cluster_of, file_option, source_of
from rankmesh.cli.outputs import check_outputs, write_output
from rankmesh.core.clusters.cluster import Cluster as Machine
from rankmesh.core.documents import INDEX, parse_json, read_text, refused_as
from rankmesh.debug.doctor import Diagnosis, doctor
from rankmesh.errors import PlacementError, quoted_path
from rankmesh.readers.source import Source
from rankmesh.viz.explorer import fragment, given, page

__all__ = ["command", "explored"]


def explored(
    spec: str | Source,
    *,
    gpus_per_node: int | None = None,
    cluster: str | None = None,
    hosts: str | None = None,
    measured: str | Path | None = None,
    recordings: str | Path | None = None,
) -> dict[str, Any]:
    """Return the data of the page of a layout, from which `rankmesh.viz.explorer.page` makes the page.

    >>> explored("tp=2,dp=4", cluster="host=4,leaf=2")["state"]
    {'spec': 'tp=2,dp=4', 'cluster': 'host=4,leaf=2'}
    """
    source = source_of(spec)
    return given(
        source,
        cluster=_machine(cluster, hosts, gpus_per_node, source),
        measured=None if measured is None else _document(Path(measured)),
        hang=None if recordings is None else _hang(doctor(recordings, source.plan)),
    )


def _machine(text: str | None, hosts: str | None, gpus_per_node: int | None, source: Source) -> Machine | str | None:
    """Return a cluster, but a string as it is, for which the page has controls; each rank must have a device."""
    if text is None:
        return None if gpus_per_node is None else str(gpus_per_node)
    found = cluster_of(text, source.plan.world_size, hosts, gpus_per_node, placed_on=source.hosts)
    found.hosts_of(range(source.plan.world_size))
    typed = "=" in text and ":" not in text and hosts is None and not Path(text).is_file()
    return text if typed and found.host_level == 0 and found.rank_map is None else found


def _document(path: Path) -> dict[str, Any]:
    with refused_as(PlacementError, f"measurement {quoted_path(path)}", "write it with rankmesh measure SPEC --json"):
        return dict(parse_json(read_text(path, INDEX.size), INDEX))


def _hang(found: Diagnosis) -> dict[str, object]:
    """Return the diagnosis with who waits for whom, and how long others wait for each rank."""
    turns = [
        {"call": call.name, "waiting": list(call.waiting), "missing": list(call.missing)} for call in found.waits.calls
    ]
    speed = {"step": found.slow.step, "caused": found.slow.caused} if found.slow else None
    return {**found.to_dict(), "turns": turns, "speed": speed}


def command(
    spec: Spec,
    gpus_per_node: GpusPerNode = None,
    cluster: Cluster = None,
    html: Annotated[str, file_option("File for the page; - is stdout.")] = "explore.html",
    measured: Annotated[Path | None, file_option("Also show bandwidths: what rankmesh measure --json printed.")] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also show which ranks hang or are slow, from the files here."),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    *,
    reading: Reading,
    json: Json = False,
) -> None:
    """Write one page to play with a layout: sizes, order, hosts, groups. It needs no server and no network.

    $ rankmesh explore megatron:world=64,tp=2,pp=2,ep=4
    $ rankmesh explore tp=4,dp=4 -g 4 --open
    $ rankmesh explore llama3-405b --cluster 'host=8,leaf=32,spine=*' --html layout.html
    $ rankmesh explore plan.json --measured measured.json --html measured.html
    $ rankmesh explore train.sh --recordings /tmp/nccl_traces --open
    """
    source = reading.source(spec)
    data = explored(source, gpus_per_node=gpus_per_node, cluster=cluster, measured=measured, recordings=recordings)
    check_outputs({"--html": html}, json=json)
    write_output(html, page(data))
    if json:
        write_json({"html": html, "fragment": fragment(data["state"]), "world_size": source.plan.world_size, **data})
    if browser and html != "-":
        _show(Path(html))


def _show(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        note(f"no browser was found; open {path} in one")
