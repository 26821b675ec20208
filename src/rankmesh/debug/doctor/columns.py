"""Columns: the calls of one recording, taken from its entries column by column, as numpy arrays.

```
process_group  collective_seq_id  profiling_name   sizes    state      ->   group  number  signature  pending  site
tp/0/f116...   41                 nccl:all_reduce  [[4]]    completed       0      41      0          no       3
tp/0/f116...   42                 nccl:all_reduce  [[4]]    started         0      42      0          yes      3
```

A job of 8,192 ranks has sixteen million entries: loops in C handle each of them, and rare
cases (calls made as one, groups made again) are looked for in whole columns first.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rankmesh.core.ranges import ranges, ranks_in
from rankmesh.debug.doctor.calls import Signature, merged, signature_of
from rankmesh.debug.doctor.sites import Sites

__all__ = ["Bools", "Columns", "GroupName", "Ints", "columns_of"]

_PEERS = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
_COMPARED = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes")
_NEEDED = ("process_group", "profiling_name", "collective_seq_id")
_OPTIONAL = (
    "time_created_ns",
    "state",
    "retired",
    "is_p2p",
    "p2p_seq_id",
    "frames",
    "thread_id",
    "thread_name",
    *_COMPARED,
)
# How names of torch's own threads begin.
_OF_TORCH = "pt_"
_DEVICES = ("nccl", "rccl", "hccl", "xccl", "mccl")

# A call as torch wrote it, unchecked.
Entry = Mapping[str, Any]
Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]
Column = Ints | Bools
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class GroupName:
    """A process group as a rank knows it; ``members`` is None where the recording does not list them.

    ``on_device``: its calls run on a device, which takes them later than the program hands them over. ``queued`` are
    the first and the last call that the device has not reached; ``enqueued`` is the last one handed over, where torch
    counted; ``number`` is the key of torch's counts. ``limit`` is the timeout of the last call in seconds, 0.0 if the
    recording has none.
    """

    name: str
    desc: str
    members: tuple[int, ...] | None = None
    on_device: bool = False
    queued: tuple[int, int] | None = None
    enqueued: int | None = None
    number: str = ""
    limit: float = 0.0

    @property
    def is_described(self) -> bool:
        """Whether ``desc`` names the group: torch has ``undefined`` for one that was made without a description."""
        return self.desc not in ("", "undefined")

    def __reduce__(self) -> tuple[Any, ...]:
        """Go from one process to another with the members as ranges; there, equal members are one object."""
        fields = vars(self) | {"members": None if self.members is None else _ranges(self.members)}
        return _group_name, tuple(fields.values())


def _group_name(name: str, desc: str, members: tuple[tuple[int, ...], ...] | None, *others: Any) -> GroupName:
    return GroupName(name, desc, None if members is None else _members_in(members), *others)


@lru_cache(maxsize=256)
def _ranges(members: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ranges(members)))


@lru_cache(maxsize=256)
def _members_in(ranges: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the ranks in ranges, in their order. Cached: equal members of many recordings are one object."""
    return tuple(ranks_in(ranges))


@dataclass(eq=False)
class Columns:
    """The columns of collectives and, by name, of exchanges; the groups, signatures and sites that they number.

    ``thread`` numbers the threads of the program that made the calls: 0 is the main one.
    """

    group: Ints
    number: Ints
    signature: Ints
    pending: Bools
    site: Ints
    created: Ints
    thread: Ints
    exchanges: Mapping[str, Column]
    groups: list[GroupName]
    signatures: list[Signature]
    sites: list[str]


def columns_of(entries: Sequence[Entry], stacks: Sequence[object]) -> Columns:
    """Return the columns of these entries; ``stacks`` are those that entries name by number.

    Whatever is not an entry raises one of Python's own errors.
    """
    table = _table(entries)
    names, group = _numbered(map(tuple, table["process_group"]))
    calls = _Calls(table)
    sites = Sites(stacks)
    frames, stack = _once(table["frames"])
    threads = list(map(sites.thread_of, frames))
    every = {
        "group": group,
        "number": _whole(table["collective_seq_id"], np.int32),
        "signature": calls.signature,
        "pending": ~_done(table, calls.on_device),
        "site": np.array(list(map(sites.of, frames)), dtype=np.int32)[stack],
        "created": _whole([time or 0 for time in table["time_created_ns"]], np.int64),
        "thread": _threads(table, [threads[number] for number in stack.tolist()]),
    }
    apart = calls.is_apart | np.array(list(map(bool, table["is_p2p"])), dtype=bool)
    entered = ~_queued(every, apart, calls.on_device, table["p2p_seq_id"])
    rows = _lives({name: column[~apart & entered] for name, column in every.items()})
    return Columns(
        **_joined(rows, calls.signatures),  # type: ignore[arg-type]  # ints and bools
        exchanges=_exchanges(every, apart & entered, calls),
        groups=_groups(entries, names, every, calls.on_device, ~entered & ~apart),
        signatures=list(calls.signatures),
        sites=sites.listed,
    )


