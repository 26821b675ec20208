"""Slow: on each rank, samples and a summary for each window; on rank 0, the report and its lines.

```
rank 0     ends a window: counts it in the store              0 s
others     look for that when their own clock has it nearly   0.1 s      at 16,384 ranks 4 s
all        give their summaries, under the window's number    0.1 s      to an exchange whose root is rank 0
```

Clocks of hosts are not compared. A summary that is too late, as of a rank that was stopped, is not lost: the rank's
window goes on, and ends with the next one.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from rankmesh.debug.slow import SlowReport
from rankmesh.debug.slow.findings import Window
from rankmesh.debug.slow.job import JobSpeed
from rankmesh.debug.slow.summary import Summary, merged
from rankmesh.debug.watch.exchange import Exchange, Form
from rankmesh.debug.watch.metrics import send_slow, write_slow
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.debug.watch.speed import Sampler
from rankmesh.errors import first_line
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel

__all__ = ["SlowWatch", "window_seconds"]

_log = logging.getLogger("rankmesh.watch")
_FORM = Form(merged, Summary.to_text, Summary.from_text)
# Where rank 0 counts the windows; the rank that does.
_COUNT, _ROOT = "slow/window", 0
# Seconds between two looks for the end of a window, at least; looks that the store answers for all ranks in a second.
_MOMENT, _LOOKS = 0.1, 4000


def window_seconds(world_size: int) -> float:
    """Return the seconds of a window, longer in worlds of more than 2000 ranks.

    >>> window_seconds(64), window_seconds(16_384)
    (4.0, 32.768)
    """
    return max(4.0, 0.002 * world_size)


class _Windows:
    """The ends of windows on one rank.

    Where the end of one is known to some seconds, a rank looks for the next so much before its own clock has it.
    """

    def __init__(self, rank: int, world_size: int, store: BoundedChannel) -> None:
        self.seconds, self._is_root, self._store = window_seconds(world_size), rank == _ROOT, store
        self._moment = self._pause = max(_MOMENT, world_size / _LOOKS)
        self._number: int | None = None
        self._looked = time.monotonic()
        # Ranks that begin together look one after another.
        self._due = self._looked + (self.seconds if self._is_root else self._moment * rank / world_size)

    def ended(self) -> int | None:
        """Return the number of a window that has ended, once, on rank 0 as it ends; None where none has."""
        now = time.monotonic()
        if now < self._due:
            return None
        if self._is_root:
            self._due = max(now, self._due + self.seconds)
            return self._store.ask(lambda channel: channel.tick(_COUNT, 1))
        unsure, self._looked = now - self._looked, now
        self._due, self._pause = now + self._pause, min(2 * self._pause, self.seconds / 8)
        before, self._number = self._number, int(self._store.ask(lambda channel: channel.read(_COUNT)) or 0)
        if before is None or self._number <= before:
            return None
        self._due, self._pause = now + max(self._moment, self.seconds - unsure - self._moment / 2), self._moment
        return self._number


class SlowWatch:
    """The part of a watch that looks for what makes the job slow; ``report`` is the last one, on rank 0.

    ``pause`` is the number of seconds between two lines. An error in it ends it, with one line; the job runs on.
    """

    def __init__(self, recorder: Recorder, store: BoundedChannel, pause: float, folder: Path | None) -> None:
        self.report: SlowReport | None = None
        self._recorder, self._store, self._folder = recorder, store, folder
        rank, size = recorder.rank, recorder.world_size
        self._sampler, self._windows = Sampler(recorder), _Windows(rank, size, store)
        self._exchange = Exchange(store.channel, rank, size, _FORM, root=_ROOT, patience=self._windows.seconds / 4)
        self._job, self._ended = JobSpeed(pause), False

    @property
    def pause(self) -> float:
        """Seconds until the next ``look``."""
        return float("inf") if self._ended else self._sampler.pause

    def look(self) -> None:
        """Take a sample, and at the end of a window what follows from it."""
        try:
            self._sampler.sample()
            with suppress(ChannelLost):
                if (number := self._windows.ended()) is not None:
                    summary = self._sampler.window(number)
                    if self._store.ask(lambda _: self._exchange.give(f"slow/{number}", summary)):
                        self._sampler.begin()
                if self._exchange.leads:
                    for _, whole in self._store.ask(lambda _: self._exchange.look()):
                        self._evaluate(whole)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job and the rest of the watch go on
            self._ended = True
            rank = self._recorder.rank
            _log.warning("rankmesh: slow: nothing more is found from rank %s: %s", rank, first_line(error))

    def resume(self) -> None:
        """Leave out of the samples what the watch has just done."""
        self._sampler.resume()

    def close(self, *, last: bool) -> None:
        """Delete what this rank has in the store; what others have too, if it is the ``last`` of all."""
        with suppress(ChannelLost):
            self._store.ask(lambda channel: self._close(channel, last))

    def _close(self, channel: StoreChannel, last: bool) -> None:
        number = int(channel.read(_COUNT) or 0)
        self._exchange.close(*(f"slow/{n}" for n in (number - 1, number) if last))
        channel.delete([_COUNT] if last else [])

    def _evaluate(self, whole: Summary) -> None:
        if not len(whole.rows):
            return
        window = Window(time.time(), self._windows.seconds, self._recorder.world_size, whole)
        self.report = report = self._job.add(window)
        lines = self._job.lines(report.time)
        for line in lines:
            _log.disabled = False
            _log.warning("rankmesh: slow: %s", line)
        try:
            if lines:
                send_slow(report)
            if self._folder is not None:
                report.write(self._folder)
                write_slow(self._folder, report, self._recorder.run)
        except Exception as error:  # noqa: BLE001 - OpenTelemetry's exporters are the program's, the disk is shared
            _log.debug("rankmesh: slow: the report is not written: %s", error)
