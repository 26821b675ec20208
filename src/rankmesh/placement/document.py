"""A cluster as a document: what ``rankmesh cluster --json`` prints, and what people write by hand.

```yaml
levels:                                     # innermost first; latency in s, bandwidth and uplink in bytes/s
  - {name: host}                            # what is not said is what nobody measured yet
  - {name: leaf, latency: 5.0e-6, bandwidth: 25.0e+9, uplink: 100.0e+9}
  - {name: spine, uplink: 400.0e+9}
hosts:
  - {name: "node[1-4]", devices: 8, leaf: a, spine: top}
  - {name: "node[5-8]", devices: 4, leaf: b, spine: top}
```

An outermost level that no host names is one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rankmesh.core.host_names import host_list
from rankmesh.errors import ClusterError, quoted
from rankmesh.placement.cluster import SCHEMA, Cluster, Host, Level

__all__ = ["cluster_of"]

_FORM = "a cluster has levels, each with a name, and hosts, each with a name and devices"


def cluster_of(data: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a document; ``ClusterError`` says what is wrong with it."""
    schema = data.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise ClusterError(
            f"this cluster has schema {quoted(schema)}, but this version of rankmesh reads {SCHEMA}; upgrade rankmesh",
            schema=schema,
        )
    _known(data, {"schema", "levels", "hosts", "rank_map"}, "a cluster")
    levels = tuple(_level(row, number) for number, row in enumerate(_rows(data, "levels")))
    names = [level.name for level in levels]
    rows = _rows(data, "hosts")
    unnamed = _unnamed(rows, names)
    hosts = tuple(host for row in rows for host in _hosts({**dict.fromkeys(unnamed, "all"), **row}, names))
    notes = tuple(f"no host names its {level}: all hosts are in one" for level in unnamed)
    rank_map = data.get("rank_map")
    if rank_map is not None and not isinstance(rank_map, list | tuple):
        raise ClusterError(f"rank_map is {quoted(rank_map)}; give a list of ranks, or leave it out")
    # A level that was added to join the others is written down, so the hosts of a document are joined as they are.
    return Cluster(levels, hosts, None if rank_map is None else tuple(rank_map), notes)


def _unnamed(rows: list[Mapping[str, Any]], levels: list[str]) -> tuple[str, ...]:
    """Return the outermost levels that no host names: all hosts are in one unit of them."""
    named = [number for number, level in enumerate(levels[1:], 1) if any(level in row for row in rows)]
    return tuple(levels[max(named, default=0) + 1 :])


def _rows(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = data.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ClusterError(f"{key} is {quoted(rows)}; {_FORM}; write a list of them", key=key)
    return rows


def _level(row: Mapping[str, Any], number: int) -> Level:
    _known(row, {"name", "latency", "bandwidth", "uplink"}, f"level {quoted(row.get('name'))}")
    level = Level.unmeasured(row.get("name", ""), number)
    return replace(level, **{key: row[key] for key in ("latency", "bandwidth", "uplink") if row.get(key) is not None})


def _hosts(row: Mapping[str, Any], levels: list[str]) -> Iterator[Host]:
    name = row.get("name")
    _known(row, {"name", "devices", *levels[1:]}, f"host {name!r}")
    places = tuple(_place(row, level, name) for level in levels[1:])
    if "devices" not in row:
        raise ClusterError(f"host {quoted(name)} does not say how many devices it has; add devices: 8", host=name)
    for listed in host_list(name if isinstance(name, str) else ""):
        yield Host(listed, row["devices"], places)


def _place(row: Mapping[str, Any], level: str, name: object) -> str:
    place = row.get(level)
    if not isinstance(place, str | int) or isinstance(place, bool) or place == "":
        raise ClusterError(
            f"host {quoted(name)} does not say its {level}; add {level}: a name",
            host=name,
            level=level,
        )
    return str(place)


def _known(row: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in row:
        if key not in known:
            raise ClusterError(
                f"{what} has the key {quoted(key)}, none of {', '.join(sorted(known))}; remove or rename it", key=key
            )
