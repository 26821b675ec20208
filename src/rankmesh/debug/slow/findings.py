"""Causes of a slow job, from the summaries of its ranks: pure functions, which compare ranks of one place.

```
rank 0   compute ######......  wait        computes 0.50   the others of its place 0.50
rank 1   compute ######......  wait                 0.50
rank 2   compute ##########..                       0.83   0.33 of a step longer: the job waits for rank 2
```

A call ends on all its members at once, so who waits least in it arrived last; no clocks are compared. A rank that is
held up elsewhere waits there: only the rank that all wait for computes for longer than the others of its place. In a
group, the member that waits least sees the time of the call itself: the *call time* of the group, compared with
other groups of its kind whose members have the same places.

What is late stands out by 5 % of a step, by more than chance gives among so many ranks, and in each third of a period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rankmesh.core.grouped import grouped
from rankmesh.debug.slow.report import Finding
from rankmesh.debug.slow.summary import SHARE, Group, Summary
from rankmesh.errors import first_of

__all__ = ["MEMORY", "Window", "find"]

# Windows that are remembered; those of the shortest and the longest period in which something is steady.
MEMORY, _PERIODS = 45, (3, 15)
# Shares of a step: of a late rank, of one among at most 3 and of a link, of a place, and by which all are slower.
_LEAST, _FEW, _UNEVEN, _SLOWER = 0.05, 0.08, 0.10, 0.20
# A pause: seconds, part of a step, and in how many of the steps at most.
_PAUSE, _OF_STEP, _RARE = 0.4, 0.3, 1 / 3
# Times that a call takes longer in a slow group; part of a host's ranks that are late; of lateness at one place.
_RATIO, _HOST, _THERE = 1.3, 0.75, 0.5
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Window:
    """Summaries of all ranks for ``seconds`` that ended at ``time``, in seconds since the epoch."""

    time: float
    seconds: float
    world_size: int
    summary: Summary

    def by_rank(self, name: str) -> _Numbers:
        """Return a column by rank, NaN for ranks that are missing."""
        found = np.full(self.world_size, np.nan)
        found[self.summary.column("rank")] = self.summary.column(name)
        return found

    @cached_property
    def computes(self) -> _Numbers:
        """The share that each rank computes."""
        return self.by_rank("computes") / SHARE

    @cached_property
    def stretch(self) -> _Numbers:
        """The longest time between two calls of each rank in seconds."""
        return self.by_rank("stretch") / 1000

    @cached_property
    def step(self) -> float:
        """Seconds of a step: the median; 0 where no rank has a cycle."""
        steps = self.summary.column("step")
        return float(np.median(steps[steps > 0])) / 1e6 if (steps > 0).any() else 0.0

    @cached_property
    def gaps(self) -> tuple[_Numbers, NDArray[np.int64]]:
        """By rank, the share by which others of a group wait longer than it, at most, and the index of that group."""
        row, group, share = self.summary.waits.T
        count, total = (np.bincount(group, weights, len(self.summary.groups)) for weights in (None, share))
        gap = np.where(count[group] > 1, (total[group] - share) / np.maximum(1, count[group] - 1) - share, 0) / SHARE
        gaps, groups = np.zeros(self.world_size), np.full(self.world_size, -1)
        order = np.argsort(gap)
        rank = self.summary.column("rank")[row[order]]
        gaps[rank], groups[rank] = np.maximum(0, gap[order]), group[order]
        return gaps, groups

    @cached_property
    def call_times(self) -> dict[Group, float]:
        """The least share that a member waits in each group of which all members have reported."""
        _, group, share = self.summary.waits.T
        count = np.bincount(group, minlength=len(self.summary.groups))
        least = np.full(len(count), SHARE)
        np.minimum.at(least, group, share)
        listed = enumerate(self.summary.groups)
        return {each: float(least[n]) / SHARE for n, each in listed if 1 < len(each.ranks) == count[n]}

    @cached_property
    def lost(self) -> float:
        """The share of the ranks' time that they wait for a member that is late."""
        _, group, share = self.summary.waits.T
        least = np.full(len(self.summary.groups), SHARE)
        np.minimum.at(least, group, share)
        return float((share - least[group]).sum()) / SHARE / max(1, len(self.summary.rows))


