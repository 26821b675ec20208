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

Numbers of calls are compared in groups whose name is the same on all members (``LogGroup.is_named``), and where no call
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

__all__ = ["Log", "LogGroup", "Status", "Work", "lines_of_logs", "log_of", "size_of_job"]

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
# torch 2.5 and newer; 2.4 and older.
_GUID = re.compile(r"ID \d{1,9} PG GUID (?P<name>[^( ]{1,200})(?:\((?P<desc>.{1,200})\))?")
_NAME = re.compile(r"(?P<name>[^( ]{1,200}?)(?: \((?P<desc>.{1,200})\))?")
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
# The name of the world's group, where it has no description.
_WORLD = "0"
# torch's number of elements where it has none.
_NO_SIZE = 2**64 - 1


@dataclass(frozen=True)
class LogGroup:
    """A process group as a log names it; ``actor`` are Ray's workers, each kind of which is a world of its own.

    ``is_named`` is False for a name that torch 2.3 and older counts in each process: ranks have other groups under it.
    """

    name: str
    desc: str = ""
    actor: str = ""
    is_named: bool = True

    @property
    def is_world(self) -> bool:
        """Whether this is the default group, whose positions are the ranks of the job."""
        return self.desc == DEFAULT or (self.name == _WORLD and not self.desc)


@dataclass(frozen=True)
class Work:
    """A call that timed out; sizes are numbers of elements, None where torch has none."""

    number: int
    operation: str
    sent: int | None = None
    received: int | None = None


@dataclass(frozen=True)
class Status:
    """One line of the watchdog: a process at a position of a group, and what it says; ``time`` is in seconds."""

    group: LogGroup | None
    position: int
    rank: int | None = None
    actor: str = ""
    number: int | None = None
    work: Work | None = None
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
    """Yield what a line says: processes that write at once may share one."""
    heads = list(_SOURCE.finditer(line))
    ends = [head.start() for head in heads[1:]] + [len(line)] * bool(heads)
    for head, end in zip(heads, ends, strict=True):
        text = line[head.end() : end]
        caught, at, status = _CAUGHT.search(text), _AT.search(text), _STATUS.search(text)
        position = head["position"] or (caught and caught["position"])
        if position is None or not (caught or at or status):
            continue
        actor = _ACTOR.search(line[: head.start()])
        kind = actor[1] if actor else ""
        group = _named(head["group"], kind) if head["group"] else None
        is_world = group is not None and group.is_world
        yield Status(
            group=group,
            position=int(position),
            rank=int(head["rank"]) if head["rank"] else int(position) if is_world else of_file,
            actor=kind,
            number=int(caught["number"]) if caught else int(at[1]) if at else None,
            work=_work(caught) if caught else None,
            enqueued=int(status[1]) if status else None,
            completed=int(status[2]) if status else None,
            time=_seconds(head) if head["month"] else None,
            timeout=int(caught["timeout"]) // 1000 if caught and caught["timeout"] else None,
        )


def _named(text: str, actor: str) -> LogGroup | None:
    """Return the group that a prefix of torch's names."""
    if match := _GUID.fullmatch(text):
        return LogGroup(match["name"], match["desc"] or "", actor)
    if match := _NAME.fullmatch(text):
        is_named = match["desc"] is not None or match["name"] == _WORLD
        return LogGroup(match["name"], match["desc"] or "", actor, is_named)
    return None


def _work(caught: re.Match[str]) -> Work:
    sizes = [None if text is None or int(text) == _NO_SIZE else int(text) for text in caught.group("sent", "received")]
    return Work(int(caught["number"]), caught["operation"], *sizes)


def _seconds(head: re.Match[str]) -> int:
    """Return the time of a line as seconds in a year."""
    month, day, hour, minute, second = map(int, head.group("month", "day", "hour", "minute", "second"))
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


# -- lines of ranks ----------------------------------------------------------------------------------------------------


def size_of_job(logs: Iterable[Log], plan: Plan | None = None) -> int:
    """Return how many ranks the job has at least, by the plan and by the highest rank in a line."""
    ranks = [line.rank for log in logs for line in log.lines if line.rank is not None and line.rank < _RANKS]
    return max([plan.world_size if plan else 0, *(rank + 1 for rank in ranks)])


def _last_attempt(logs: Iterable[Log]) -> list[Status]:
    """Return the lines of the last attempt: earlier lines are at least a timeout older than the last line."""
    lines = [line for log in logs for line in log.lines]
    last = max((line.time for line in lines if line.time is not None), default=0)
    timeouts = [line.timeout for line in lines if line.timeout is not None]
    begin = last - max(_LEAST, min(timeouts, default=_TIMEOUT))
    return [line for line in lines if line.time is None or line.time >= begin]