def _groups(
    entries: Sequence[Entry],
    names: Sequence[tuple[object, ...]],
    every: Mapping[str, Column],
    on_device: Bools,
    queued: Bools,
) -> list[GroupName]:
    """Return the groups of the calls, with what the device has not reached of each."""
    group, number = every["group"], every["number"]
    devices = set(np.unique(group[on_device]).tolist())
    waiting: dict[int, tuple[int, int]] = {}
    for index in np.unique(group[queued]).tolist():
        behind = number[queued & (group == index)]
        waiting[index] = int(behind.min()), int(behind.max())
    last = np.zeros(len(names), dtype=np.int64)
    last[group] = np.arange(len(group))
    shown = [entries[row] for row in last.tolist()]
    return [
        GroupName(
            str(name)[:400],
            str(desc)[:400],
            on_device=index in devices,
            queued=waiting.get(index),
            number=str(shown[index].get("pg_id", ""))[:80],
            limit=max(0, int(shown[index].get("timeout_ms") or 0)) / 1000,
        )
        for index, (name, desc) in enumerate(names)
    ]


def _table(entries: Sequence[Entry]) -> dict[str, Sequence[Any]]:
    """Return a column for each field; None in all entries for a field that their format does not have."""
    given = [name for name in _OPTIONAL if entries and name in entries[0]]
    try:
        rows = list(map(itemgetter(*_NEEDED, *given), entries))
    except KeyError:
        given, absent = list(_OPTIONAL), dict.fromkeys(_OPTIONAL)
        rows = [itemgetter(*_NEEDED, *given)({**absent, **entry}) for entry in entries]
    columns = dict(zip((*_NEEDED, *given), zip(*rows, strict=True), strict=True)) if rows else {}
    return {name: columns.get(name, (None,) * len(rows)) for name in (*_NEEDED, *_OPTIONAL)}


def _numbered(keys: Iterable[_Key]) -> tuple[list[_Key], Ints]:
    """Return the distinct keys, in order of first appearance, and the index of each given one among them."""
    each = list(keys)
    known = {key: number for number, key in enumerate(dict.fromkeys(each))}
    return list(known), np.fromiter(map(known.__getitem__, each), dtype=np.int32, count=len(each))


def _once(stacks: Sequence[Any]) -> tuple[Sequence[Any], Ints]:
    """Return the stacks, those that calls name by number once, and the index of each call's stack among them."""
    try:
        return _numbered(stacks)
    except TypeError:  # lists of frames
        return stacks, np.arange(len(stacks))


def _whole(values: Sequence[Any], dtype: npt.DTypeLike) -> Ints:
    return np.fromiter(values, dtype=dtype, count=len(values))


def _threads(table: Mapping[str, Sequence[Any]], of_stacks: Sequence[str | None]) -> Ints:
    """Return the number of each call's thread: by the function that its stack begins with, else by torch's number.

    A backward pass runs on threads of torch, while the thread that began it waits: its calls are the program's.
    """
    numbers = [
        "" if str(name or "").startswith(_OF_TORCH) else str(number or "")
        for number, name in zip(table["thread_id"], table["thread_name"], strict=True)
    ]
    keys = [number if known is None else known for number, known in zip(numbers, of_stacks, strict=True)]
    main = "" if "" in keys or not keys else keys[0]
    return _numbered([main, *keys])[1][1:]


def _done(table: Mapping[str, Sequence[Any]], on_device: Bools) -> Bools:
    """Return which calls are over: gloo's stay ``scheduled`` and are retired; NCCL's retired ones have timed out."""
    completed = np.array([state == "completed" for state in table["state"]], dtype=bool)
    retired = np.array(list(map(bool, table["retired"])), dtype=bool)
    return completed | (retired & ~on_device)


