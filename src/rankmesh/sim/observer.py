"""Observers: what looks at the collectives of a simulation, and may change them, as a comparison of layouts does.

```
rank ── SimulatedGroup ── route ── channel ── compute ── computed ── results
                          another group?                 another result?
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankmesh.sim.calls import Call
    from rankmesh.sim.channel import Channel
    from rankmesh.sim.group import SimulatedGroup

__all__ = ["Observer"]


class Observer:
    """Does nothing; a subclass overrides what it needs."""

    def route(self, pg: SimulatedGroup, call: Call) -> SimulatedGroup:
        """The group on which a collective is made; called on the thread of its rank."""
        return pg

    def computed(self, channel: Channel, calls: Sequence[Call]) -> None:
        """The members' calls have their results, which may be replaced."""
