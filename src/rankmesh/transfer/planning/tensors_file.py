"""Tensors files: how each tensor is sharded on both sides of a transfer, as JSON or YAML.

```
{"name": {"shape": [16384, 4096], "dtype": "bfloat16",
          "source": {"cut": ["tp", null], "at": {"pp": 1}},         also view, parts, padded
          "target": {"cut": [null, "tp"]}}}
```

>>> from rankmesh.core.mesh import Mesh
>>> source, target = shardings_of(
...     {"up": {"shape": [8, 4], "source": {"cut": ["tp", None]}, "target": {}}}, Mesh(tp=2), Mesh(dp=2)
... )
>>> source["up"].of(1).boxes, target["up"].of(1).boxes
((((4, 8), (0, 4)),), (((0, 8), (0, 4)),))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankmesh.core.documents import INDEX, parse, read_text, refused_as
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, RankmeshError, first_line, quoted, quoted_path

__all__ = ["read_tensors", "shardings_of"]

_BOTH = ("shape", "dtype", "source", "target")
_SIDE = ("cut", "at", "view", "parts", "padded")

_FORM = 'write {"name": {"shape": [8, 4], "dtype": "bfloat16", "source": {"cut": ["tp", null]}, "target": {}}}'

Shardings = dict[str, Sharding]


def read_tensors(path: str | Path, source: Mesh, target: Mesh) -> tuple[Shardings, Shardings]:
    """Return the shardings of a tensors file on a source and a target mesh. Raises ``PlanError`` for what is none."""
    with refused_as(PlanError, f"tensors file {quoted_path(path)}", _FORM, path=str(path)):
        return shardings_of(parse(read_text(path, INDEX.size)), source, target, str(path))


def shardings_of(document: object, source: Mesh, target: Mesh, what: str = "tensors") -> tuple[Shardings, Shardings]:
    """Return the shardings of a document that was read, on both meshes."""
    if not isinstance(document, Mapping) or not document:
        raise _refused(what, "no tensor is named")
    ours: Shardings = {}
    theirs: Shardings = {}
    for name, entry in document.items():
        _known(what, name, entry, _BOTH)
        if "shape" not in entry:
            raise _refused(what, f"{quoted(name)} has no shape")
        if not isinstance(entry["shape"], list | tuple):
            raise _refused(what, f"{quoted(name)} has the shape {quoted(entry['shape'])}")
        for side, mesh, found in (("source", source, ours), ("target", target, theirs)):
            found[str(name)] = _sharding(
                f"{what}, {name!r}, {side}", mesh, entry, {} if entry.get(side) is None else entry[side]
            )
    return ours, theirs


def _sharding(what: str, mesh: Mesh, entry: Mapping[str, Any], side: Any) -> Sharding:
    _known(what, "", side, _SIDE)
    for name, kind in (("cut", list | tuple), ("at", Mapping), ("padded", Mapping)):
        if side.get(name) is not None and not isinstance(side[name], kind):
            raise _refused(what, f"its {name} is {quoted(side[name])}")
    given = {name: _numbered(side[name]) if name in ("parts", "padded") else side[name] for name in side}
    if given.get("cut") is not None:
        given["cut"] = tuple("-".join(axes) if isinstance(axes, list) else axes for axes in given["cut"])
    given["at"] = {axis: tuple(p) if isinstance(p, list) else p for axis, p in (side.get("at") or {}).items()}
    try:
        return Sharding(mesh, shape=entry["shape"], dtype=entry.get("dtype", "float32"), **given)
    except RankmeshError as error:
        raise PlanError(f"{what}: {first_line(error)}", **error.values) from error


def _numbered(value: Any) -> Any:
    """Dimensions are numbers, which JSON writes as text."""
    if not isinstance(value, Mapping):
        return value
    return {int(dim) if str(dim).isdigit() else dim: given for dim, given in value.items()}


def _known(what: str, name: object, entry: object, known: tuple[str, ...]) -> None:
    where = quoted(name) if name else "it"
    if not isinstance(entry, Mapping):
        raise _refused(what, f"{where} is {quoted(entry)}, not an object with {', '.join(known)}")
    strange = [key for key in entry if key not in known]
    if strange:
        raise _refused(what, f"{where} has the key {quoted(strange[0])}, none of {', '.join(known)}")


def _refused(what: str, why: str) -> PlanError:
    return PlanError(f"{what}: {why}; {_FORM}")
