"""``rankmesh schema``: JSON Schemas of the files that rankmesh reads, ``schemas/NAME.json`` beside this file.

>>> schema("traffic")["additionalProperties"]["items"]["required"]
['collective', 'bytes']
"""

from __future__ import annotations

import json as json_text
from enum import Enum
from importlib.resources import files
from typing import Annotated, Any

import typer

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import out, write, write_json
from rankmesh.cli.options import Json

__all__ = ["EXAMPLES", "Document", "command", "schema"]

EXAMPLES = """\
$ rankmesh schema
$ rankmesh schema plan > plan.schema.json
"""


class Document(str, Enum):
    """A kind of file that has a schema."""

    plan = "plan"
    cluster = "cluster"
    traffic = "traffic"
    tensors = "tensors"


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one kind of file."""
    found: dict[str, Any] = json_text.loads(_text(name))
    return found


def _text(name: str) -> str:
    return files("rankmesh.cli").joinpath(f"schemas/{name}.json").read_text(encoding="utf-8")


def command(
    name: Annotated[Document | None, typer.Argument(metavar="NAME", help="plan, cluster, traffic or tensors.")] = None,
    json: Json = False,
) -> None:
    """Print the JSON Schema of a file that rankmesh reads, so that an editor checks the file.

    Without NAME, list the schemas. A file that a schema refuses is refused by rankmesh too.
    Sizes that do not fit together are found only when the file is read.
    """
    if name is not None:
        write(_text(name.value).rstrip())
        return
    titles = {document.value: schema(document.value)["title"] for document in Document}
    if json:
        write_json(titles)
    else:
        print_columns(out(), [Column("name", list(titles)), Column("describes", list(titles.values()))])
