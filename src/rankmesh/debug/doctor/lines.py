"""Lines: statements of logs, reports, stacks and errors on one rank, and the partial recordings that they make.

```
log       rank 9 waits in call 7 of group 5(tp), ALLREDUCE of 4 elements  ┐
report    rank 9 has launched 640 AllGathers in communicator 0x1          ├─> one Recording for each rank
stack     rank 9 is in no collective, at data.py:8 in load                │
error     rank 9 failed: ValueError: a sample has no label              ┘
```

A partial recording has the calls in which its rank waits, and how far it got in groups (``GroupName.enqueued``). Where
a rank is known by its position in one group alone, that group is a job of its own, and no rank is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import DEFAULT
from rankmesh.debug.doctor.recording import TRUST, InCall, Recording, recording_of
from rankmesh.errors import first_of

__all__ = ["WORLD", "Line", "ranks_of_processes", "recordings_of", "with_lines"]

_Process = TypeVar("_Process", bound=Hashable)
# The group of all ranks, as torch names it.
WORLD = GroupName("0", DEFAULT)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Statement of one line of ``source`` on a rank in a group.

    ``number`` is the call in which the rank waits, 0 for a call whose number is not known, None where it waits in none;
    ``enqueued`` is the last call that it made. ``state`` is why it does not respond, ``failure`` the error that ended
    it; ``is_running``: its stack is in no call. ``trust`` is "likely", "possible", or "" where lines may be missing.
    ``job`` is "" for a rank of the job; else ``rank`` is one of other ranks, or, if ``is_position``, a position in a
    group.
    """

    source: str
    rank: int
    job: str = ""
    is_position: bool = False
    group: GroupName = WORLD
    number: int | None = None
    operation: str = ""
    sizes: tuple[int, ...] = ()
    enqueued: int | None = None
    site: str = ""
    state: str = ""
    alive: bool = False
    is_running: bool = False
    failure: str = ""
    trust: str = "likely"


def ranks_of_processes(positions: Iterable[tuple[_Process, int]]) -> dict[_Process, int] | None:
    """Return the ranks of processes by their positions in communicators of the whole job; None where two contradict."""
    named = set(positions)
    ranks = dict(named)
    return ranks if len(ranks) == len(named) else None


def recordings_of(lines: Iterable[Line], world_size: int | None = None) -> dict[int, Recording]:
    """Return a partial recording of each rank; ``world_size`` is None where nothing states it."""
    by_rank = sorted(grouped((line.rank, line) for line in lines).items())
    return {rank: _recording(rank, of_rank, world_size) for rank, of_rank in by_rank}


def _recording(rank: int, lines: Sequence[Line], world_size: int | None) -> Recording:
    calls = {(line.group.name, line.number): line for line in lines if line.number}
    made = recording_of({"version": "2.1", "entries": list(map(_entry, calls.values()))}, rank)
    groups = {line.group.name: line.group for line in lines}
    enqueued = grouped((line.group.name, line.enqueued) for line in lines if line.enqueued is not None)
    names = dict.fromkeys([*(group.name for group in made.groups), *groups])
    inside = next((line for line in lines if line.number == 0), None)
    site = next((line.site for line in lines if line.site), "")
    return replace(
        made,
        groups=[replace(groups[name], enqueued=max(enqueued.get(name, ()), default=None)) for name in names],
        world_size=world_size,
        source=first_of(list(dict.fromkeys(line.source for line in lines))),
        trust=min((line.trust for line in lines), key=TRUST.index),
        state=next((line.state for line in lines if line.state), ""),
        alive=any(line.alive for line in lines),
        failure=next((line.failure for line in lines if line.failure), ""),
        in_call=InCall(
            inside.operation if inside else "",
            site=site,
            running=not (calls or inside) and any(line.is_running for line in lines),
        ),
    )


def _entry(line: Line) -> dict[str, object]:
    """Return the call in which a rank waits as an entry of the flight recorder, not its first one."""
    return {
        "record_id": 1,
        "process_group": (line.group.name, line.group.desc),
        "profiling_name": line.operation,
        "collective_seq_id": line.number,
        "input_sizes": [[size] for size in line.sizes],
        "state": "started",
    }


def with_lines(recordings: Mapping[int, Recording], partial: Mapping[int, Recording]) -> dict[int, Recording]:
    """Return recordings with the errors and sites that lines add to them, and partial ones of the ranks without any.

    Lines have no dtype, and not every size: a call of theirs is the recorded one that it may be.
    """
    known = {
        (one.operation, size): one for r in recordings.values() for one in r.signatures for size in (_size(one), ())
    }
    found = {
        rank: replace(one, signatures=[known.get((made.operation, _size(made)), made) for made in one.signatures])
        for rank, one in partial.items()
    }
    for rank, recording in recordings.items():
        lines = partial.get(rank)
        if lines is None:
            found[rank] = recording
        elif recording.from_rank or not lines.from_rank:
            site = lines.in_call.site if lines.in_call is not None else ""
            in_call = recording.in_call or (InCall(site=site) if site else None)
            found[rank] = replace(recording, failure=recording.failure or lines.failure, in_call=in_call)
    return found


def _size(call: Signature) -> Hashable:
    return call.signature.get("sizes", ())
