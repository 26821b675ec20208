"""``rankmesh layout``: how a framework shards every weight of a model, read from its own loader."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankmesh.cli.columns import print_table
from rankmesh.cli.console import note, write_filled
from rankmesh.cli.patterns import patterns, reasons
from rankmesh.cli.shell import Answer
from rankmesh.core.documents import parse_json, read_text, refused_as
from rankmesh.errors import LayoutError, MissingExtra, first_line, quoted
from rankmesh.readers.models import CONFIGS

if TYPE_CHECKING:
    from rankmesh.core.sharding import Sharding
    from rankmesh.transfer.layouts.layout import Layout

__all__ = ["command", "config_of", "cut_text"]


def config_of(model: Path) -> Mapping[str, object]:
    """Return the ``config.json`` of a model: a file, the one in a folder, or of a model by its name, ``llama3-8b``.

    Raises ``LayoutError`` for a file that is missing or not a configuration.
    """
    if not model.exists() and str(model) in CONFIGS:
        return CONFIGS[str(model)]
    file = model / "config.json" if model.is_dir() else model
    if not file.is_file():
        near = get_close_matches(str(model), CONFIGS, n=1)
        forms = f"give a folder with a model's config.json, the file itself, or one of {', '.join(CONFIGS)}"
        fix = f"did you mean {near[0]!r}?" if near else forms
        raise LayoutError(f"there is no {quoted(str(file))}; {fix}", path=str(file))
    with refused_as(LayoutError, quoted(str(file)), "fix the file", path=str(file)):
        found = parse_json(read_text(file))
    if not isinstance(found, dict) or "model_type" not in found:
        raise LayoutError(
            f"{quoted(str(file))} has no model_type; give the config.json of a Hugging Face model", path=str(file)
        )
    return found


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A model's config.json, its folder, or a name: llama3-8b."),
    ],
    side: Annotated[
        str,
        typer.Option(
            metavar="SIDE", help="The framework and its sizes: vllm:tp=8,pp=2; transformers:tp=2,fsdp=4; ep=1, dp=2."
        ),
    ],
) -> Answer:
    """Print how a framework shards every weight of a model, from its own loader run without weights.

    The framework runs as every rank in turn, in this process; without it, rankmesh's own table answers for common
    models. Equal layers are one line; tensors without a sharding are listed with the reason. rankmesh transfer reads
    what --json prints.

    $ rankmesh layout ./Llama-3.1-8B --side vllm:tp=8
    $ rankmesh layout config.json --side transformers:tp=2,fsdp=4 --json
    $ rankmesh layout qwen3-8b --side megatron:tp=4,pp=2
    """
    from rankmesh.readers.model import described
    from rankmesh.transfer.layouts.known import known
    from rankmesh.transfer.layouts.sides import layout

    config = config_of(model)
    try:
        found = layout(side, config)
    except MissingExtra as error:
        table = known(side, config, described)
        if table is None:
            raise
        note(f"note: from rankmesh's own table, as {first_line(error)}")
        found = table
    return Answer(found.to_dict, lambda: _print(found))


def _print(found: Layout) -> None:
    equal: dict[tuple[str, ...], list[str]] = {}
    for name, sharding in found.shardings.items():
        data: dict[str, Any] = sharding.to_dict()
        notes = [f"at {axis}={','.join(map(str, places))}" for axis, places in data.get("at", {}).items()]
        notes += [f"parts {quoted(parts)}" for parts in data.get("parts", {}).values()]
        notes += [f"padded to {length}" for length in (sharding.padded or {}).values()]
        row = (" x ".join(map(str, sharding.shape)), sharding.dtype, cut_text(sharding), "; ".join(notes))
        equal.setdefault(row, []).append(name)
    rows = [(pattern, *row) for row, names in equal.items() for pattern in patterns(names)]
    if rows:
        print_table(("tensor", "shape", "dtype", "cut by", "where"), rows)
    for line in reasons(found.refused):
        write_filled(f"refused: {line}")


def cut_text(sharding: Sharding) -> str:
    """Return the axes that cut each dimension: ``tp, -``."""
    return ", ".join(axes or "-" for axes in sharding.cut or ())