class _Calls:
    """The compared facts of all entries, as columns; they are computed once for entries with equal facts."""

    def __init__(self, table: Mapping[str, Sequence[Any]]) -> None:
        compared = zip(table["profiling_name"], *map(table.__getitem__, _COMPARED), strict=True)
        # One text for equal lists, which have no hash; version 2 has no references, so equal is equal.
        keys = map(marshal.dumps, compared, repeat(2))
        distinct, kind = _numbered(keys)
        called = [marshal.loads(key)[0] for key in distinct]  # noqa: S302  - written above
        self.signatures: dict[Signature, int] = {}
        self.signature = self._each(kind, [self._number(_signature(key)) for key in distinct], np.int32)
        self.on_device = self._each(kind, [name.startswith(_DEVICES) for name in called], bool)
        self.is_apart = self._each(kind, [" " in name for name in called], bool)
        self.peers = self._each(kind, [_peers(name) for name in called], np.int32).reshape(-1, 3)

    def _number(self, signature: Signature) -> int:
        return self.signatures.setdefault(signature, len(self.signatures))

    @staticmethod
    def _each(kind: Ints, of_kind: Sequence[object], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.array(of_kind, dtype=dtype)[kind] if of_kind else np.empty(0, dtype=dtype)


@lru_cache(maxsize=4096)
def _signature(compared: bytes) -> Signature:
    """Return the signature of a call from its marshalled facts. Cached: most ranks of a job make the same calls."""
    return signature_of(dict(zip(("profiling_name", *_COMPARED), marshal.loads(compared), strict=True)))  # noqa: S302


def _peers(call: str) -> tuple[int, int, int]:
    """Return whether ``nccl:send 0->1`` sends, and both positions; (-1, 0, 0) for a call that names no peer."""
    found = _PEERS.search(call)
    return (-1, 0, 0) if found is None else (found[1] == "send", int(found[2]), int(found[3]))


def _exchanges(every: Mapping[str, Column], apart: Bools, calls: _Calls) -> dict[str, Column]:
    """Return the sends and receives of members, without the calls that only close a batch of them."""
    rows = np.flatnonzero(apart & (calls.peers[:, 0] >= 0))
    sends, me, peer = calls.peers[rows].T
    return {"sends": sends, "me": me, "peer": peer} | {
        name: every[name][rows] for name in ("group", "signature", "pending", "site")
    }


def _queued(every: Mapping[str, Column], apart: Bools, on_device: Bools, batches: Sequence[Any]) -> Bools:
    """Return which calls are queued behind the first unfinished call of the device, which its rank has not left.

    A program hands its calls to the device and goes on; there each waits for the one before, of any group. A
    communicator takes its own collectives in order, so calls on the same group are compared by their numbers.
    """
    waiting = np.flatnonzero(every["pending"] & on_device)
    behind = np.zeros(len(on_device), dtype=bool)
    if len(waiting) < 2:
        return behind
    first = waiting[0]
    same = every["group"][waiting] == every["group"][first]
    if apart[first]:  # of what is exchanged, only what was made as one with it
        batch = np.array([batches[row] == batches[first] for row in waiting.tolist()], dtype=bool)
        same &= apart[waiting] & batch & (every["number"][waiting] == every["number"][first])
    behind[waiting] = ~same
    return behind


def _lives(rows: dict[str, Column]) -> dict[str, Column]:
    """Drop the calls that a group made before it was created again under its name."""
    order = np.argsort(rows["group"], kind="stable")
    group, number = rows["group"][order], rows["number"][order]
    again = np.flatnonzero((group[1:] == group[:-1]) & (number[1:] <= 1) & (number[:-1] > 1)) + 1
    if not len(again):
        return rows
    begins = np.zeros(int(group[-1]) + 1, dtype=np.int64)
    np.maximum.at(begins, group[again], order[again])
    kept = np.arange(len(order)) >= begins[rows["group"]]
    return {name: column[kept] for name, column in rows.items()}


def _joined(rows: dict[str, Column], signatures: dict[Signature, int]) -> dict[str, Column]:
    """Join calls that were made as one: they follow each other under one number."""
    group, number = rows["group"], rows["number"]
    begins = np.ones(len(group), dtype=bool)
    begins[1:] = (group[1:] != group[:-1]) | (number[1:] != number[:-1])
    starts = np.flatnonzero(begins)
    if len(starts) == len(group):
        return rows
    listed = list(signatures)

    @cache
    def one(parts: tuple[int, ...]) -> int:
        signature = merged([listed[part] for part in parts])
        return signatures.setdefault(signature, len(signatures))

    parts = [tuple(part) for part in np.split(rows["signature"], starts[1:])]
    joined = {name: column[starts] for name, column in rows.items()}
    joined["signature"] = np.array([one(p) if len(p) > 1 else p[0] for p in parts])
    joined["pending"] = np.logical_or.reduceat(rows["pending"], starts)
    return joined
