"""In which fields two plain documents differ, by their names."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["differences"]


def differences(ours: object, theirs: object, path: str = "") -> list[tuple[str, str, str]]:
    """The fields in which two plain documents differ: (path, ours, theirs).

    >>> differences({"mesh": {"axes": [["tp", 2]]}}, {"mesh": {"axes": [["tp", 4]]}})
    [('mesh.axes.tp', '2', '4')]
    """
    if ours == theirs:
        return []
    left, right = _mapping(ours), _mapping(theirs)
    if left is None or right is None or (list(left) != list(right) and set(left) == set(right)):
        return [(path or "plan", _short(ours), _short(theirs))]
    found = []
    for key in dict.fromkeys([*left, *right]):
        here = f"{path}.{key}" if path else str(key)
        found += differences(left.get(key), right.get(key), here)
    return found


def _mapping(value: object) -> dict[str, Any] | None:
    """A mapping as it is; lists of named things (axes, groups) by their names; else None."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return dict(value)
    return None


def _short(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
