"""``rankmesh schema``: JSON Schemas of the files that rankmesh reads, ``schemas/NAME.json`` beside this file.

>>> schema("traffic")["additionalProperties"]["items"]["required"]
['collective', 'bytes']
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

import typer

from rankmesh.cli.columns import print_table
from rankmesh.cli.console import write
from rankmesh.cli.shell import Answer

__all__ = ["Document", "command", "schema"]

Document = Literal["plan", "cluster", "traffic", "tensors"]


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one kind of file."""
    found: dict[str, Any] = json.loads(_text(name))
    return found


def _text(name: str) -> str:
    return files("rankmesh.cli").joinpath(f"schemas/{name}.json").read_text(encoding="utf-8")


def command(
    name: Annotated[Document | None, typer.Argument(metavar="NAME", help="plan, cluster, traffic or tensors.")] = None,
) -> Answer | None:
    """Print the JSON Schema of a file that rankmesh reads, so that an editor checks the file.

    Without NAME, list the schemas. A file that a schema refuses is refused by rankmesh too.
    Sizes that do not fit together are found only when the file is read.

    $ rankmesh schema
    $ rankmesh schema plan > plan.schema.json
    """
    if name is not None:
        write(_text(name).rstrip())
        return None
    titles = {document: schema(document)["title"] for document in get_args(Document)}
    return Answer(lambda: titles, lambda: print_table(("name", "describes"), titles.items()))
