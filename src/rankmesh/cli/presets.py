"""``rankmesh presets``: the published layouts of real runs.

>>> preset_row("llama3-405b")["sizes"]
'tp=8,cp=1,pp=16,dp=128'
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rankmesh.cli.columns import Column, print_columns, print_facts
from rankmesh.cli.console import out, write_json
from rankmesh.cli.options import Json, PresetName
from rankmesh.core import presets
from rankmesh.readers.source import read

__all__ = ["EXAMPLES", "command", "preset_row"]

EXAMPLES = """\
$ rankmesh presets
$ rankmesh presets llama3-405b
"""


def preset_row(name: str) -> dict[str, Any]:
    """Return one preset as data: ``spec`` is its text, ``sizes`` the axes of its mesh and its views."""
    preset = presets.get(name)
    mesh = read(name).plan.mesh
    sizes = "/".join([str(mesh), *(f"{view}:{layout}" for view, layout in mesh.views.items())])
    return {**asdict(preset), "sizes": sizes, "world_size": mesh.size}


def command(name: PresetName = None, json: Json = False) -> None:
    """List the published layouts, or one of them in detail; any SPEC may be a preset's name."""
    rows = list(map(preset_row, presets.names() if name is None else [name]))
    if json:
        write_json(rows if name is None else rows[0])
    elif name is None:
        _print_table(rows)
    else:
        _print_one(rows[0])


def _print_table(rows: list[dict[str, Any]]) -> None:
    columns = [
        Column("name", [row["name"] for row in rows]),
        Column("world", [f"{row['world_size']:,}" for row in rows], right=True),
        Column("spec", [row["spec"] for row in rows]),
        Column("title", [row["title"] for row in rows]),
        Column("source", [row["source"] for row in rows]),
    ]
    print_columns(out(), columns)


def _print_one(row: dict[str, Any]) -> None:
    lines = {
        row["name"]: row["title"],
        "spec": row["spec"],
        "sizes": row["sizes"],
        "world": f"{row['world_size']:,} ranks, nodes of {row['gpus_per_node']}",
        "source": row["source"],
        "note": row["note"],
    }
    print_facts(out(), lines.items())
