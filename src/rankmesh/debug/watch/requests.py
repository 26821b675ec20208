"""Dump requests: each time that all ranks are asked for their recordings, from the request to the diagnosis.

A request is a round whose epoch is its number:

```
request      any rank concludes it: its call lasts too long, or it got SIGUSR1; the others look for it once a tick
recordings   every rank arrives when its recording is written; who has not, after a grace, is unresponsive
diagnosis    the lowest responsive rank reads the recordings and announces the diagnosis; the others, once they have
             written theirs, end if they are told to
```

No rank waits for one that is dead, stopped, or in a loop: its host's ranks describe it, and the diagnosis names it.

Where the store does not answer, as it was served by the rank that is gone, each rank leaves its recording in the folder
when its own call lasts too long, and the doctor reads them there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from rankmesh.debug.doctor.diagnosis import Diagnosis, diagnose
from rankmesh.debug.watch.host import HostRanks
from rankmesh.debug.watch.recorder import CALLS, Recorder
from rankmesh.debug.watch.recordings import Recordings
from rankmesh.debug.watch.stacks import Mark
from rankmesh.errors import AgreementError, StoreLost
from rankmesh.rendezvous import Arrivals, Outcome, Proposal, Round, StoreChannel, WaitPolicy

__all__ = ["SESSION", "Diagnosed", "DumpRequests", "Pace"]

_log = logging.getLogger("rankmesh.watch")

# Takes the diagnosis in one sentence, the ranks at fault, and the whole of it on the rank that made it.
Diagnosed = Callable[[str, tuple[int, ...], Diagnosis | None], None]

# Where the ranks of a session find its token.
SESSION = "session/token"
_REQUEST, _RECORDINGS, _DIAGNOSIS = "request", "recordings", "diagnosis"
_STEPS = (_REQUEST, _RECORDINGS, _DIAGNOSIS)
# Seconds between two looks for a request, and questions that the store answers for all ranks in a second.
_TICK, _QUESTIONS = 1.0, 4000
# Seconds that reading all recordings may take; that one takes, and each of its calls; and calls that are read anyway.
_READING, _RECORDING, _CALL, _FEW = 10.0, 0.0005, 8e-6, 32


class Pace:
    """The times of a watch in seconds, for a limit of its calls and the ranks of its world.

    ``tick`` lies between two looks, ``grace`` is what ranks have to answer a request, ``reading`` what it takes to read
    all recordings, of which the last ``calls`` are shared: as many as can be read in 10 seconds, 32 at least.

    >>> Pace(300, 8).tick, Pace(300, 8).grace
    (1.0, 10.0)
    >>> Pace(300, 16384).tick, Pace(300, 16384).grace, Pace(300, 1024).calls, Pace(300, 16384).calls
    (4.096, 13.096, 1158, 32)
    """

    def __init__(self, patience: float, world_size: int) -> None:
        self.tick = min(max(_TICK, world_size / _QUESTIONS), patience / 10)
        # A rank finds the request up to a tick later.
        self.grace = max(3.0, min(10.0, patience / 5)) + max(0.0, self.tick - _TICK)
        self.calls = max(_FEW, min(CALLS, int((_READING / world_size - _RECORDING) / _CALL)))
        self.reading = world_size * (_RECORDING + _CALL * self.calls)


class DumpRequests:
    """The dump requests of one rank.

    ``number`` numbers the next one; ``hung`` is True if the last one was made because of a hang, or found one,
    ``overdue`` if a call of a rank lasted too long: who asks on demand may find a rank that is behind for a moment.
    ``store_lost``: the last one reached no other rank, and its recording is left to the doctor.
    """

    def __init__(
        self, channel: StoreChannel, recordings: Recordings, recorder: Recorder, host: HostRanks, pace: Pace
    ) -> None:
        self.number = 0
        self.hung = self.overdue = self.store_lost = self._ends = False
        self._channel, self._recordings = channel, recordings
        self._recorder, self._host, self._pace = recorder, host, pace
        self._round = self._of(0)

    def _of(self, number: int) -> Round:
        return Round(self._channel, "dumps", range(self._recorder.world_size), self._recorder.rank, epoch=number)

    def requested(self) -> bool:
        """Return whether a rank has made the next request."""
        try:
            return self._round.listen(_REQUEST) is not None
        except (StoreLost, AgreementError):
            return False

    def respond(self, reason: str, mark: Mark | None, diagnosed: Diagnosed, *, hangs: bool = False) -> None:
        """Make the next request, if no other rank has, and take part in it; ``diagnosed`` gets its result.

        ``mark`` is the program's earlier place (``stacks.in_call``); ``hangs``: this rank's call lasts too long.
        """
        rank, document = self._recorder.rank, None
        self.hung, self.overdue = hangs, False
        try:
            self._round.conclude(_REQUEST, lambda _: Outcome(message=reason))
            document = self._recorder.document(reason, mark)
            self._recordings.put(rank, self.number, document, share=self._pace.calls)
            self._take_part(diagnosed, hangs=hangs)
        except (StoreLost, AgreementError) as error:
            self.store_lost = True
            if document is None:
                document = self._recorder.document(reason, mark)
                self._recordings.put(rank, self.number, document)
            _log.warning("rankmesh: rank %s reaches no other rank: %s", rank, error)
        finally:
            if not self._ends:
                self._recordings.unshare(rank, self.number)
            self.number += 1
            self._round = self._of(self.number)
        # A rank that was slow to respond was sent SIGUSR1 for its stacks: that is answered.
        self._host.signalled()

    def _take_part(self, diagnosed: Diagnosed, *, hangs: bool) -> None:
        among, proposal, made = self._round, Proposal(text="hangs" if hangs else ""), list[Diagnosis]()
        arrived = among.step(_RECORDINGS, proposal, _who_arrived, WaitPolicy(self._pace.grace))
        described = self._describe(arrived.missing)
        responsive = set(among.participants).difference(arrived.missing)
        reporter = min(responsive, default=self._recorder.rank)
        if reporter != self._recorder.rank and not self._await_diagnosis(among):
            # Its recording stays for the rank that diagnoses: who ends the job does not wait for that.
            self.hung = self._ends = True
            return
        outcome = among.reported(_DIAGNOSIS, reporter, lambda _: self._diagnose(made), 0.0)
        if outcome.agreed:
            hung, self.overdue = outcome.value or (False, False)
            self.hung = self.hung or hung
            diagnosed(outcome.message, outcome.ranks, made[0] if made else None)
        for rank in described:
            self._recordings.unshare(rank, self.number)
        among.leave(outcome)

    def _await_diagnosis(self, among: Round) -> bool:
        """Wait for the diagnosis of another rank, as long as it may take; return False once this rank is to end."""
        end, pause = time.monotonic() + self._pace.grace + self._pace.reading, 0.02
        while time.monotonic() < end and among.listen(_DIAGNOSIS) is None:
            if self._host.terminated():
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._pace.tick)
        return True

    def _describe(self, unresponsive: tuple[int, ...]) -> list[int]:
        """Record what unresponsive ranks of this host look like from outside; which ranks these are."""
        looks = self._host.look(unresponsive)
        described = [rank for rank in looks if self._recordings.read(rank, self.number) is None]
        for rank in described:
            self._recordings.put(rank, self.number, self._recorder.unresponsive(rank, looks[rank]), share=1)
        return described

    def _diagnose(self, made: list[Diagnosis]) -> Outcome:
        diagnosis = diagnose(self._recordings.read_all(self._round.participants, self.number))
        # Whatever the reason of the request: what was found is evidence, which the end of the program does not replace.
        overdue = any(self._round.arrivals(_RECORDINGS).texts.values())
        hangs = bool(diagnosis.causes) or overdue
        self._recordings.conclude(diagnosis)
        made.append(diagnosis)
        return Outcome(ranks=diagnosis.at_fault, message=diagnosis.verdict, value=[hangs, overdue])

    def close(self) -> bool:
        """Take no part any more; the last of all ranks, for which this is True, deletes what is left of any request."""
        session = Round(self._channel, "session", self._round.participants, self._recorder.rank, epoch=0)
        last = session.leave(Outcome())
        with suppress(StoreLost):
            for number in range(self.number + 2 if last else 0):
                self._of(number).forget(_STEPS)
            if last:
                session.ask(lambda: self._channel.delete([SESSION]))
        return last


def _who_arrived(arrivals: Arrivals) -> Outcome:
    return Outcome(missing=tuple(arrivals.absent))
