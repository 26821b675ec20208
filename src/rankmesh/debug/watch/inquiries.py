"""Inquiries: each time that all ranks are asked to speak, from the question to the verdict.

```
ask all -> leave this rank's recording -> wait for the others' -> look at silent ranks of this host
        -> the first to claim it, rank 0 before others, gathers and tells the verdict -> hear it
```

Nothing of it is collective: a rank that is dead, stopped, or in a loop is told of by the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rankmesh.backend import recorder
from rankmesh.debug.doctor.diagnosis import diagnose
from rankmesh.debug.doctor.report import report
from rankmesh.debug.watch.board import Board
from rankmesh.debug.watch.host import HostRanks
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.debug.watch.stacks import Mark

__all__ = ["Heard", "Inquiries", "Pace"]

_Come = TypeVar("_Come")
# Takes the verdict, and the whole report on the rank that gathered it, else "".
Heard = Callable[[str, str], None]

# Seconds between two looks at the board; it answers so many questions of all ranks in a second, and no more are asked.
_TICK, _QUESTIONS = 1.0, 4000
# One of so many looks is at all posts.
_BOTH = 3
# Seconds that whoever gathers takes for one recording, read and diagnosed.
_READ = 0.02


class Pace:
    """The times of a watch in seconds, for a limit of its calls and the ranks of its world.

    ``tick`` lies between two looks, ``grace`` is what ranks that are asked have to answer, ``reading`` what whoever
    gathers has until the verdict.

    >>> Pace(300, 8).tick, Pace(300, 8).grace
    (1.0, 10.0)
    >>> Pace(300, 16384).tick, Pace(300, 16384).grace, Pace(300, 16384).reading
    (4.096, 13.096, 327.68)
    """

    def __init__(self, patience: float, world_size: int) -> None:
        self.tick = min(max(_TICK, world_size / _QUESTIONS), patience / 10)
        # Whoever is asked looks a tick later.
        self.grace = max(3.0, min(10.0, patience / 5)) + max(0.0, self.tick - _TICK)
        self.reading = world_size * _READ


class Inquiries:
    """The inquiries of one rank: ``number`` is the one that comes, ``hung`` whether a call was why the last began."""

    def __init__(self, board: Board, recorder: Recorder, host: HostRanks, pace: Pace) -> None:
        self.number = 0
        self.hung = False
        self._looks = 0
        self._board, self._recorder, self._host, self._pace = board, recorder, host, pace

    def asked(self) -> bool:
        """Whether a rank has begun the inquiry that comes.

        The folder of thousands of ranks is looked at less often than the store, for what ranks say that have lost that.
        """
        self._looks += 1
        look = self._board.told if self._looks % _BOTH else self._board.has
        return look(f"ask/{self.number}")

    def speak(self, reason: str, mark: Mark | None, heard: Heard, *, hangs: bool = False) -> None:
        """Take part in the inquiry; ``heard`` is given the verdict as soon as one is told, if any is.

        ``mark`` is where the program stood (``stacks.in_call``); ``hangs`` says that this rank's call lasts too long.
        """
        if hangs:
            self._board.put(f"hangs/{self.number}")
        self._board.put(f"ask/{self.number}", reason.encode())
        document = self._recorder.document(reason, mark)
        self._leave(document)
        self._board.join(self._said, self._recorder.rank)
        self._await(lambda: self._board.count(self._said) >= self._recorder.world_size, self._pace.grace)
        spoke = self._board.joined(self._said)
        self._tell_of_silent(spoke)
        if self._gathers(spoke):
            heard(*self._gather())
        elif verdict := self._await(lambda: self._board.get(self._verdict), self._pace.grace + self._pace.reading):
            heard(verdict.decode(), "")
        if not recorder.frames_are_ready():
            # Now that all is said there is time to load what names the frames; what is recorded stays what it was.
            self._leave(self._recorder.with_lines(document))
        # A rank that was slow to speak was sent SIGUSR1 for its stacks: that is answered.
        self._host.signalled()
        self.hung = self._board.has(f"hangs/{self.number}")
        self.number += 1

    def clear(self, *, shared: bool) -> None:
        """Take away what this rank has left for others; and what belongs to none of them."""
        # One inquiry more than this rank has spoken in: another may have asked again.
        for inquiry in range(self.number + 1):
            self._board.forget(f"said/{inquiry}", self._recorder.rank, shared=shared)
            self._board.clear([f"recording/{inquiry}/{self._recorder.rank}"])
            if shared:
                self._board.clear([f"{what}/{inquiry}" for what in ("ask", "hangs", "gather", "verdict")])

    @property
    def _said(self) -> str:
        return f"said/{self.number}"

    @property
    def _verdict(self) -> str:
        return f"verdict/{self.number}"

    def _leave(self, document: Mapping[str, Any]) -> None:
        self._board.leave(self._recorder.rank, self.number, document)

    def _await(self, come: Callable[[], _Come], seconds: float) -> _Come:
        """What has come, waited for so long."""
        end = time.monotonic() + seconds
        while not (found := come()) and time.monotonic() < end:
            time.sleep(self._pace.tick / 2)
        return found

    def _tell_of_silent(self, spoke: set[int]) -> None:
        """Leave what ranks of this host that have not spoken look like from outside."""
        for rank, look in self._host.unresponsive(spoke).items():
            if self._board.recording(rank, self.number) is None:
                self._board.leave(rank, self.number, self._recorder.unresponsive(rank, look))

    def _gathers(self, spoke: set[int]) -> bool:
        """Whether this rank gathers: the lowest that spoke, unless another one has begun to."""
        if self._recorder.rank != min(spoke, default=self._recorder.rank):
            self._await(lambda: self._board.has(self._verdict), self._pace.grace)
        return self._board.claim(f"gather/{self.number}")

    def _gather(self) -> tuple[str, str]:
        """The verdict, left for all, and the whole report."""
        left = {rank: self._board.recording(rank, self.number) for rank in range(self._recorder.world_size)}
        diagnosis = diagnose({rank: recording for rank, recording in left.items() if recording is not None})
        if diagnosis.causes:
            # Whatever asked for it: what was found is evidence, which the end of the program does not replace.
            self._board.put(f"hangs/{self.number}")
        self._board.tell(self.number, diagnosis.verdict, diagnosis.to_dict())
        return diagnosis.verdict, report(diagnosis)
