"""The speed of this rank: its state, sampled nearly five times a second, and a summary of the samples for each window.

While it computes for another part of the time than usual, because it is late or waits for one that is, ten times.

```
gloo     a collective is under way while torch's counters differ; torch records no duration of its calls
NCCL     the recorded duration of each collective, with TORCH_NCCL_ENABLE_TIMING, which the watch sets
two      a rank that waits for one other is in send() or recv(), by its stack
else     it computes, at a line of the program
```
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from math import sqrt
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from rankmesh.backend import recorder as calls
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import known_group
from rankmesh.debug.slow.summary import SHARE, Cycle, Group, Summary, cycle_of, merged, summary_of
from rankmesh.debug.watch import stacks
from rankmesh.debug.watch.recorder import Recorder

__all__ = ["Sampler", "spread"]

# Seconds between two samples, on average, and once something has changed; by which a sample was late that could not be
# taken at its time; and those after which the line between two calls is worth knowing.
_EACH, _CLOSER, _LATE, _LONG = 0.22, 0.1, 0.02, 0.35
# A change of the share that this rank computes: at least, in standard deviations of the windows before, and how many
# windows these are, at least and at most.
_CHANGE, _DEVIATIONS, _USUAL = 0.04, 3.0, (5, 15)
# Windows after which the recorder is read again, at most, as that takes long; and after which it is for durations.
_READ, _TIMED = 60, 5
_GLOO, _NCCL = 0, 1


class Sampler:
    """The samples of this rank since the last window."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._program = recorder, threading.main_thread().ident or 0
        # The numbers of the program are its own. Seconds between samples, 0 as long as the step is not known.
        self._random, self._between = random.Random(recorder.rank), 0.0  # noqa: S311 - when to look
        self._groups, self._cycle = dict[str, Group](), Cycle({}, "")
        self._windows, self._next = 0, 1
        self._shares = deque[float](maxlen=_USUAL[1])
        self._state = dict[tuple[int, str], tuple[int, int]]()
        self._made, self._beside = dict[tuple[int, str], int](), dict[str, tuple[int, int]]()
        self._queued, self._stretch, self._idle = _queued(), 0.0, False
        self._waits, self._sites = defaultdict[str, float](float), Counter[tuple[bool, str]]()
        self.resume()
        self.begin()

    def begin(self) -> None:
        """Begin a window: what ``window`` has returned is given."""
        self._made, self._queued = {group: last for group, (_, last) in self._state.items()}, _queued()
        self._seconds = self._computes = self._reading = self._longest = 0.0
        # Seconds of the window, and calls that were made until then.
        self._counts = list[tuple[float, int]]()
        self._site = ""
        self._waits.clear()
        self._sites.clear()

    def resume(self) -> None:
        """Leave out the time until now, in which the watch did something else."""
        self._at = time.monotonic()
        self._pause = self._between or _EACH * self._random.uniform(0.7, 1.3)

    @property
    def pause(self) -> float:
        """Seconds until the next sample."""
        return max(0.0, self._at + self._pause - time.monotonic())

    def sample(self) -> None:
        """Look at what this rank does, which it has done since the last sample."""
        seconds = time.monotonic() - self._at
        late = seconds > self._pause + _LATE
        before, self._state = self._state, calls.collectives()
        state, site = stacks.stands(self._program)
        # Where this thread was late because the program was busy, a call that was made meanwhile did not last as long.
        # Calls that are under way while the program computes may have ended already: torch has the last to end, not
        # the latest.
        under_way = [
            number
            for (recorder, number), (done, made) in self._state.items()
            if recorder == _GLOO and done != made and not (late and before.get((recorder, number), (0, 0))[1] != made)
            if state == "waits" or (state == "may wait" and self._beside.get(number) != (done, made))
        ]
        self._seconds += seconds
        self._counts.append((self._seconds, sum(made for _, made in self._state.values())))
        waits = bool(under_way) or (state == "waits" and not late)
        if not waits:
            self._beside = {number: status for (recorder, number), status in self._state.items() if recorder == _GLOO}
            self._computes += seconds
            self._reading += seconds if state == "reads" else 0.0
            self._sites[state == "reads", site] += 1
        for number in under_way or ([""] if waits else []):
            self._waits[number] += seconds
        same = all(before.get(group, (0, 0))[1] == made for group, (_, made) in self._state.items())
        length = self._stretch + seconds if same or late else 0.0
        if self._idle and length > max(self._longest, _LONG):
            self._site = site
        self._longest = max(self._longest, length if self._idle else 0.0)
        self._idle = not waits
        self._stretch = length if self._idle and same else 0.0
        self.resume()

    def window(self, number: int) -> Summary:
        """Return the summary of the samples since ``begin``; without a row where nothing can be known yet.

        The window's ``number`` is the same on all ranks, which read NCCL's durations in the same ones.
        """
        self._windows += 1
        timed = any(recorder == _NCCL and made > 0 for (recorder, _), (_, made) in self._state.items())
        if timed and number % _TIMED:
            return merged([])
        waits, computes = dict(self._waits), self._computes
        if timed or self._windows >= self._next or not {number for _, number in self._state} <= self._groups.keys():
            entries = [calls.calls_kept(recorder) for recorder in (_GLOO, _NCCL)]
            self._learn([*entries[_GLOO], *entries[_NCCL]])
            if durations := self._durations(entries[_NCCL]):
                waits = {number: waits.get(number, 0.0) + durations.get(number, 0.0) for number in {*waits, *durations}}
                computes = max(0.0, self._seconds - sum(waits.values()))
            self._next = self._windows + (min(3 * self._windows, _READ) if self._cycle.repeats else 1)
        known = self._seconds >= 1.0 and self._cycle.calls and not (timed and not waits)
        return self._summary(waits, computes) if known else merged([])

    def _durations(self, entries: list[dict[str, Any]]) -> dict[str, float]:
        """Return the seconds of NCCL's calls by group, scaled from the recorded part of the window to all of it."""
        since, found = time.time_ns() - int(1e9 * self._seconds), defaultdict[str, float](float)
        last = [entry for entry in entries if entry.get("duration_ms") and int(entry["time_created_ns"]) > since]
        if len(last) > 1:
            recorded = (int(last[-1]["time_created_ns"]) - int(last[0]["time_created_ns"])) / 1e9
            for entry in last:
                found[str(entry["pg_id"])] += float(entry["duration_ms"]) / 1000 * self._seconds / recorded
        return found

    def _summary(self, waits: Mapping[str, float], computes: float) -> Summary:
        made = {group: last for group, (_, last) in self._state.items() if group[1] in self._cycle.calls}
        new = sum(last - self._made.get(group, 0) for group, last in made.items())
        steps = new / (sum(self._cycle.calls[number] for _, number in made) or 1)
        # By all samples: the first and the last alone are a step or two wrong.
        slope = linear_regression(*zip(*self._counts, strict=True)).slope if len(self._counts) > 2 else 0.0
        share = computes / self._seconds
        each = _CLOSER if self._changes(share) else _EACH
        self._shares.append(share)
        self._between = spread(sum(self._cycle.calls.values()) / slope, each) if slope > 0 else 0.0
        row: dict[str, float | str] = {
            "rank": self._recorder.rank,
            "host": self._recorder.host,
            "place": self._cycle.place,
            "step": 1e6 * self._seconds / steps if steps else 0,
            "computes": SHARE * share,
            "stretch": 1000 * self._longest,
            "queued": SHARE * (_queued() - self._queued) / self._seconds,
            "reading": SHARE * self._reading / self._seconds,
            "site": self._site or next((site for (_, site), _ in self._sites.most_common(1)), ""),
            "data": next((site for (reads, site), _ in self._sites.most_common() if reads), ""),
        }
        shares = {self._groups[number]: waits.get(number, 0.0) / self._seconds for number in self._cycle.calls}
        if "" in waits:
            shares[Group("", "p2p", "p2p", "recv", ())] = waits[""] / self._seconds
        return summary_of(row, shares)

    def _changes(self, share: float) -> bool:
        """Return whether this rank computes for another part of the time than usual, by more than samples scatter."""
        if len(self._shares) < _USUAL[0]:
            return False
        usual = fmean(self._shares)
        deviation = sqrt(fmean((one - usual) ** 2 for one in self._shares))
        return abs(share - usual) > max(_CHANGE, _DEVIATIONS * deviation)

    def _learn(self, entries: list[dict[str, Any]]) -> None:
        """Learn the groups and the cycle of this rank from its recorded calls."""
        made = Counter((str(entry["pg_id"]), str(entry["profiling_name"]).rpartition(":")[2]) for entry in entries)
        names = {str(entry["pg_id"]): entry["process_group"] for entry in entries}
        known = self._recorder.groups() if names.keys() - self._groups.keys() else {}
        for number, (name, desc) in names.items():
            if number not in self._groups:
                most = max((op for pg, op in made if pg == number), key=lambda op: made[number, op])
                desc, ranks = known.get(str(name), (desc, ()))
                group = known_group(GroupName(str(name), desc, ranks), ranks)
                self._groups[number] = Group(str(name), group.kind, group.label, most, ranks)
        self._cycle = cycle_of([(str(entry["pg_id"]), self._what(entry)) for entry in entries])

    def _what(self, entry: Mapping[str, Any]) -> Hashable:
        """Return the part of a call that is equal on every rank at the same place."""
        group = self._groups[str(entry["pg_id"])]
        return group.kind, len(group.ranks), entry["profiling_name"], str(entry.get("input_sizes"))


def spread(step: float, each: float = _EACH) -> float:
    """Return the seconds between two samples by which they see each moment of a step equally often, about ``each``.

    From one sample to the next, a golden part of a step passes, or several steps and that part: however many samples
    there are, they lie nearly evenly on the step. Samples at random times scatter as twice to four times fewer.

    >>> [round(spread(step), 3) for step in (0.05, 0.34, 5.0)]
    [0.231, 0.21, 0.221]
    """
    golden = (5**0.5 - 1) / 2
    if step > each:
        return step / (max(0, round(step / each - golden)) + golden)
    return step * (round(each / step - golden) + golden)


def _queued() -> float:
    """Return the seconds that the main thread was ready to run, and had no processor; 0 where Linux does not count."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{os.getpid()}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
