"""Slow: on each rank, samples and a summary for each window; on the rank that logs, the report and its lines."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rankmesh.debug.slow import SlowReport
from rankmesh.debug.slow.findings import Window
from rankmesh.debug.slow.job import JobSpeed
from rankmesh.debug.watch.host import HostRanks
from rankmesh.debug.watch.host_tree import HostTree
from rankmesh.debug.watch.metrics import send_slow, write_slow
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.debug.watch.speed import Sampler
from rankmesh.errors import first_line
from rankmesh.rendezvous import BoundedChannel

__all__ = ["SlowWatch", "window_seconds"]

_log = logging.getLogger("rankmesh.watch")


def window_seconds(world_size: int) -> float:
    """Return the seconds of a window, longer in worlds of more than 2000 ranks.

    >>> window_seconds(64), window_seconds(16_384)
    (4.0, 32.768)
    """
    return max(4.0, 0.002 * world_size)


class SlowWatch:
    """The part of a watch that looks for what makes the job slow; ``report`` is the last one, on the rank that logs.

    ``pause`` is the number of seconds between two lines. An error in it ends it, with one line; the job runs on.
    """

    def __init__(
        self, recorder: Recorder, host: HostRanks, store: BoundedChannel, pause: float, folder: Path | None
    ) -> None:
        self.report: SlowReport | None = None
        self._recorder, self._folder = recorder, folder
        self._sampler, self._tree = Sampler(recorder), HostTree(recorder.rank, host, store)
        self._job = JobSpeed(pause)
        self._seconds = window_seconds(recorder.world_size)
        self._window, self._ended = self._now(), False

    def _now(self) -> int:
        return int(time.time() / self._seconds)

    @property
    def pause(self) -> float:
        """Seconds until the next ``look``."""
        return float("inf") if self._ended else self._sampler.pause

    def look(self) -> None:
        """Take a sample, and at the end of a window what follows from it."""
        try:
            self._sampler.sample()
            if self._now() != self._window:
                self._window = self._now()
                if (summary := self._sampler.window()) is not None:
                    self._tree.put(self._window, summary)
            if time.monotonic() >= self._tree.due and (whole := self._tree.take(self._window)) is not None:
                window = Window(time.time(), self._seconds, self._recorder.world_size, whole)
                self.report = self._job.add(window)
                self._publish(self.report)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job and the rest of the watch go on
            self._ended = True
            rank = self._recorder.rank
            _log.warning("rankmesh: slow: nothing more is found from rank %s: %s", rank, first_line(error))

    def resume(self) -> None:
        """Leave out of the samples what the watch has just done."""
        self._sampler.resume()

    def close(self) -> None:
        """Delete what this rank has in the store."""
        self._tree.close()

    def _publish(self, report: SlowReport) -> None:
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
