"""A recording: the calls of one rank that the flight recorder kept, as columns.

```
calls       group  number  signature  pending  site  created     groups      tp/0/f116... tp@dp0 [0, 1]
            0      41      0          no       3     17...       signatures  all_reduce float32[4]
            0      42      0          yes      3     17...       sites       train.py:31 in step
exchanges   group  sends  me  peer  signature  pending  site
```

Signatures, sites and groups are listed once and numbered. The number of a call counts the collectives of its group, so
the calls of two ranks with one number are one call. A call that is sent from one member to another is an exchange: it
has the positions of both in the group instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from rankmesh.debug.doctor.columns import Columns, GroupName, columns_of
from rankmesh.errors import RecordingError

__all__ = ["TRUST", "GroupName", "InCall", "Recording", "recording_of"]

# How far what is known of a rank can be trusted; "" where something may be missing.
TRUST = ("", "possible", "likely", "certain")

# Ranks that no world reaches.
_RANKS = 2**20


@dataclass(frozen=True)
class InCall:
    """The call that a rank's program was in, by its Python frames; ``running`` where it was in none.

    ``members`` are the ranks of a group that the call creates, ``earlier`` how many groups the rank had before.
    """

    operation: str = ""
    group: str = ""
    peer: int | None = None
    root: int | None = None
    reduction: str = ""
    members: tuple[int, ...] = ()
    earlier: int | None = None
    site: str = ""
    running: bool = False


@dataclass(eq=False, kw_only=True)
class Recording(Columns):
    """The calls of one rank, oldest first; ``dropped`` where the ring buffer no longer holds the oldest.

    ``session`` is the watch that wrote it, "" for torch's own; ``request`` counts the dump requests to all ranks.
    ``state`` is what a rank that could not write looked like, ``alive`` whether its process ran. ``failure``: the error
    by which the program ended or is about to, "" for none. ``late_by`` is how many seconds after the first member the
    rank came to its next call, when that had given up. ``source`` are the files whose lines are all that is known of
    the rank (``lines``), "" for a recording, and ``trust`` is one of ``TRUST``.
    """

    rank: int
    path: str = ""
    world_size: int | None = None
    run: str = ""
    attempt: int = 0
    host: str = ""
    session: str = ""
    request: int = 0
    written: int = 0
    ended: bool = False
    state: str = ""
    alive: bool = False
    failure: str = ""
    dropped: bool = False
    late_by: float = 0.0
    in_call: InCall | None = None
    source: str = ""
    trust: str = "certain"

    def __len__(self) -> int:
        return len(self.number)

    def __bool__(self) -> bool:
        return True  # one without calls is there all the same

    @property
    def from_rank(self) -> bool:
        """Whether the rank was responsive when it was written; else it has only what others observed."""
        return not self.state and not (self.source and self.failure)

    @property
    def is_running(self) -> bool:
        """Whether the program ran, and was in no call."""
        return self.in_call is not None and self.in_call.running


def recording_of(data: Mapping[str, Any], rank: int | None, path: str = "") -> Recording:
    """Return the recording that a document holds; ``rank`` is the number in the name of its file.

    Raises ``RecordingError`` for anything else, or a format that is not known.
    """
    entries = _entries(data, path)
    section = data.get("rankmesh")
    about: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    number = about.get("rank", rank)
    if not isinstance(number, int) or not 0 <= number < _RANKS:
        raise RecordingError(f"{path} does not say of which rank it is; let its name end with the rank")
    stacks = data.get("stacks")
    try:
        in_call = _in_call(about.get("in_call"))
        columns = columns_of(entries, stacks if isinstance(stacks, list) else [])
        columns.groups = _counted(_named(columns.groups, data), data.get("pg_status"))
        if in_call is not None and in_call.members:
            columns.groups.append(GroupName(in_call.group, "", in_call.members))
        first = entries[0].get("record_id", 0) if entries else 0
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise RecordingError(f"{path} has entries that a recording does not have ({error!r:.80})") from error
    return Recording(
        **vars(columns),
        rank=number,
        path=path,
        world_size=_whole(about.get("world_size"), _RANKS),
        run=str(about.get("run", ""))[:200],
        attempt=_whole(about.get("attempt")) or 0,
        host=str(about.get("host", ""))[:200],
        session=str(about.get("session", ""))[:80],
        request=_whole(about.get("inquiry")) or 0,
        written=_whole(about.get("time_ns")) or 0,
        ended=about.get("ended") is True,
        state=str(about.get("state", ""))[:600],
        alive=about.get("alive") is True,
        failure=str(about.get("failure", ""))[:200],
        dropped=isinstance(first, int) and first > 0,
        in_call=in_call,
    )


def _entries(data: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """Return the calls of a document of a format that is known."""
    entries = data.get("entries")
    version = str(data.get("version", ""))[:20]
    parts = version.split(".")
    if not all(part.isdecimal() for part in parts) or not isinstance(entries, list):
        raise RecordingError(f"{path} is not a recording: it has no version, or no entries")
    if int(parts[0]) != 2 or (len(parts) > 1 and int(parts[1]) < 1):
        raise RecordingError(f"{path} is a recording of format {version}; formats from 2.1 to before 3 are known")
    return entries


def _whole(value: object, end: int = 2**63) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end else None


def _in_call(data: object) -> InCall | None:
    if not isinstance(data, Mapping):
        return None
    texts = {name: str(data.get(name, ""))[:400] for name in ("operation", "group", "reduction", "site")}
    numbers = {name: _whole(data.get(name)) for name in ("peer", "root", "earlier")}
    members = _ranks(data.get("members")) or ()
    return InCall(**texts, **numbers, members=members, running=data.get("running") is True)  # type: ignore[arg-type]


def _named(groups: Sequence[GroupName], data: Mapping[str, Any]) -> list[GroupName]:
    """Return the groups of the calls, with their members where the recording has them; then those without calls.

    A call has the description that its group was made with; whoever wrote the recording may have found another.
    """
    config = data.get("pg_config")
    members: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for name, about in (config if isinstance(config, Mapping) else {}).items():
        if isinstance(about, Mapping):
            listed = about["ranges"] if "ranges" in about else about.get("ranks")
            members[str(name)] = (str(about.get("desc", ""))[:400], _ranks(listed))
    found = []
    for group in groups:
        desc, ranks = members.get(group.name, ("", None))
        found.append(replace(group, desc=group.desc if group.is_described else desc or group.desc, members=ranks))
    seen = {group.name for group in found}
    return found + [
        GroupName(name, desc, ranks) for name, (desc, ranks) in members.items() if ranks and name not in seen
    ]


def _counted(groups: list[GroupName], status: object) -> list[GroupName]:
    """Add to the groups the last call that torch counted as enqueued, which may be gone from the ring buffer.

    torch counts by its own numbers, which calls have. For groups without calls the order decides: torch names and
    numbers groups as they are made.
    """
    if not isinstance(status, Mapping):
        return groups
    last = {
        str(number): _whole(about.get("last_enqueued_collective"))
        for number, about in status.items()
        if isinstance(about, Mapping)
    }
    number_of = {group.name: group.number for group in groups if group.number in last}
    if len(last) == len(groups) and all(name.isdecimal() for name in (*last, *(group.name for group in groups))):
        made = sorted((group.name for group in groups), key=int)
        by_order = dict(zip(made, sorted(last, key=int), strict=True))
        if all(by_order[name] == number for name, number in number_of.items()):
            number_of = by_order
    return [
        replace(group, enqueued=last[number_of[group.name]]) if group.name in number_of else group for group in groups
    ]


def _ranks(value: object) -> tuple[int, ...] | None:
    """Return the members, which torch writes as a text, ``[0, 1]``, and a watch as ranges, ``[[0, 2, 1]]``."""
    if isinstance(value, str):
        return _members(value[: 2**22])
    if not isinstance(value, list | tuple):
        return None
    if value and isinstance(value[0], list | tuple):
        return _members(tuple(range(int(start), int(stop), int(step)) for start, stop, step in value))
    return _members(tuple(map(int, value)))


@lru_cache(maxsize=64)
def _members(given: str | tuple[int, ...] | tuple[range, ...]) -> tuple[int, ...] | None:
    """Return the ranks. Cached: the world's members, equal in all recordings of a job, are one object."""
    if isinstance(given, str):
        given = tuple(map(int, re.findall(r"\d{1,9}", given)))
    ranges = [each if isinstance(each, range) else range(each, each + 1) for each in given]
    ends = [end for each in ranges if each for end in (each[0], each[-1])]
    if ends and not (0 <= min(ends) <= max(ends) < _RANKS and sum(map(len, ranges)) <= _RANKS):
        raise ValueError(f"a group with rank {max(ends, key=abs)}, where a world has at most {_RANKS} ranks")
    return tuple(chain.from_iterable(ranges)) or None
