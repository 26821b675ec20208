"""Lines of torch's NCCL watchdog in logs: the call that each rank waits in, and the ranks that are not in it.

```
[rank9]:[E606 09:09:08.1 ProcessGroupNCCL.cpp:757] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(
SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.
[rank9]:[E606 ...] [PG ID 2 PG GUID 5(tp) Rank 1]  failure detected by watchdog at work sequence id: 7 PG status: last
enqueued work: 9, last completed work: 6
```

Rank 9 of the job is position 1 of group 5. The first line has no group: the second one, with the same call, names it.
Launchers put their own prefixes before these lines. A launcher's number may be a host's or a local rank: only torch's
own ``[rank9]:`` is taken as the rank, else the position in the world's group, else the name of the file or its folder.

Numbers of calls are compared in groups whose name is the same on all members (``Status.is_named``), and where no call
is between two of them: torch counts sends and receives apart, in the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import DEFAULT, group_at
from rankmesh.debug.doctor.lines import WORLD, Line
from rankmesh.debug.doctor.texts import Text, origin_of
from rankmesh.errors import first_of

__all__ = ["Log", "Status", "lines_of_logs", "log_of"]

# What every line has that is looked at, and how many of these lines are kept.
_MARK, _LINES = "ProcessGroupNCCL", 1 << 16
# Operations whose sizes are the same on all ranks, their names in the flight recorder, and operations that show that
# numbers count sends and receives, too.
_EQUAL = {"ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER_BASE", "REDUCE_SCATTER_BASE"}
_RECORDED = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "_all_gather_base",
    "REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
_APART = {"SEND", "RECV", "COALESCED", "UNKNOWN", "BATCH_ISEND_IRECV"}
# Seconds in which the lines of one attempt are, without a timeout; and at least.
_TIMEOUT, _LEAST = 600, 60
_RANKS = 2**20

_SOURCE = re.compile(
    r"(?:\[rank(?P<rank>\d{1,7})\]:\s?)?"
    r"\[[EWFI](?:(?P<month>\d{1,2})(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\S{0,12})?"
    r"\s?(?:\d+ )?ProcessGroupNCCL\.cpp:\d{1,6}\]\s?"
    r"(?:\[PG (?P<group>[^\]]{1,300}?) Rank (?P<position>\d{1,7})\])?"
)
# torch 2.5 and newer have the first part.
_GROUP = re.compile(r"(?P<guid>ID \d{1,9} PG GUID )?(?P<name>[^( ]{1,200})(?: ?\((?P<desc>.{1,200})\))?")
_CAUGHT = re.compile(
    r"\[Rank (?P<position>\d{1,7})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum="
    r"(?P<number>\d{1,18}), OpType=(?P<operation>\w{1,40})"
    r"(?:, NumelIn=(?P<sent>\d{1,20}), NumelOut=(?P<received>\d{1,20}))?"
    r"(?:, Timeout\(ms\)=(?P<timeout>\d{1,15}))?"
)
_AT = re.compile(r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): (\d{1,18})")
_STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,18})(?:, last started [^,]{1,100})?"
    r", last completed (?:NCCL )?work: (-?\d{1,18})",
    re.IGNORECASE,
)
_ACTOR = re.compile(r"\((\w{1,80})[^()]{0,200}?pid=\d")
# Ray prints one of several similar lines.
_FOLDED = re.compile(r"\[repeated \d+x across cluster\]")
# torch's number of elements where it has none.
_NO_SIZE = 2**64 - 1


@dataclass(frozen=True)
class Status:
    """One line of the watchdog: the call or the counts of a process at a position of a group; ``time`` is in seconds.

    ``is_named`` is False for a group whose name torch 2.3 and older counts in each process: others have other groups
    under it. Each kind of Ray's workers (``actor``) is a world of its own. ``sent`` are elements.
    """

    group: GroupName | None
    position: int
    is_named: bool = True
    rank: int | None = None
    actor: str = ""
    number: int | None = None
    operation: str = ""
    sent: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    time: int | None = None
    timeout: int | None = None


@dataclass(frozen=True)
class Log:
    """One log. ``is_partial``: lines may be missing, as the log is too large or Ray has printed similar ones once."""

    path: str
    lines: tuple[Status, ...]
    is_partial: bool = False


def log_of(text: Text) -> tuple[Log, ...]:
    """Return the lines of the watchdog in a text; nothing if it has none."""
    rank, found, is_partial = origin_of(text.path).rank, dict[Status, None](), text.is_cut
    for line in text.lines_with(_MARK):
        is_partial = is_partial or _FOLDED.search(line) is not None
        found.update(dict.fromkeys(_statuses(line, rank)))
        if len(found) > _LINES:
            is_partial = True
            break
    return (Log(text.path.name, tuple(found), is_partial),) if found else ()


def _statuses(line: str, of_file: int | None) -> Iterator[Status]:
    """Parse a line; processes that write at once may share one."""
    heads = list(_SOURCE.finditer(line))
    ends = [head.start() for head in heads[1:]] + [len(line)] * bool(heads)
    for head, end in zip(heads, ends, strict=True):
        text = line[head.end() : end]
        caught, at, status = _CAUGHT.search(text), _AT.search(text), _STATUS.search(text)
        position = head["position"] or (caught and caught["position"])
        if position is None or not (caught or at or status) or max(int(position), int(head["rank"] or 0)) >= _RANKS:
            continue
        actor = _ACTOR.search(line[: head.start()])
        group, is_named = _named(head["group"] or "")
        sent = caught and caught["sent"]
        yield Status(
            group=group,
            position=int(position),
            is_named=is_named,
            rank=int(head["rank"]) if head["rank"] else int(position) if group is WORLD else of_file,
            actor=actor[1] if actor else "",
            number=int(caught["number"]) if caught else int(at[1]) if at else None,
            operation=caught["operation"].lstrip("_") if caught else "",
            sent=None if not sent or int(sent) == _NO_SIZE else int(sent),
            enqueued=int(status[1]) if status else None,
            completed=int(status[2]) if status else None,
            time=_seconds(head) if head["month"] else None,
            timeout=int(caught["timeout"]) // 1000 if caught and caught["timeout"] else None,
        )


def _named(text: str) -> tuple[GroupName | None, bool]:
    """Return the group that a prefix of torch's names, and whether the name is the same on all members."""
    match = _GROUP.fullmatch(text)
    if match is None:
        return None, False
    guid, name, desc = match.groups()
    is_world = desc == DEFAULT or (name == WORLD.name and not desc)
    return WORLD if is_world else GroupName(name, desc or ""), bool(is_world or guid or desc)


