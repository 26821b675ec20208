"""Memory of the rank that logs: the report of the job's speed, and the lines for the log."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from rankmesh.debug.slow.findings import MEMORY, Window, excess, find
from rankmesh.debug.slow.report import Finding, SlowReport, duration

__all__ = ["JobSpeed"]

# Evaluations without a finding until it is over; those whose step the report has.
_GONE, _TREND = 2, 120


class JobSpeed:
    """The speed of a job by its windows; a line at most every ``pause`` seconds while something is slow."""

    def __init__(self, pause: float) -> None:
        self._pause, self._logged_at = pause, -math.inf
        self._windows, self._trend = deque[Window](maxlen=MEMORY), deque[float](maxlen=_TREND)
        # By its subject: a finding, and the evaluations since it was found.
        self._open = dict[tuple[object, ...], tuple[Finding, int]]()
        self._logged = dict[tuple[object, ...], Finding]()
        # When a finding was over: what was seen before is no evidence that it is there again.
        self._over = dict[tuple[object, ...], float]()

    def add(self, window: Window) -> SlowReport:
        """Return the report of the job with one more window."""
        self._windows.append(window)
        self._trend.append(window.step)
        for found in find(list(self._windows)):
            if found.cause != "pause" and found.since < self._over.get(_subject(found), -math.inf):
                continue
            before = self._open.get(_subject(found))
            since = min(found.since, before[0].since) if before else found.since
            self._open[_subject(found)] = (Finding(**{**vars(found), "since": since}), -1)
        self._open = {subject: (found, gone + 1) for subject, (found, gone) in self._open.items()}
        for subject in [subject for subject, (_, gone) in self._open.items() if gone >= _GONE]:
            del self._open[subject]
            self._over[subject] = window.time
        return self._report(window)

    def lines(self, now: float) -> list[str]:
        """Return the lines for the log: the findings that are over, and the costliest one that is not."""
        over = [self._logged.pop(subject) for subject in [*self._logged] if subject not in self._open]
        lines = [f"over: {found.what} (lasted {duration(now - found.since)})" for found in over]
        if self._open and now - self._logged_at >= self._pause:
            subject, (found, _) = max(self._open.items(), key=lambda one: one[1][0].seconds)
            self._logged_at, self._logged[subject] = now, found
            more = len(self._open) - 1
            lines.append(found.sentence + (f"; and {more} more, which rankmesh doctor lists" if more else ""))
        return lines

    def _report(self, window: Window) -> SlowReport:
        rows, step, names = window.summary, window.step, window.summary.names
        late = excess(window.computes[None], window.by_rank("place"))[0]
        waits = np.zeros(window.world_size)
        np.add.at(waits, rows.column("rank")[rows.waits[:, 0]], rows.waits[:, 2] / 10_000)
        listed, numbers = np.unique(np.nan_to_num(window.by_rank("host"), nan=-1), return_inverse=True)
        return SlowReport(
            time=window.time,
            window=window.seconds,
            steps=round(window.seconds / step) if step else 0,
            step=step,
            lost=window.lost,
            findings=tuple(sorted((found for found, _ in self._open.values()), key=lambda one: -one.seconds)),
            host_names=tuple("unknown" if n < 0 else names[int(n)] for n in listed),
            hosts=tuple(numbers.tolist()),
            places=tuple(np.unique(window.by_rank("place"), return_inverse=True)[1].tolist()),
            caused=_seconds(np.maximum(late, 0), step),
            waits=_seconds(np.minimum(waits, 1), step),
            computes=_seconds(window.computes, step),
            trend=tuple(self._trend),
        )


def _subject(found: Finding) -> tuple[object, ...]:
    """Return the subject of a finding; a rank stays the same subject when another cause is found for it."""
    kind = "rank" if found.cause in ("computes", "input", "pause") else found.cause
    return kind, found.ranks, found.group if found.cause == "link" else None


def _seconds(shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]], step: float) -> tuple[float, ...]:
    return tuple((np.nan_to_num(shares) * step).tolist())
