"""The rounds in which the members agree how to go on after an epoch, through the store of the lowest that lives.

Members that have not arrived are asked where they are:

```
a reply in this epoch      it may arrive             gone, as its ports refuse        it does not
a reply in a later one     the others went on        no reply for the timeout         it does not
                                                     evicted, whatever it replies     it does not
```
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rankmesh.errors import AgreementError, ConnectError
from rankmesh.rendezvous import Arrivals, Outcome, Proposal, Round, StoreChannel, UntilEnough
from rankmesh.survival.agreement import EpochEnd, Report, conclude
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.heartbeat import REPLY, Message, Presence
from rankmesh.survival.transport import Connection, Transport
from rankmesh.survival.world import has_finished

__all__ = ["Probe", "Rounds"]

# The share of the timeout in which a member replies that is slow.
_SLOW = 0.25


@dataclass
class Probe:
    """The replies of members that have not arrived at the end of an epoch, since ``started``."""

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
        """Return whether a member replies now."""
        self.ask([member])
        return isinstance(self._last[member], dict)

    def gone(self, member: int) -> bool:
        """Return whether the ports of a member refuse connections."""
        return self._last.get(member) == "gone"

    def went_on(self, member: int) -> bool:
        """Return whether a member last replied from a later epoch, or from one that follows another agreement."""
        return self._is_elsewhere(self._last.get(member))

    def _is_elsewhere(self, reply: object) -> bool:
        found = _epoch_of(reply)
        return found != self.epoch and found.number >= self.epoch.number

    def outcome(self) -> Outcome | None:
        """Return the outcome that other members have already, None if none has; its server may be lost by now."""
        for reply in self._last.values():
            if isinstance(reply, dict) and isinstance(reply.get("outcome"), str):
                return Outcome.read(reply["outcome"], "outcome")
        if any(map(self._is_elsewhere, self._last.values())):
            return Outcome("failed", message="the others went on, without this member")
        return None

    def lower_server(self, member: int) -> int | None:
        """Return the lowest member below this one that serves a round of this epoch, None if there is none."""
        servers = [
            reply["server"]
            for reply in self._last.values()
            if isinstance(reply, dict) and _epoch_of(reply) == self.epoch and isinstance(reply.get("server"), int)
        ]
        lowest = min(servers, default=member)
        return lowest if lowest < member and lowest not in self.evicted else None

    def serves_no_more(self, server: int) -> bool:
        """Return whether the member that serves this round takes part in another; it is asked a few times a timeout."""
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
        """Return whether any of these members may still arrive; False once others have gone on."""
        self.ask(members)
        return self.outcome() is None and any(map(self.may_arrive, members))

    def may_arrive(self, member: int) -> bool:
        """Return whether a member may still arrive, by what it replied last."""
        reply = self._last.get(member, {})
        if reply == "gone" or member in self.evicted:
            return False
        if reply != "unresponsive":
            return True
        since = self._replied.get(member, self.started)
        return member not in self.suspects and self.peers.now() - since < self.timeout

    def ask(self, members: Collection[int]) -> None:
        """Ask members where they are, and for the outcome; wait longer next time if one does not reply."""
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


_log = logging.getLogger("rankmesh.survival")

# How many timeouts a member that lives may take to come back from ``train``.
_PATIENCE = 6
# Of the timeout: who gave no reply for so long may have been left out, and has not seen what ended since.
_STILL = 0.75
# The value of an outcome after which members that may not go on wait no longer.
_FINAL = {"final": True}
# Of the timeout: between two rounds of members that may not go on without the others.
_PAUSE = 0.1


class Rounds:
    """The rounds of one member; ``took_part``: it reported to the round of the last outcome.

    ``server`` is the member whose store the round is in that this member takes part in, None between rounds.
    """

    def __init__(self, timeout: float) -> None:
        self.took_part = True
        self.server: int | None = None
        self._timeout = timeout
        self._client: tuple[int, Connection] | None = None

    def agree(self, peers: Transport, end: EpochEnd, report: Report) -> Outcome:
        """Hold one round of all members; hold it again through another store if the member that serves it is lost.

        Members that may not go on without the others hold rounds for the timeout: a network may reject for a moment.
        """
        started = peers.now()
        limit, is_logged = started + 2 * _PATIENCE * self._timeout, False
        while True:
            outcome = self._round(peers, end, report, started)
            if outcome is not None and (outcome.agreed or outcome.reason == "failed" or outcome.value == _FINAL):
                return outcome
            if outcome is not None and outcome.reason == "missing":
                if not is_logged:
                    _log.warning("rankmesh: member %d waits %g s: %s", peers.member, self._timeout, outcome.message)
                is_logged = True
                peers.event().wait(_PAUSE * self._timeout)
            if peers.now() > limit:
                return outcome or Outcome("lost", message="the members reached no agreement")

    def release(self, server: int) -> Connection | None:
        """Return the connection of the last round if it is to the store of ``server``; the caller then owns it."""
        client, self._client = self._client, None
        return client[1] if client is not None and client[0] == server else None

    def close(self) -> None:
        """Leave the store of the last round."""
        self._client = None

    def _round(self, peers: Transport, end: EpochEnd, report: Report, started: float) -> Outcome | None:
        members = end.history[end.epoch.number]
        me, everyone = peers.member, sorted(members.all)
        probe = Probe(peers, end.epoch, end.suspects, end.evicted, self._timeout, started)
        server = self._server(me, everyone, probe)
        if server is None:
            return None

        def concluded(arrivals: Arrivals) -> Outcome:
            absent = arrivals.absent
            probe.ask(absent)
            if (others := probe.outcome()) is not None:
                self.took_part = False
                return others
            reports = {
                member: Report.read(texts[-1]) for member, texts in arrivals.texts.items() if member not in absent
            }
            reports[me] = replace(report, ended=self._ended(peers, everyone))
            size = members.plan.mesh.size
            if bool(absent) and found.ask(lambda: has_finished(client.store, end.epoch, size)):
                return Outcome(value={"over": True})  # whoever is absent knows it, and may have ended since
            # A rank that was stopped cannot tell whether the others died or the job finished without it.
            gone = [member for member in absent if probe.gone(member)]
            if len(gone) == len(everyone) - 1 and (seconds := peers.stood_still()) >= _STILL * self._timeout:
                message = f"member {me} stood still for {seconds:.0f} s, and the others ended without it"
                return Outcome("failed", (me,), message=message)
            outcome = conclude(
                end.history, end.epoch.number, reports, gone, end.raised, before=end.before, refused=end.refused
            )
            final = outcome.reason == "missing" and peers.now() > started + self._timeout
            return replace(outcome, value=_FINAL) if final else outcome

        if probe.went_on(server):
            self.took_part = False
            return probe.outcome()
        try:
            client = self._connected(peers, server)
            channel = StoreChannel(client.store, "survive")
            found = Round(channel, f"epoch/{end.epoch}", everyone, me, server == me, patience=1.0)

            def enough(arrivals: Arrivals) -> bool:
                if server != me:
                    if server in end.evicted:
                        raise ConnectError(f"member {server}, which serves the round, may be left out")
                    # A member that connects late may wait in a round that its server has left.
                    if probe.serves_no_more(server) and not arrivals.concluded:
                        raise ConnectError(f"member {server} serves the round no more")
                    return False
                # Whoever serves the round asks for all: so what the others ask of it does not grow with their number.
                if not probe.any_may_arrive(arrivals.absent):
                    return True
                # A member that was stopped for a while wakes, and serves a round of its own.
                if (other := probe.lower_server(me)) is not None:
                    raise ConnectError(f"member {other} serves the round, too, and is lower")
                return False

            policy = UntilEnough(_PATIENCE * self._timeout, enough)
            self.took_part, self.server = True, server
            mine = replace(report, ended=self._ended(peers, everyone))
            outcome = found.step("members", Proposal(text=mine.text), concluded, policy)
            found.leave(outcome, stay=bool(outcome.value and outcome.value.get("over")))
        except (ConnectError, AgreementError):
            self._client = None
            return None
        finally:
            self.server = None
        return outcome

    def _server(self, me: int, everyone: Sequence[int], probe: Probe) -> int | None:
        """Return the lowest member that lives and is not to be left out; None if that is not known yet."""
        for member in everyone:
            if member in probe.evicted:
                continue
            if member == me or probe.alive(member):
                return member
            if probe.may_arrive(member):
                return None
        return None

    def _ended(self, peers: Transport, members: Sequence[int]) -> tuple[int, ...]:
        """Return the members that this one knows to have ended; none if this one was stopped.

        The others may have gone on without it meanwhile, and what ended since says nothing about this epoch.
        """
        is_witness = peers.stood_still() < _STILL * self._timeout
        return tuple(sorted(peers.ended(members))) if is_witness else ()

    def _connected(self, peers: Transport, server: int) -> Connection:
        if self._client is None or self._client[0] != server:
            self._client = (server, peers.client(server, self._timeout))
        return self._client[1]
