"""Torch's registries of process groups: entering, leaving, counting and reading them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _register_process_group
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.options import config

__all__ = [
    "Positions",
    "describe",
    "every_group",
    "place_of",
    "register",
    "registered",
    "registries",
    "set_timeout",
    "unregister",
]


class Positions(Mapping[int, int]):
    """The position of each member by its global rank; all are listed when torch first asks for one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    @cached_property
    def _listed(self) -> dict[int, int]:
        return {member: position for position, member in enumerate(self._ranks)}

    def __getitem__(self, rank: int) -> int:
        return self._listed[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._ranks)


def register(pg: dist.ProcessGroup, backend: str, store: Store, name: Any, desc: str, ranks: Mapping[int, int]) -> None:
    """Enter a process group in torch's registries; ``ranks`` has the position of each member by its global rank."""
    known, tag = c10d.Backend(backend), f"ptd:{name}"
    pg._set_group_name(name)
    pg._set_group_desc(desc)
    c10d._world.pg_map[pg] = (known, store)
    c10d._world.pg_names[pg] = name
    c10d._world.pg_backend_config[pg] = config(known)[1]
    c10d._world.pg_to_tag[pg] = tag
    c10d._world.tags_to_pg.setdefault("", []).append(pg)
    c10d._world.tags_to_pg.setdefault(tag, []).append(pg)
    c10d._world.pg_group_ranks[pg] = ranks  # type: ignore[assignment]  # torch has a dict, and only reads
    _register_process_group(name, pg)


def set_positions(pg: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Let torch's translation of ranks have the members in this order."""
    c10d._world.pg_group_ranks[pg] = Positions(ranks)  # type: ignore[assignment]  # torch has a dict, and only reads


def place_of(pg: dist.ProcessGroup) -> tuple[str, Store] | None:
    """Backend and store of a process group, None for one that torch does not have any more."""
    if pg not in c10d._world.pg_map:
        return None
    backend, store = c10d._world.pg_map[pg]
    return str(backend), store


def unregister(pg: dist.ProcessGroup) -> None:
    """Destroy a process group, and drop the empty list that torch leaves behind, one for each group ever made."""
    tag = c10d._world.pg_to_tag.get(pg)
    dist.destroy_process_group(pg)
    if tag is not None and not c10d._world.tags_to_pg.get(tag, True):
        del c10d._world.tags_to_pg[tag]


def registries() -> dict[str, int]:
    """Return the number of entries in each of torch's registries of process groups."""
    named = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")
    sizes = {name: len(getattr(c10d._world, name)) for name in named}
    sizes["tags_to_pg"] = sum(1 + len(groups) for groups in c10d._world.tags_to_pg.values())
    return sizes | {"group_count": c10d._world.group_count}


def registered(known: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the process groups of this rank that are not ``known``: name, description, members by position."""
    found = {}
    for pg, name in list(c10d._world.pg_names.items()):
        positions = c10d._world.pg_group_ranks.get(pg)
        if positions and str(name) not in known:
            found[str(name)] = pg.group_desc, tuple(sorted(positions, key=positions.__getitem__))
    return found


def every_group() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank that torch has now, whoever made them."""
    return list(c10d._world.pg_map)


def describe(pg: dist.ProcessGroup, text: str) -> None:
    """Give a process group the description that torch's logs show."""
    pg._set_group_desc(text)


def set_timeout(pg: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a process group, None the world's; a group without communicator keeps none."""
    group = c10d._get_default_group() if pg is None else pg
    if group.size() > 1 and "fake" not in str(c10d._world.pg_map[group][0]):
        c10d._set_pg_timeout(timeout, group)
