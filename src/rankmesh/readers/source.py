"""A plan from what a user types: a SPEC, or the name of a file.

```
tp=2,cp=2,dp=4,pp=2 ...                             what rankmesh.core.source reads
plan.json                                           a saved plan
train.sh, train.toml, config.yaml, ds.json          a training config, recognised by what it holds
```

>>> read("tp=2,dp=2").plan.groups("dp").tolist()
[[0, 2], [1, 3]]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankmesh.core import source
from rankmesh.core.documents import INDEX, Invalid, Unreadable, parse_json, read_text, refused_as
from rankmesh.core.plan import Plan
from rankmesh.core.source import FORMS, RECIPES, check_fits, recipe_arguments
from rankmesh.errors import PlanError, RankmeshError, quoted, quoted_path

if TYPE_CHECKING:
    from rankmesh.readers.config import Config

__all__ = ["RECIPES", "Source", "read", "recipe_arguments"]

_FILES = (
    "give the path of a saved plan (plan.json) or of a training config (train.sh, train.toml, config.yaml, ds.json)"
)


@dataclass(frozen=True)
class Source(source.Source):
    """A plan and the text or file that it was read from, with the config if the file is one.

    ``hosts``  the hosts of a placed plan, in the order in which the launcher fills them
    """

    config: Config | None = None
    hosts: tuple[str, ...] = ()


def read(
    text: str | os.PathLike[str], *, world_size: int | None = None, variables: Mapping[str, str] | None = None
) -> Source:
    """Return the plan that ``text`` describes; ``world_size`` fills a ``*`` and must fit the rest. A path is of a file.

    ``variables``: the environment in which a launch script runs.
    """
    if not isinstance(text, str | os.PathLike):
        raise PlanError(f"{quoted(text)} is not a SPEC; {FORMS}", received=text)
    given = dict(variables or {})
    spec = source.read_spec(text, world_size=world_size) if isinstance(text, str) else None
    if spec is not None:
        found = Source(**vars(spec))
    else:
        found = _file(Path(text.strip() if isinstance(text, str) else text), world_size, given)
        check_fits(found.plan, str(text), world_size)
    if given and found.config is None:
        raise PlanError(
            f"variables ({', '.join(given)}) are set for {quoted(str(text))}, which is not a launch script; "
            "leave --set out",
            received=str(text),
        )
    return found


def _file(path: Path, world_size: int | None, variables: Mapping[str, str]) -> Source:
    with refused_as(PlanError, f"the path {quoted_path(path)}", _FILES, path=str(path)):
        text = read_text(path)
        if not text.strip():
            raise Unreadable("is an empty file")
        is_plan = _is_plan(text)
    if not is_plan:
        from rankmesh.readers.config import read_config

        config = read_config(text, str(path), world_size=world_size, variables=variables)
        return Source(config.plan, "config", str(path), config=config)
    try:
        return Source(Plan.from_json(text), "file", str(path), hosts=_hosts(text))
    except RankmeshError as error:
        raise PlanError(f"{path}: {error}", **{**error.values, "path": str(path)}) from error


def _hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a saved placement; empty for another plan."""
    hosts = parse_json(text, INDEX).get("hosts")
    return tuple(hosts) if isinstance(hosts, list) and all(isinstance(name, str) for name in hosts) else ()


def _is_plan(text: str) -> bool:
    """Return whether a file means to be a saved plan: it is JSON, and has a schema or is not a mapping."""
    try:
        data = parse_json(text, INDEX)
    except Invalid:
        return False
    return not isinstance(data, dict) or "schema" in data
