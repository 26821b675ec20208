"""Reports: what exists on this rank, what is shared, with which options, and what it cost.

```
group   size  position  communicator   options
tp      2     1         own            gloo, 1800 s
embd    2     0         pp's           gloo, 1800 s
cp      1     0         none needed    gloo, 1800 s
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rankmesh.core.local import LocalGroup

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups

__all__ = ["GroupReport", "Report", "report_of"]

_SHOWN = 8


@dataclass(frozen=True)
class GroupReport:
    """One group: ``communicator`` is the name of the group whose process group it uses, None for one rank."""

    name: str
    description: str
    ranks: tuple[int, ...]
    position: int
    communicator: str | None
    created: bool
    backend: str
    timeout: float
    options: Mapping[str, object]


@dataclass(frozen=True, repr=False)
class Report:
    """One rank's live groups; ``phases`` are seconds, ``communicators`` counts process groups with a communicator."""

    rank: int
    world_size: int
    digest: str
    epoch: int
    communicators: int
    groups: tuple[GroupReport, ...]
    phases: dict[str, float]

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=indent)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of groups as text, the heads first."""
        head = ("group", "size", "position", "communicator", "options", "members")
        return [head, *(_row(group) for group in self.groups)]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        spent = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.phases.items() if " " not in phase)
        title = f"rank {self.rank} of {self.world_size}, plan {self.digest[:12]}, epoch {self.epoch}"
        return "\n".join([f"{title}: {len(self.groups)} groups, {self.communicators} communicators; {spent}", *lines])


def _row(group: GroupReport) -> tuple[str, ...]:
    size = len(group.ranks)
    if group.communicator is None:
        communicator = "none needed"
    else:
        communicator = "own" if group.communicator == group.name else f"{group.communicator}'s"
    if not group.created and group.communicator == group.name:
        communicator = "at first use"
    shown = ", ".join(map(str, group.ranks[:_SHOWN])) + (f", ... {size}" if size > _SHOWN else "")
    settings = {name: value for name, value in group.options.items() if name not in ("backend", "timeout")}
    options = ", ".join([group.backend, f"{group.timeout:g} s", *(f"{key} {value}" for key, value in settings.items())])
    return (group.name, str(size), str(group.position), communicator, options, f"[{shown}]")


def report_of(live: LiveGroups) -> Report:
    """Return the report of one rank's live groups."""
    groups = tuple(_group(live, local) for local in live.local.values())
    made = {group.communicator for group in groups if group.created and group.communicator}
    return Report(
        rank=live.rank,
        world_size=live.world_size,
        digest=live.plan.digest,
        epoch=live.epoch,
        communicators=len(made),
        groups=groups,
        phases=dict(live.phases),
    )


def _group(live: LiveGroups, local: LocalGroup) -> GroupReport:
    timeout = local.options.timeout
    return GroupReport(
        name=local.name,
        description=str(local),
        ranks=local.ranks,
        position=local.rank,
        communicator=local.canonical if local.size > 1 else None,
        created=live.is_made(local.canonical),
        backend=local.options.backend or live.world.default.backend,
        timeout=live.world.default.timeout.total_seconds() if timeout is None else timeout,
        options=local.options.to_dict(),
    )
