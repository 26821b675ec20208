"""``rankmesh presets``: the published layouts of real runs.

>>> preset_row("llama3-405b")["sizes"]
'tp=8,cp=1,pp=16,dp=128'
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from rankmesh.cli.columns import print_facts, print_table
from rankmesh.cli.shell import Answer
from rankmesh.core import presets
from rankmesh.readers.source import read

__all__ = ["command", "preset_row"]


def preset_row(name: str) -> dict[str, Any]:
    """Return one preset as data: ``spec`` is its text, ``sizes`` the axes of its mesh and its views."""
    preset = presets.get(name)
    mesh = read(name).plan.mesh
    sizes = "/".join([str(mesh), *(f"{view}:{layout}" for view, layout in mesh.views.items())])
    return {**asdict(preset), "sizes": sizes, "world_size": mesh.size}


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One preset in detail.")] = None,
) -> Answer:
    """List the published layouts, or one of them in detail; any SPEC may be a preset's name.

    $ rankmesh presets
    $ rankmesh presets llama3-405b
    """
    rows = list(map(preset_row, presets.PRESETS if name is None else [name]))
    if name is not None:
        return Answer(lambda: rows[0], lambda: _print_one(rows[0]))
    heads = ("name", ">world", "spec", "title", "source")
    cells = [(row["name"], row["world_size"], row["spec"], row["title"], row["source"]) for row in rows]
    return Answer(lambda: rows, lambda: print_table(heads, cells))


def _print_one(row: dict[str, Any]) -> None:
    lines = {
        row["name"]: row["title"],
        "spec": row["spec"],
        "sizes": row["sizes"],
        "world": f"{row['world_size']:,} ranks, nodes of {row['gpus_per_node']}",
        "source": row["source"],
        "note": row["note"],
    }
    print_facts(lines.items())
