"""Who may still arrive at the end of an epoch: what members reply that are asked where they are.

```
a reply in this epoch      it may arrive             gone, as its ports refuse        it does not
a reply in a later one     the others went on        no reply for the timeout         it does not
                                                     evicted, whatever it replies     it does not
```
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from rankmesh.rendezvous import Outcome
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.heartbeat import REPLY, Message, Presence
from rankmesh.survival.transport import Transport

__all__ = ["Probe"]

# The share of the timeout in which a member replies that is slow.
_SLOW = 0.25


@dataclass
class Probe:
    """What is known of members that have not arrived at the end of an epoch, since ``started``."""

    peers: Transport
    epoch: Epoch
    suspects: Collection[int]
    evicted: Collection[int]
    timeout: float
    started: float
    _last: dict[int, Message | Presence] = field(default_factory=dict)
    _replied: dict[int, float] = field(default_factory=dict)
    _seconds: float = REPLY
    _asked: float | None = None

    def alive(self, member: int) -> bool:
        """Whether a member replies now."""
        self.ask([member])
        return isinstance(self._last[member], dict)

    def gone(self, member: int) -> bool:
        """Whether the ports of a member refuse connections."""
        return self._last.get(member) == "gone"

    def went_on(self, member: int) -> bool:
        """Whether a member was in a later epoch when it replied last, or in one that follows another agreement."""
        return self._is_elsewhere(self._last.get(member))

    def _is_elsewhere(self, reply: object) -> bool:
        found = _epoch_of(reply)
        return found != self.epoch and found.number >= self.epoch.number

    def outcome(self) -> Outcome | None:
        """Return the outcome that others have already: its server may have been lost before this member read it."""
        for reply in self._last.values():
            if isinstance(reply, dict) and isinstance(reply.get("outcome"), str):
                return Outcome.read(reply["outcome"], "outcome")
        if any(map(self._is_elsewhere, self._last.values())):
            return Outcome("failed", message="the others went on, without this member")
        return None

    def lower_server(self, member: int) -> int | None:
        """Return a member below this one that others take part in a round of, in this epoch, None if there is none."""
        servers = [
            reply["server"]
            for reply in self._last.values()
            if isinstance(reply, dict) and _epoch_of(reply) == self.epoch and isinstance(reply.get("server"), int)
        ]
        lowest = min(servers, default=member)
        return lowest if lowest < member and lowest not in self.evicted else None

    def serves_no_more(self, server: int) -> bool:
        """Whether a member, in whose store this one waits, takes part in another round; asked a few times a timeout."""
        now = self.peers.now()
        self._asked = now if self._asked is None else self._asked
        if now - self._asked < _SLOW * self.timeout:
            return False
        self._asked = now
        self.ask([server])
        reply = self._last.get(server)
        elsewhere = isinstance(reply, dict) and reply.get("server") not in (None, server)
        return elsewhere or self.went_on(server)

    def any_may_arrive(self, members: Collection[int]) -> bool:
        """Whether one of these lives, or has been unresponsive for less than the timeout; not once others went on."""
        self.ask(members)
        return self.outcome() is None and any(map(self.may_arrive, members))

    def may_arrive(self, member: int) -> bool:
        """Whether a member may still arrive, by what it replied last."""
        reply = self._last.get(member, {})
        if reply == "gone" or member in self.evicted:
            return False
        if reply != "unresponsive":
            return True
        since = self._replied.get(member, self.started)
        return member not in self.suspects and self.peers.now() - since < self.timeout

    def ask(self, members: Collection[int]) -> None:
        """Ask members where they are, and for the outcome; where one does not reply, with more patience next time."""
        message = {"what": "outcome", "epoch": str(self.epoch)}
        self._last.update(self.peers.exchange(members, message, self._seconds))
        is_slow = any(self._last.get(member) == "unresponsive" and member not in self.suspects for member in members)
        self._seconds = min(2 * self._seconds, max(REPLY, _SLOW * self.timeout)) if is_slow else REPLY
        now = self.peers.now()
        self._replied.update((member, now) for member in members if isinstance(self._last.get(member), dict))


def _epoch_of(reply: object) -> Epoch:
    """Return the epoch that a member replied with; without a reply, one before all others."""
    with suppress(ValueError, KeyError):
        if isinstance(reply, dict):
            return Epoch.read(reply["epoch"])
    return Epoch(-1)