def _seconds(head: re.Match[str]) -> int:
    """Return the time of a line as seconds in a year."""
    month, day, hour, minute, second = map(int, head.group("month", "day", "hour", "minute", "second"))
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


# -- lines of ranks ----------------------------------------------------------------------------------------------------


def _last_attempt(logs: Iterable[Log]) -> list[Status]:
    """Return the lines of the last attempt: earlier lines are at least a timeout older than the last line."""
    lines = [line for log in logs for line in log.lines]
    last = max((line.time for line in lines if line.time is not None), default=0)
    timeouts = [line.timeout for line in lines if line.timeout is not None]
    begin = last - max(_LEAST, min(timeouts, default=_TIMEOUT))
    return [line for line in lines if line.time is None or line.time >= begin]


def lines_of_logs(logs: Sequence[Log], plan: Plan | None = None, world_size: int | None = None) -> Iterator[Line]:
    """Yield a line for each rank and call of the last attempt; ``world_size`` is None if it is not stated."""
    statuses = _last_attempt(logs)
    is_one = len({status.actor for status in statuses}) == 1
    is_whole = is_one and not any(log.is_partial for log in logs) and all(line.rank is not None for line in statuses)
    source = first_of([log.path for log in logs])
    for (actor, group), lines in _by_group(statuses).items():
        is_comparable = group is not None and _is_comparable(lines)
        is_named = all(line.rank is not None for line in lines)
        name = _with_members(group, lines, plan if is_named else None, world_size)
        label = f"{name.desc or 'group'} {name.name[:16]}".rstrip()
        made = {line.number: line for line in lines if line.operation}
        members = grouped(((line.position, line.rank), line) for line in lines)
        for (position, rank), of_member in sorted(members.items(), key=lambda each: each[0][0]):
            one = Line(
                source=source,
                rank=position if rank is None or not is_named else rank,
                job=label if not is_named else "" if is_one else actor,
                is_position=not is_named,
                group=name if is_comparable else WORLD,
                trust="" if not is_whole else "likely" if is_comparable else "possible",
            )
            enqueued = max((line.enqueued for line in of_member if line.enqueued is not None), default=None)
            calls = _calls(of_member, enqueued)
            if not calls:
                yield replace(one, enqueued=enqueued if is_comparable else None)
            for number, call in calls.items():
                call = call or made.get(number) or of_member[0]
                what = _RECORDED.get(call.operation, call.operation.lower()) or "a collective"
                if is_comparable:
                    sizes = () if call.sent is None or call.operation not in _EQUAL else (call.sent,)
                    yield replace(one, number=number, operation=what, sizes=sizes)
                else:
                    yield replace(one, number=0, operation=f"{what}, call {number} of {label}")


