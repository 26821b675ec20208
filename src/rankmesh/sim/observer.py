"""Observers: what looks at the calls of a simulation, and may change them, as a comparison of layouts does.

```
rank ── SimulatedGroup ── route ── channel ── compute ── computed ── results
                          another group?                 another result?
rank ── SimulatedGroup ── route_message ── channel ── delivered
                          another group, peer or tag?
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

    def route_message(
        self, pg: SimulatedGroup, call: Call, peer: int | None, tag: int
    ) -> tuple[SimulatedGroup, int | None, int]:
        """The group, the peer and the tag with which a send or a receive is made; on the thread of its rank."""
        return pg, peer, tag

    def delivered(self, send: Call, recv: Call) -> None:
        """What was sent has been received."""
