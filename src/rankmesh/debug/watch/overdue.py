"""Overdue calls: what this rank has had under way for too long, by its stack and by torch's recorder.

```
stack      recv on pp@tp0, at train.py:31, for 301 s          a thread waits for it
recorder   all_reduce on dp@tp1, for 301 s                    no thread does: the program works on something else
```
"""

from __future__ import annotations

import time
from typing import Any

from rankmesh.backend import recorder as calls
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.debug.watch.stacks import Mark

__all__ = ["Overdue"]

# Seconds between two readings of the recorder while a group stands still; a full one takes a while.
_READING = 10.0


class Overdue:
    """Whether this rank has a call under way for longer than ``patience`` (seconds).

    ``limited``: that holds for every call; else a call may take half of its own timeout. ``mark`` is where the program
    stands, ``reported`` the time until which calls have been reported.
    """

    def __init__(self, recorder: Recorder, patience: float, *, limited: bool) -> None:
        self.mark: Mark | None = None
        self.reported = 0.0
        self._recorder, self._patience, self._limited = recorder, patience, limited
        self._since = self._read_at = time.monotonic()
        self._unfinished: dict[tuple[int, str], str] = {}

    def follow(self) -> dict[str, Any]:
        """Return the call that the program is in, and from now on since when."""
        call, mark = self._recorder.in_call(self.mark)
        if mark != self.mark:
            self.mark, self._since = mark, time.monotonic()
        return call

    def reason(self) -> str:
        """Return which call lasts too long, of those that no rank has reported; empty where none does."""
        call = self.follow()
        if call.get("operation") and self._lasts(self._since, self._patience):
            # NCCL does not count what two members exchange, but the recorder has it.
            self._since = max(self._since, _clock(calls.last_call()))
            if self._lasts(self._since, self._patience):
                return f"{call['operation']} is under way for {time.monotonic() - self._since:.0f} s"
        return self._by_record()

    def _by_record(self) -> str:
        """Return which call lasts too long although no thread waits for it, by the recorder."""
        # Groups that stand still are seen at no cost, but for what two members exchange on NCCL.
        pause = min(_READING, self._patience / 10) if self._stands_still() else self._patience / 3
        if time.monotonic() - self._read_at < pause:
            return ""
        self._read_at = time.monotonic()
        for entry in calls.under_way():
            group_timeout = 0.0 if self._limited else float(entry.get("timeout_ms") or 0) / 2000
            made = _clock(int(entry["time_created_ns"]))
            if self._lasts(made, group_timeout or self._patience) and not entry.get("retired"):
                return f"{entry['profiling_name']} is under way for {time.monotonic() - made:.0f} s"
        return ""

    def _stands_still(self) -> bool:
        """Return whether a group has collectives under way of which none has come through since the last look."""
        before, self._unfinished = self._unfinished, calls.unfinished()
        return any(before.get(group) == last for group, last in self._unfinished.items())

    def _lasts(self, since: float, limit: float) -> bool:
        """Return whether what is under way since then lasts too long, and began after all that was reported."""
        return since > self.reported and time.monotonic() - since > limit


def _clock(epoch: int) -> float:
    """Return a time in nanoseconds since the epoch on the clock of the watch."""
    return time.monotonic() - (time.time() - epoch / 1e9)