def lines_of_logs(logs: Sequence[Log], plan: Plan | None = None, world_size: int | None = None) -> Iterator[Line]:
    """Yield what the last attempt in these logs states of each rank; ``world_size`` is None where nothing states it."""
    statuses = _last_attempt(logs)
    actors = {status.actor for status in statuses}
    is_whole = not any(log.is_partial for log in logs) and not any(status.rank is None for status in statuses)
    source = first_of([log.path for log in logs])
    for group, found in _groups(statuses).items():
        members = {key: _Member.of(*key, lines) for key, lines in sorted(found.items(), key=lambda each: each[0][0])}
        is_comparable = _is_comparable(group, list(members.values()))
        is_named = all(member.rank is not None for member in members.values())
        name = _name(group, members.values(), plan if is_named else None, world_size)
        label = f"{name.desc or 'group'} {name.name[:16]}".rstrip()
        actor = group.actor if group is not None and len(actors) > 1 else ""
        trust = "" if not is_whole or len(actors) > 1 else "likely" if is_comparable else "possible"
        works = {work.number: work for member in members.values() for work in member.works}
        for member in members.values():
            rank = member.position if member.rank is None or not is_named else member.rank
            one = Line(
                source=source,
                rank=rank,
                job=actor if is_named else label,
                is_position=not is_named,
                group=name,
                trust=trust,
            )
            numbers = {work.number for work in member.works}
            calls = list(member.works)
            if member.call is not None and member.call not in numbers:
                calls.append(works.get(member.call, Work(member.call, "")))
            for work in calls:
                what = _operation(work)
                if is_comparable:
                    yield replace(one, number=work.number, operation=what, sizes=_sizes(work))
                else:
                    yield replace(one, group=WORLD, number=0, operation=f"{what}, call {work.number} of {label}")
            if not calls:
                yield replace(one, enqueued=member.enqueued) if is_comparable else replace(one, group=WORLD)


@dataclass(frozen=True)
class _Member:
    """A process in a group: the number of the ``call`` that it waits in, None for none; and what it has enqueued."""

    position: int
    rank: int | None
    call: int | None
    enqueued: int | None
    works: tuple[Work, ...]

    @classmethod
    def of(cls, position: int, rank: int | None, lines: Sequence[Status]) -> _Member:
        """Return the member that these lines are of."""
        numbers = [line.number for line in lines if line.number is not None]
        enqueued = max((line.enqueued for line in lines if line.enqueued is not None), default=None)
        completed = max((line.completed for line in lines if line.completed is not None), default=None)
        call = min(numbers, default=None)
        if call is None and enqueued is not None and completed is not None and completed < enqueued:
            call = max(completed, 0) + 1
        return cls(position, rank, call, enqueued, tuple(dict.fromkeys(line.work for line in lines if line.work)))


def _groups(lines: Sequence[Status]) -> dict[LogGroup | None, dict[tuple[int, int | None], list[Status]]]:
    """Return the lines by group, position and rank."""
    found: dict[LogGroup | None, dict[tuple[int, int | None], list[Status]]] = {}
    at = grouped((_call_of(line), line.group) for line in lines if line.group is not None and line.number is not None)
    for line in lines:
        group = line.group
        if group is None and len(named := set(at.get(_call_of(line), ()))) == 1:
            [group] = named
        elif group is None and named:
            continue  # of one of several groups, each of which has a line of its own
        found.setdefault(group, {}).setdefault((line.position, line.rank), []).append(line)
    return found


def _call_of(line: Status) -> tuple[object, ...]:
    """Return what a line without a group has in common with the line that names the group of its call."""
    return line.actor, line.rank, line.position, line.number


def _is_comparable(group: LogGroup | None, members: Sequence[_Member]) -> bool:
    """Return whether the lines are of one group, and numbers of calls mean the same on all members."""
    known = [member.rank for member in members if member.rank is not None]
    return (
        group is not None
        and group.is_named
        and len({member.position for member in members}) == len(members)
        and len(set(known)) == len(known)
        and not (group.is_world and any(member.rank != member.position for member in members))
        and not any(work.operation.lstrip("_") in _APART for member in members for work in member.works)
        and all(len({work.number for work in member.works}) == len(member.works) for member in members)
    )


def _name(group: LogGroup | None, members: Iterable[_Member], plan: Plan | None, world_size: int | None) -> GroupName:
    """Return a group as a recording has it, with its members where the plan or the size of the job tells them."""
    if group is None:
        return GroupName("", "a group that the log does not name")
    if group.is_world:
        return replace(WORLD, members=tuple(range(world_size)) if world_size else None)
    desc = group.desc.rpartition(":")[2]
    local = group_at(plan, {m.position: m.rank for m in members if m.rank is not None}, desc.partition("@")[0])
    return GroupName(group.name, group.desc, None if local is None else local.ranks)


def _operation(work: Work) -> str:
    """Return an operation as the flight recorder names it."""
    name = work.operation.lstrip("_")
    return _RECORDED.get(name, name.lower()) or "a collective"


def _sizes(work: Work) -> tuple[int, ...]:
    """Return the sizes of a call that are the same on all members of its group."""
    return () if work.sent is None or work.operation.lstrip("_") not in _EQUAL else (work.sent,)
