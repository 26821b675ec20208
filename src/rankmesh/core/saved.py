"""Saved plans: JSON with a schema version, and the digest of the data.

```
{"schema": 1, "mesh": {"axes": [["tp", 2], ...], "offset": 0, ...}, "groups": [{"name": "tp", ...}, ...], ...}
```

The digest is the SHA-256 of the same data in one canonical spelling, without the schema version and without the options
that only later groups would inherit: each group has its own in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

from rankmesh.core.mesh import MeshData
from rankmesh.core.options import GivenOptions
from rankmesh.core.spec import SpecData
from rankmesh.errors import PlanError, quoted

if TYPE_CHECKING:
    from rankmesh.core.plan import Plan

__all__ = ["SCHEMA", "PlanData", "contents", "digest_of", "dump", "load"]

SCHEMA = 1
_FORM = "a plan has a mesh and groups; write one with Plan.to_json()"


class PlanData(TypedDict, total=False):
    """A plan as plain data; without ``world_size`` its world is what the mesh spans."""

    mesh: MeshData
    groups: list[SpecData]
    world_size: int
    name: str
    options: GivenOptions
    view_options: dict[str, GivenOptions]


def contents(plan: Plan) -> PlanData:
    """Return a plan as plain data, the same on every rank."""
    data: PlanData = {"mesh": plan.mesh.to_dict(), "groups": [spec.to_dict() for spec in plan.specs]}
    if plan.fixed_world:
        data["world_size"] = plan.world_size
    if plan.name:
        data["name"] = plan.name
    return data


def digest_of(plan: Plan) -> str:
    """Return the SHA-256 of the canonical JSON of a plan's contents."""
    text = json.dumps(contents(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def dump(plan: Plan, *, indent: int | None) -> str:
    """Return the JSON text of a plan."""
    return json.dumps({"schema": SCHEMA, **contents(plan), **_inherited(plan)}, indent=indent)


def _inherited(plan: Plan) -> dict[str, Mapping[str, object]]:
    of_views = {view: options.to_dict() for view, options in plan.view_options.items()}
    data: dict[str, Mapping[str, object]] = {
        "options": plan.options.to_dict(),
        "view_options": {view: of for view, of in of_views.items() if of},
    }
    return {key: value for key, value in data.items() if value}


def load(text: str, make: Callable[[PlanData], Plan]) -> Plan:
    """Return the plan that ``make`` makes of a JSON text. Raises ``PlanError`` for another text."""
    from rankmesh.core.documents import INDEX, parse_json, refused_as

    with refused_as(PlanError, "the saved plan", _FORM):
        data = parse_json(text, INDEX)
        _check_schema(data)
        return make(data)


def _check_schema(data: object) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise PlanError(
            f"this JSON has the schema {quoted(schema)}, but a saved plan has one from 1 to {SCHEMA}; write one with "
            "Plan.to_json()",
            schema=schema,
        )
    if schema > SCHEMA:
        raise PlanError(
            f"this plan has schema {schema}, but this version of rankmesh reads up to {SCHEMA}; upgrade rankmesh",
            schema=schema,
            newest=SCHEMA,
        )