def excess(values: _Numbers, places: _Numbers) -> _Numbers:
    """Return each value minus the median of its place, or minus the other value where a place has two ranks.

    Values are by rank in the second axis; NaN where a rank is missing, or is the only one of its place.
    """
    found = np.full(values.shape, np.nan)
    for members in _places(places).values():
        known = members[~np.isnan(values[:, members]).any(axis=0)]
        if len(known) == 2:
            found[:, known] = values[:, known] - values[:, known[::-1]]
        elif len(known) > 2:
            found[:, known] = values[:, known] - np.median(values[:, known], axis=1, keepdims=True)
    return found


def _places(places: _Numbers) -> dict[float, NDArray[np.int64]]:
    """Return the ranks of each place."""
    order = np.argsort(places, kind="stable")
    names, starts = np.unique(places[order], return_index=True)
    listed = zip(names, np.split(order, starts[1:]), strict=True)
    return {float(name): ranks for name, ranks in listed if not math.isnan(name)}


def _stacked(values: Iterable[_Numbers]) -> _Numbers:
    """Return one row for each window; a rank that is missing in one has its value of the window before."""
    rows = np.stack([*values])
    for row, before in zip(rows[1:], rows, strict=False):
        np.copyto(row, before, where=np.isnan(row))
    return rows


