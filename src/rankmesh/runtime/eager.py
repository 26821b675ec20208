"""At once: the groups whose pairs gloo connects when they are made, and how their members find each other.

```
told before the ranks agree       where this rank listens, and the number of the first pair of each of these groups
read when they have               the same of the other members
made                              without a word to the store
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.backend import torch_private
from rankmesh.backend.addresses import Address, Addresses
from rankmesh.backend.torch_private import DefaultGroup, GlooDevices
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.runtime.schedule import schedule

__all__ = ["AtOnce", "some_connect_at_once"]


def some_connect_at_once(plans: Mapping[str, Plan], world: DefaultGroup) -> bool:
    """Whether some rank has such a group: the same on all ranks that hold these plans."""
    return any(
        _is_at_once(spec.options, plan.groups(spec.name).size, world) for plan in plans.values() for spec in plan.specs
    )


def _is_at_once(options: Options, size: int, world: DefaultGroup) -> bool:
    return torch_private.connects_at_once(options.backend or world.backend, size, options.lazy)


@dataclass(frozen=True)
class AtOnce:
    """The groups of this rank that connect when they are made, by their step of the schedule, with the plan's key."""

    rank: int
    devices: GlooDevices
    groups: Mapping[int, tuple[str, LocalGroup]]

    @classmethod
    def of(
        cls, plans: Mapping[str, Plan], own: Mapping[str, LocalGroups], world: DefaultGroup, devices: GlooDevices
    ) -> AtOnce:
        """Those of these plans; ``own`` has this rank's part of each."""
        groups = {}
        for number, step in enumerate(schedule(plans, world)):
            group = own[step.key].get(step.kind)
            if group is not None and group.canonical == group.name and _is_at_once(group.options, group.size, world):
                groups[number] = step.key, group
        return cls(world.rank, devices, groups)

    def tell(self, addresses: Addresses) -> None:
        """Write where this rank listens, and its numbers there."""
        listening = self.devices.listening
        if self.groups and listening is not None:
            sizes = {number: group.size for number, (_, group) in self.groups.items()}
            addresses.tell(self.rank, *listening, self.devices.next_pairs(sizes))

    def found(self, addresses: Addresses) -> dict[tuple[str, str], list[Address]]:
        """The addresses of the members of each group, by plan and kind."""
        read = addresses.read({number: group.ranks for number, (_, group) in self.groups.items()})
        return {(key, group.name): read[number] for number, (key, group) in self.groups.items()}
