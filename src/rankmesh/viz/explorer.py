"""The explorer: one self-contained page on which people see, play with and share a layout.

```
explorer/src  ──make page──>  explorer.html  (in the wheel)  ──page(given)──>  FILE
                                                 given: the layout, its cluster, what was measured, what hangs
```

The page computes every layout itself, by the formula of `rankmesh.core` in TypeScript; tests in a browser hold the
two against each other. A layout that a SPEC says is given as that SPEC, so that it stays a thing to play with; any
other plan is given as it is.

>>> from rankmesh.readers.source import read
>>> data = given(read("tp=2,dp=2"))
>>> data["state"], fragment(data["state"])
({'spec': 'tp=2,dp=2', 'cluster': '8'}, 'spec=tp=2,dp=2&cluster=8')
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from urllib.parse import quote

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.saved import contents
from rankmesh.errors import PlacementError, RankmeshError
from rankmesh.readers.source import Source, read

__all__ = ["fragment", "given", "page", "spec_of"]

_PLACE = '<script type="application/json" id="given">null</script>'
# Devices of a host if none are given.
_DEVICES = 8
_MEASURED = ("name", "collective", "bytes", "seconds", "busbw", "slowest")


def given(
    source: Source,
    *,
    cluster: Cluster | str | None = None,
    measured: Mapping[str, object] | None = None,
    hang: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the page's data.

    ``cluster``   a cluster, or the axis string of one; without, the preset's hosts, or hosts of eight devices
    ``measured``  the document of ``rankmesh measure --json``
    ``hang``      the document of ``rankmesh doctor --json``, with ``turns``: who waits for whom, call by call

    Raises ``PlacementError`` for a document that is not a measurement of this plan.
    """
    spec, world = spec_of(source)
    state: dict[str, object] = {"spec": spec or "given"}
    if world is not None:
        state["world"] = world
    data: dict[str, object] = {"state": state}
    if spec is None:
        data |= {"title": source.text, "plan": contents(source.plan)}
    if isinstance(cluster, Cluster):
        state["cluster"], data["cluster"] = "given", cluster.whole_hosts().to_dict()
    else:
        state["cluster"] = cluster or str(source.preset.gpus_per_node if source.preset else _DEVICES)
    if measured is not None:
        data["measured"] = _checked(measured, source)
        state["overlay"] = "measured"
    if hang is not None:
        data["hang"] = hang
        state["overlay"] = "slow" if hang.get("speed") and not (hang["causes"] or hang["waiting"]) else "hang"
    return data


def page(data: Mapping[str, object]) -> str:
    """Return the page with this given, as HTML text; it loads nothing from anywhere.

    >>> text = page({"state": {"spec": "tp=2,dp=2"}})
    >>> text.startswith("<!doctype html>"), '"tp=2,dp=2"' in text
    (True, True)
    """
    text = files("rankmesh.viz").joinpath("explorer.html").read_text(encoding="utf-8")
    # Inside a script element a text must not look like its end.
    inside = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return text.replace(_PLACE, _PLACE.replace("null", inside))


def fragment(state: Mapping[str, object]) -> str:
    """Return the fragment (after ``#``) of the page's address for this state.

    >>> fragment({"spec": "tp=2,dp=*", "world": 8})
    'spec=tp=2,dp=*&world=8'
    """
    return "&".join(f"{name}={quote(str(value), safe='=,:/*')}" for name, value in state.items())


def spec_of(source: Source) -> tuple[str | None, int | None]:
    """Return the SPEC from which the page makes the plan, with the world size that it needs; None if there is none.

    A training config is the recipe of its lines.

    >>> spec_of(read("tp=2,dp=*", world_size=8))
    ('tp=2,dp=*', 8)
    """
    if source.kind in ("axes", "recipe", "preset"):
        complete = source.kind == "preset" or _makes(source.text, source)
        return source.text, None if complete else source.plan.world_size
    return (None if source.config is None else source.config.spec), None


def _makes(spec: str, source: Source) -> bool:
    try:
        return read(spec).plan == source.plan
    except RankmeshError:
        return False


def _checked(measured: Mapping[str, object], source: Source) -> dict[str, object]:
    """Return a measurement whose rows name kinds of the plan."""
    rows = measured.get("kinds")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= set(_MEASURED) for row in rows):
        raise PlacementError(
            f"the document is not a measurement: it has no kinds with {', '.join(_MEASURED)}; write one with "
            "rankmesh measure SPEC --json"
        )
    for row in rows:
        count = len(source.plan.groups(row["name"]))
        if len(row.get("groups", ())) not in (0, count):
            raise PlacementError(
                f"the measurement has {len(row['groups'])} groups of {row['name']}, but this plan has {count}; measure "
                "this layout, or show the one that was measured",
                kind=row["name"],
                groups=count,
            )
    return {"backend": str(measured.get("backend", "")), "kinds": rows, "slow_hosts": measured.get("slow_hosts", [])}
