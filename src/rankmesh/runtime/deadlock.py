"""Ranks that wait for each other in several rounds: each round waits for a rank that waits in another one.

```
ranks 0-3  wait for rank 2, which waits in 2-4     neither can become complete any more: both end, with
ranks 2-4  wait for rank 3, which waits in 0-4     what differs between the plans
```

How many ranks of the world wait is counted in the store. The last of them looks at the rounds that have no outcome yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rankmesh.errors import ConnectError
from rankmesh.rendezvous import Arrivals, Outcome, Round, lost
from rankmesh.rendezvous.step import AlreadyConcluded

__all__ = ["Waiting"]

_WAITING, _KNOWN = "waiting", "rounds"
_STEP = "agree"
# Times the moment in which a rank answers: in a deadlock there is time.
_PATIENT = 2
_POLL = 0.05


class Waiting:
    """The ranks of a world that wait in some round, and this rank, which waits in ``local``."""

    def __init__(self, local: Round, world_size: int, differ: Callable[[Sequence[Arrivals]], Outcome]) -> None:
        self._round, self._size, self._differ = local, world_size, differ
        self._of_the_world = len(local.participants) == world_size

    # -- who waits ----------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """This rank waits from now on; whether every rank of the world does by that."""
        local = self._round

        def begin() -> bool:
            me, new = str(local.rank), not self._of_the_world and local.epoch == 0
            if new and local.channel.first(f"{local.name}/known", me) == me:
                # Whoever asks where ranks wait looks there too.
                local.channel.post(_KNOWN, local.rank, local.name)
            return local.channel.tick(_WAITING, 1) >= self._size

        return local.ask(begin)

    def stop(self) -> None:
        """This rank waits no longer."""
        with suppress(ConnectError):
            self._round.ask(lambda: self._round.channel.tick(_WAITING, -1))

    def all_go_on(self) -> None:
        """No participant of this round waits any longer."""
        channel, ranks = self._round.channel, self._round.participants
        if self._of_the_world:
            self._round.ask(lambda: channel.delete([_WAITING]))
        else:
            self._round.ask(lambda: channel.tick(_WAITING, -len(ranks)))

    def elsewhere(self, absent: Iterable[int]) -> str:
        """Where the first of these ranks waits instead, in words."""
        away = set(absent)
        found = {rank: other.round for other in self._open() for rank in away.intersection(_here(other))}
        if not found:
            return ""
        ranks = found[min(found)].participants
        return f"; rank {min(found)} waits to connect a plan of the ranks {ranks[0]} to {ranks[-1]}"

    # -- the deadlock -------------------------------------------------------------------------------------------

    def end_deadlocked(self) -> None:
        """End the deadlocked rounds that no other rank ends."""
        mine = [arrivals for arrivals in _deadlocked(self._all_arrived()) if arrivals.coordinated_here()]
        # First all of them get a next epoch: a rank that has an outcome joins no round that is still without one.
        for arrivals in mine:
            arrivals.supersede()
        mine = [arrivals for arrivals in mine if _probed(arrivals)]
        unresponsive = {id(arrivals): arrivals.unresponsive(_PATIENT, besides=arrivals.absent) for arrivals in mine}
        # All outcomes, and only then the first of them: a rank that has one deletes its texts.
        outcomes = []
        for arrivals in mine:
            rivals = [other for other in mine if set(_here(other)).intersection(arrivals.round.participants)]
            missing = [rank for other in rivals for rank in unresponsive[id(other)]]
            outcomes.append(lost(missing, "had arrived") if missing else self._differ(rivals))
        for arrivals, outcome in zip(mine, outcomes, strict=True):
            arrivals.announce(outcome)

    def _all_arrived(self) -> list[Arrivals]:
        """The same once every rank of the world is in one of them: a rank waits before it arrives."""
        end = time.monotonic() + self._round.moment
        while True:
            rounds = self._open()
            if sum(len(_here(arrivals)) for arrivals in rounds) >= self._size or time.monotonic() >= end:
                return rounds
            time.sleep(_POLL)

    def _open(self) -> list[Arrivals]:
        """The rounds without an outcome in which ranks wait."""
        local, everyone = self._round, f"0-{self._size}"
        known = local.ask(lambda: local.channel.posted(_KNOWN))
        names = dict.fromkeys([everyone, *(name for listed in known.values() for name in listed)])
        # The round of this rank has what it proposes there.
        rounds = [
            local if name == local.name else Round(local.channel, name, _ranks(name), local.rank) for name in names
        ]
        found = [other.arrivals(_STEP) for other in rounds]
        return [arrivals for arrivals in found if not arrivals.concluded and _here(arrivals)]


def _probed(arrivals: Arrivals) -> bool:
    """Probe a round, if nobody else has ended it meanwhile."""
    try:
        arrivals.probe(_PATIENT * arrivals.round.moment)
    except AlreadyConcluded:
        return False
    return True


def _ranks(name: str) -> range:
    start, stop = map(int, name.split("-"))
    return range(start, stop)


def _here(arrivals: Arrivals) -> list[int]:
    away = set(arrivals.absent)
    return [rank for rank in arrivals.round.participants if rank not in away]


def _deadlocked(rounds: Iterable[Arrivals]) -> list[Arrivals]:
    """The rounds that cannot become complete: each waits for a rank that waits in another one of them.

    A rank that waits nowhere may still arrive; one that waits in a round that can become complete may arrive then.
    """
    blocked = {arrivals.round.name: arrivals for arrivals in rounds}
    place = {rank: name for name, arrivals in blocked.items() for rank in _here(arrivals)}
    while True:
        free = [name for name, arrivals in blocked.items() if not any(place.get(r) in blocked for r in arrivals.absent)]
        if not free:
            return list(blocked.values())
        for name in free:
            del blocked[name]