def find(windows: Sequence[Window]) -> tuple[Finding, ...]:
    """Find the causes of a slow job in the last windows, the costliest first."""
    paused: list[Finding] | None = None
    for length in _PERIODS:
        # A part of a period has two steps at least.
        part = max(length // 3, math.ceil(2 * windows[-1].step / max(1e-9, windows[-1].seconds)))
        if part * 3 <= len(windows):
            period = Period(windows[-3 * part :])
            paused = [*period.pauses(windows)] if paused is None else paused
            ranks = {rank for one in paused for rank in one.ranks}
            found = [*paused, *period.late(ranks), *period.links(ranks), *period.imbalances()]
            if found:
                return tuple(sorted(found, key=lambda one: -one.seconds))
    return tuple(_everyone(windows))


class Period:
    """A period of windows: three parts and the last two windows. A steady value stands out in all four."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows, self.last = windows, windows[-1]
        self.places = self.last.by_rank("place")
        self.computes = self._parts(window.computes for window in windows)
        self.excess = excess(self.computes, self.places)
        self.more = self.excess.mean(axis=0)
        steps = [window.step for window in windows if window.step]
        self.step = float(np.median(steps)) if steps else self.last.seconds
        self.since = windows[0].time - windows[0].seconds

    def _parts(self, values: Iterable[_Numbers]) -> _Numbers:
        """Return the means of the parts, one row for each."""
        rows = _stacked(values)
        return np.stack([part.mean(axis=0) for part in (*np.split(rows, 3), rows[-2:])])

    @cached_property
    def limits(self) -> _Numbers:
        """The least excess by which a rank stands out in computing; larger where the spread of its place is large."""
        found = np.full(len(self.places), np.inf)
        for members in _places(self.places).values():
            found[members] = _limit(self.more[members], _LEAST if len(members) > 3 else _FEW)
        return found

    def _name(self, column: str, rank: int, window: Window | None = None) -> str:
        window = window or self.last
        number = window.by_rank(column)[rank]
        return "" if math.isnan(number) else window.summary.names[int(number)]

    def _hosts(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._name("host", rank) for rank in ranks))

    def _finding(self, cause: str, ranks: Iterable[int], share: float, evidence: str, **about: object) -> Finding:
        group = about.pop("waits_in", None)
        named = group if isinstance(group, Group) else None
        ranks = tuple(int(rank) for rank in ranks)
        values = {
            "cause": cause,
            "ranks": ranks,
            "group": named and named.label,
            "kind": named and named.kind,
            "operation": (named and named.operation) or None,
            "hosts": self._hosts(ranks),
            "seconds": share * self.step,
            "share": share,
            "step": self.step,
            "every": 1,
            "since": self.since,
            "evidence": evidence,
        }
        return Finding(**{**values, **about})  # type: ignore[arg-type]  # each field once, by its name

    def _group(self, rank: int) -> Group | None:
        number = self.last.gaps[1][rank]
        return self.last.summary.groups[number] if number >= 0 else None

    # -- ranks ----------------------------------------------------------------------------------------------------

    @cached_property
    def _late(self) -> NDArray[np.int64]:
        """The ranks that stand out in their place, and for which others wait."""
        waited = self._parts(window.gaps[0] for window in self.windows).mean(axis=0)
        with np.errstate(invalid="ignore"):
            steady = (self.more >= self.limits) & (self.excess >= self.limits / 2).all(axis=0)
            # Of one that is over, the mean of a long period is still high.
            lasts = self.excess[-1] >= self.more / 2
            return np.flatnonzero(steady & lasts & (waited >= self.more / 2))

    def late(self, paused: Iterable[int]) -> Iterator[Finding]:
        """Yield the ranks that compute for longer than others of their place, and hosts that have no other ranks."""
        late, hosts = np.setdiff1d(self._late, [*paused]), self.last.by_rank("host")
        here = {float(host): np.flatnonzero(hosts == host) for host in np.unique(hosts[late])}
        whole = {host: ranks for host, ranks in here.items() if len(ranks) > 1 and np.isin(ranks, late).mean() >= _HOST}
        if len(whole) < len(np.unique(hosts[~np.isnan(hosts)])):
            for ranks in whole.values():
                why = f"its {len(ranks)} ranks compute for longer than ranks of other hosts in their places"
                share = float(np.median(self.more[np.intersect1d(ranks, late)]))
                yield self._finding("host", ranks, share, why, waits_in=self._group(ranks[0]))
                late = np.setdiff1d(late, ranks)
        for rank in map(int, late):
            share = float(self.more[rank])
            cause, why = self._why(rank, share)
            yield self._finding(cause, [rank], share, why, waits_in=self._group(rank))

    def _why(self, rank: int, share: float) -> tuple[str, str]:
        columns = ([window.by_rank(name) / SHARE for window in self.windows] for name in ("reading", "queued"))
        reading, queued = (float(excess(self._parts(column), self.places).mean(axis=0)[rank]) for column in columns)
        if reading >= _THERE * share:
            # The last window may have no sample there.
            sites = (self._site("data", rank, window) for window in reversed(self.windows))
            return "input", f"in {next(filter(None, sites), '')}, which reads its data"
        place = np.flatnonzero(self.places == self.places[rank])
        why = f"it computes for longer than the {len(place) - 1} other ranks in its place"
        site = self._site("site", rank)
        if site and site not in {self._site("site", other) for other in place[place != rank]}:
            why += f", in {site}"
        if queued >= _THERE * share:
            why += f"; it waits {100 * queued:.0f} % of the time for a processor"
        return "computes", why

    def _site(self, column: str, rank: int, window: Window | None = None) -> str:
        """Return a line as ``next_batch at train.py:88``."""
        line, _, function = self._name(column, rank, window).rpartition("/")[2].partition(" in ")
        return f"{function} at {line}" if function else line

    def pauses(self, memory: Sequence[Window]) -> Iterator[Finding]:
        """Yield the ranks that are late rarely but for long, by all remembered windows."""
        longer = excess(_stacked(window.stretch for window in memory), self.places)
        seconds = np.array([[window.seconds] for window in memory])
        late = excess(_stacked(window.computes for window in memory), self.places) * seconds
        waited = np.stack([window.gaps[0] for window in memory]) * seconds
        steps = sum(window.seconds / (window.step or self.step) for window in memory)
        least = max(_PAUSE, _OF_STEP * self.step)
        with np.errstate(invalid="ignore"):
            # Calls that are rare anyway have long times between them, for which nobody waits.
            often = (longer >= least) & (late > 0) & (waited >= late / 2)
        for rank in np.flatnonzero(often.sum(axis=0) >= 2):
            when = np.flatnonzero(often[:, rank])
            total = float(late[when, rank].sum())
            times = total / float(np.median(longer[when, rank]))
            gone = len(memory) - when[-1] > max(_PERIODS[1], 2 * len(memory) / len(when))
            if not gone and times <= _RARE * steps and total / steps >= _LEAST * self.step:
                site, since = self._site("site", int(rank)), memory[when[0]].time
                about = {"waits_in": self._group(int(rank)), "every": max(2, round(steps / times)), "since": since}
                share = total / steps / self.step
                yield self._finding("pause", [int(rank)], share, f"in {site}" if site else "between two calls", **about)

    # -- groups and places ------------------------------------------------------------------------------------------

    def links(self, paused: set[int]) -> Iterator[Finding]:
        """Yield the group of each family whose calls take longest, where they take longer than in others."""
        late = paused.union(self._late.tolist())
        whole = [group for group in self.last.call_times if all(group in window.call_times for window in self.windows)]
        families = grouped(((group.kind, len(group.ranks), self._places_of(group)), group) for group in whole)
        for family in families.values():
            times = self._parts(np.array([window.call_times[group] for group in family]) for window in self.windows)
            usual = np.quantile(times, 0.25, axis=1, keepdims=True, method="lower")
            more, mean = times - usual, times.mean(axis=0)
            limit = _limit(more.mean(axis=0)[mean <= np.median(mean)], _FEW)
            slow = (more.mean(axis=0) >= limit) & (more >= limit / 2).all(axis=0) & (mean >= _RATIO * usual.mean())
            slowest = [family[n] for n in np.argsort(-mean) if slow[n] and late.isdisjoint(family[n].ranks)]
            if slowest and len(slowest) < len(family):
                share = float(more.mean(axis=0)[family.index(slowest[0])])
                yield self._link(slowest, [group for group in family if group not in slowest], share, usual.mean())

    def _places_of(self, group: Group) -> frozenset[float]:
        return frozenset(self.places[list(group.ranks)])

    def _link(self, slow: Sequence[Group], others: Sequence[Group], share: float, usual: float) -> Finding:
        worst = slow[0]
        common = [set(self._hosts(group.ranks)) for group in slow]
        hosts = tuple(sorted(set.intersection(*common).difference(*(self._hosts(group.ranks) for group in others))))
        times = f"{1 + share / usual:.2g} times as long as" if usual > 0.01 else "longer than"
        why = f"the same {worst.operation or 'calls'} take{'s' if worst.operation else ''} {times} in "
        why += f"{len(others)} other group{'s' if len(others) > 1 else ''} of its kind"
        why += f" (so in {len(slow) - 1} more)" if len(slow) > 1 else ""
        named = hosts or self._hosts(worst.ranks)
        why += f"; {first_of(named)} {'is' if len(named) == 1 else 'are'} in it: network or device"
        return self._finding("link", worst.ranks, share, why, waits_in=worst, hosts=named)

    def imbalances(self) -> Iterator[Finding]:
        """Yield the ranks of each place that compute for longer than the ranks of other places."""
        places = _places(self.places)
        for members in places.values() if len(places) <= _LONGEST_LIST else ():
            others = np.setdiff1d(np.flatnonzero(~np.isnan(self.places)), members)
            if not len(others):
                continue
            # The lower half of a place: a rank that is late in it says nothing of the others.
            lower = np.quantile(self.computes[:, members], 0.25, axis=1)
            more = lower - np.median(self.computes[:, others], axis=1)
            if more.mean() >= _UNEVEN and (more >= _UNEVEN / 2).all():
                one = len(members) == 1
                why = "no other rank makes the same calls" if one else "all ranks that make these calls do"
                why = f"{'it computes' if one else 'they compute'} for longer than ranks that make other calls, {why}"
                yield self._finding("imbalance", members, float(more.mean()), f"{why}: the layout or the model")


# Places that are compared with each other; ranks whose calls all differ have none.
_LONGEST_LIST = 256


def _limit(values: _Numbers, least: float) -> float:
    """Return the least excess that counts: more than the largest of this many values has by chance."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.inf
    spread = 1.4826 * float(np.median(np.abs(known - np.median(known))))
    return max(least, (2 + math.sqrt(2 * math.log(max(2, len(known))))) * spread)


def _everyone(windows: Sequence[Window]) -> Iterator[Finding]:
    """Yield that the job has become slower, where nothing in it stands out."""
    steps = np.array([window.step for window in windows])
    now, before = steps[-_PERIODS[1] // 2 :], steps[: -_PERIODS[1]]
    if len(before) < _PERIODS[1] or not steps.all():
        return
    usual, step = float(np.median(before)), float(np.median(now))
    if now.min() >= (1 + _SLOWER) * usual:
        last, seconds = windows[-1], step - usual
        why = f"a step took {usual:.3g} s; no rank, host or group differs from the others"
        ranks = tuple(range(last.world_size))
        since = last.time - last.seconds * len(now)
        yield Finding("everyone", ranks, None, None, None, (), seconds, seconds / step, step, 1, since, why)