def _calls(lines: Sequence[Status], enqueued: int | None) -> dict[int, Status | None]:
    """Return the calls in which a rank waits: by number, the line that has the operation, None without one."""
    found = {line.number: line for line in lines if line.operation and line.number is not None}
    number = min((line.number for line in lines if line.number is not None), default=None)
    completed = max((line.completed for line in lines if line.completed is not None), default=None)
    if number is None and enqueued is not None and completed is not None and completed < enqueued:
        number = max(completed, 0) + 1
    return {**found, **({} if number is None or number in found else {number: None})}


def _by_group(lines: Sequence[Status]) -> dict[tuple[str, GroupName | None], list[Status]]:
    """Return the lines of each group; one without a group is of the group that another line of its call has."""
    calls = [(line.actor, line.rank, line.position, line.number) for line in lines]
    pairs = list(zip(calls, lines, strict=True))
    named = grouped((call, line.group) for call, line in pairs if line.group is not None and line.number is not None)
    groups = [{line.group} if line.group is not None else set(named.get(call, [None])) for call, line in pairs]
    return grouped(((line.actor, *of), line) for line, of in zip(lines, groups, strict=True) if len(of) == 1)


def _is_comparable(lines: Sequence[Status]) -> bool:
    """Return whether lines are of one group, and numbers of calls mean the same on all members."""
    members = {(line.position, line.rank) for line in lines}
    calls = {(line.position, line.number, line.operation, line.sent) for line in lines if line.operation}
    return (
        all(line.is_named or line.group is None for line in lines)
        and len({position for position, _ in members}) == len(members)
        and len(known := [rank for _, rank in members if rank is not None]) == len(set(known))
        and not any(line.group is WORLD and line.rank != line.position for line in lines)
        and not any(line.operation in _APART for line in lines)
        and len({call[:2] for call in calls}) == len(calls)
    )


def _with_members(
    group: GroupName | None, lines: Sequence[Status], plan: Plan | None, world_size: int | None
) -> GroupName:
    """Return a group with its members, where they follow from the plan or the size of the job."""
    if group is None:
        return GroupName("", "a group that the log does not name")
    if group is WORLD:
        return replace(WORLD, members=tuple(range(world_size)) if world_size else None)
    ranks = {line.position: line.rank for line in lines if line.rank is not None}
    local = group_at(plan, ranks, group.desc.rpartition(":")[2].partition("@")[0])
    return replace(group, members=None if local is None else local.ranks)
