"""Reports of ranks on their last seconds: one row for each rank; the summaries of ranks, and of hosts, merge into one.

```
rows     rank  host  place  step  computes  stretch  queued  reading  site  data       of one rank
waits    row   group share                                                             of one rank in one group
```

Shares are ten-thousandths of the time that was observed, ``step`` is in microseconds, ``stretch`` (the longest time
between two calls) in milliseconds. Hosts, places, and sites (``data``: where data are read) are numbers in ``names``.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankmesh.core.ranges import ranges, ranks_in

__all__ = ["COLUMNS", "NAMED", "SHARE", "Cycle", "Group", "Summary", "cycle_of", "merged", "summary_of"]

SHARE = 10_000
COLUMNS = ("rank", "host", "place", "step", "computes", "stretch", "queued", "reading", "site", "data")
# Columns that are numbers of names.
NAMED = ("host", "place", "site", "data")
# Bytes of a summary that are unpacked: 16,384 ranks have 2 MB.
_LARGEST = 1 << 26
# Part of a cycle's calls that repeat, at least; calls for a log or an evaluation come between.
_REPEATS, _NEARLY = 0.8, 0.005
_Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """A process group: its ``kind`` is dp, its ``label`` dp@tp0; ``operation`` is the call that it makes most."""

    name: str
    kind: str
    label: str
    operation: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Summary:
    """The rows of ranks, in ``COLUMNS``, and their ``waits``: a row, a group, and the share in that group's calls."""

    names: tuple[str, ...]
    groups: tuple[Group, ...]
    rows: _Rows
    waits: _Rows

    def column(self, name: str) -> _Rows:
        """Return one column of the rows."""
        column: _Rows = self.rows[:, COLUMNS.index(name)]
        return column

    def to_text(self) -> str:
        """Return the summary as text for a store or a file."""
        groups = [[group.name, group.kind, group.label, group.operation, ranges(group.ranks)] for group in self.groups]
        data = [self.names, groups, self.rows.T.tolist(), self.waits.T.tolist()]
        return base64.b85encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 3)).decode()

    @classmethod
    def from_text(cls, text: str) -> Summary:
        """Return the summary in a text. Raises ``ValueError`` and other errors of Python for any other text."""
        unpacked = zlib.decompressobj().decompress(base64.b85decode(text), _LARGEST)
        names, groups, rows, waits = json.loads(unpacked)
        listed = tuple(
            Group(name, kind, label, made, tuple(ranks_in(runs))) for name, kind, label, made, runs in groups
        )
        return cls(tuple(map(str, names)), listed, _table(rows, len(COLUMNS)), _table(waits, 3))


def _table(columns: Any, width: int) -> _Rows:
    table: _Rows = np.array(columns, dtype=np.int64).reshape(width, -1).T
    return table


def summary_of(row: Mapping[str, float | str], waits: Mapping[Group, float]) -> Summary:
    """Return the summary of one rank: of its row, with names as texts, and its share in the calls of each group."""
    names = tuple(dict.fromkeys(str(row[name]) for name in NAMED))
    values = [names.index(str(row[name])) if name in NAMED else round(float(row[name])) for name in COLUMNS]
    listed = [(0, number, round(SHARE * share)) for number, share in enumerate(waits.values())]
    return Summary(names, tuple(waits), np.array([values]), np.array(listed, dtype=np.int64).reshape(-1, 3))


def merged(summaries: Sequence[Summary]) -> Summary:
    """Merge summaries of different ranks, with each name and each group once."""
    names, groups = dict[str, int](), dict[Group, int]()
    rows, waits, before = [np.empty((0, len(COLUMNS)), np.int64)], [np.empty((0, 3), np.int64)], 0
    for each in summaries:
        name_numbers = np.array([names.setdefault(name, len(names)) for name in each.names], dtype=np.int64)
        group_numbers = np.array([groups.setdefault(group, len(groups)) for group in each.groups], dtype=np.int64)
        row, wait = each.rows.copy(), each.waits.copy()
        for name in NAMED:
            row[:, COLUMNS.index(name)] = name_numbers[each.column(name)]
        wait[:, 0] += before
        wait[:, 1] = group_numbers[wait[:, 1]]
        rows.append(row)
        waits.append(wait)
        before += len(row)
    return Summary(tuple(names), tuple(groups), np.concatenate(rows), np.concatenate(waits))


# -- the place of a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cycle:
    """The calls that a rank repeats: their number in each group per cycle; ``place`` is a digest of a cycle's calls."""

    calls: Mapping[str, float]
    place: str
    repeats: bool = False


def cycle_of(calls: Sequence[tuple[str, Hashable]]) -> Cycle:
    """Return the cycle of calls, each a pair of its group and a key that is equal on every rank of a place.

    >>> cycle_of([("5", ("dp", "all_reduce")), ("7", ("tp", "all_gather"))] * 9).calls
    {'5': 1.0, '7': 1.0}

    Where the calls do not repeat, their kinds make the cycle.
    """
    numbers = dict[Hashable, int]()
    made = np.array([numbers.setdefault(call, len(numbers)) for call in calls])
    period = _period(made)
    groups, places = Counter(group for group, _ in calls), Counter[frozenset[tuple[Hashable, int]]]()
    for start in range(0, len(calls) - period + 1, period or len(calls) + 1):
        places[frozenset(Counter(what for _, what in calls[start : start + period]).items())] += 1
    kinds = sorted(map(repr, places.most_common(1)[0][0] if period else {what for _, what in calls}))
    cycles = len(calls) / (period or max(1, len(numbers)))
    place = blake2b("\n".join(kinds).encode(), digest_size=4).hexdigest()
    return Cycle({group: count / cycles for group, count in groups.items()}, place, period > 0)


def _period(made: _Rows) -> int:
    """Return the number of calls after which they repeat, at least three times; 0 where they do not."""
    same = [float(np.mean(made[step:] == made[:-step])) for step in range(1, len(made) // 3 + 1)]
    best = max(same, default=0.0)
    return 0 if best < _REPEATS else 1 + next(step for step, part in enumerate(same) if part >= best - _NEARLY)
