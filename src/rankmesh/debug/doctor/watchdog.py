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

```
different   one call of a group is ALLREDUCE on some ranks and BROADCAST on others, or has other sizes
behind      others wait in a call that this rank has not enqueued; it waits nowhere, and all other ranks do
ahead       waits in a call that the most have not enqueued
differ      ranks are at different calls, and no rank can be named
missing     has no line of the watchdog; named where all others wait
waiting     waits in a call, and nothing says for whom
```

Ranks are compared in groups whose name is the same on all members (``LogGroup.is_named``), and where no call is between
two of them: torch counts sends and receives apart, in the same numbers. Only two different calls at one number are
certain. A rank that is behind may wait in a call that has not timed out yet: it is named only if it is the only one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.evidence import Finding, all_known, ranks_in_words
from rankmesh.debug.doctor.groups import DEFAULT, group_at
from rankmesh.debug.doctor.texts import Text, origin_of
from rankmesh.errors import first_of, in_words

__all__ = ["Log", "LogGroup", "Status", "Work", "findings_of_logs", "log_of", "size_of_job"]

# What every line has that is looked at, and how many of these lines are kept.
_MARK, _LINES = "ProcessGroupNCCL", 1 << 16
# Operations whose sizes are the same on all ranks, and those in the numbers of which sends and receives may be.
_EQUAL = {"ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER_BASE", "REDUCE_SCATTER_BASE"}
_APART = {"SEND", "RECV", "COALESCED", "UNKNOWN", "BATCH_ISEND_IRECV"}
# Seconds in which the lines of one attempt are, without a timeout; and at least.
_TIMEOUT, _LEAST = 600, 60
# Calls that one finding lists, and ranks of a job.
_SHOWN, _RANKS = 4, 2**20

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


# -- members ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """A process in a group: the number of the ``call`` that it waits in, None for none; and what it has enqueued."""

    position: int
    rank: int | None
    call: int | None
    enqueued: int | None
    works: tuple[Work, ...]

    @property
    def work(self) -> Work | None:
        """The call that it waits in, if its operation is known."""
        return next((work for work in self.works if work.number == self.call), None)


@dataclass(frozen=True)
class _Group:
    """A group, the processes of which there are lines, and how many it has at least."""

    group: LogGroup | None
    label: str
    size: int
    members: tuple[_Member, ...]

    @cached_property
    def waiting(self) -> tuple[_Member, ...]:
        """Those that wait in a call."""
        return tuple(member for member in self.members if member.call is not None)

    @cached_property
    def first(self) -> int:
        """The first call that a member waits in."""
        return min(member.call for member in self.waiting if member.call is not None)

    @cached_property
    def behind(self) -> tuple[_Member, ...]:
        """Those that have not enqueued the first call that others wait in."""
        if not self.is_comparable or not self.waiting:
            return ()
        return tuple(m for m in self.members if m.call is None and m.enqueued is not None and m.enqueued < self.first)

    @cached_property
    def is_comparable(self) -> bool:
        """Whether the lines are of one group, and numbers of calls mean the same on all members."""
        members, works = self.members, [work for member in self.members for work in member.works]
        known = [member.rank for member in members if member.rank is not None]
        return (
            self.group is not None
            and self.group.is_named
            and len({member.position for member in members}) == len(members)
            and len(set(known)) == len(known)
            and not (self.group.is_world and any(member.rank != member.position for member in members))
            and not any(work.operation.lstrip("_") in _APART for work in works)
            and all(len({work.number for work in member.works}) == len(member.works) for member in members)
        )


def findings_of_logs(logs: Sequence[Log], plan: Plan | None = None, world_size: int = 0) -> tuple[Finding, ...]:
    """Return the findings of each group; other files show that the job has at least this many ranks."""
    lines = _last_attempt(logs)
    groups = _groups(lines, plan)
    ranks = {line.rank for line in lines}
    known = {rank for rank in ranks if rank is not None and rank < _RANKS}
    total = max(size_of_job(logs, plan), world_size)
    waiting = {member.rank for each in groups for member in each.waiting}
    absent = set(range(total)) - waiting
    # Whoever is not known may be any rank, and so may be one whose lines are missing.
    is_whole = (
        None not in ranks and not any(log.is_partial for log in logs) and len({line.actor for line in lines}) == 1
    )
    suspects = absent if is_whole and len(absent) == 1 else set[int]()
    source = first_of([log.path for log in logs])
    found = [_finding(each, suspects, source) for each in groups if each.waiting]
    missing = absent - known
    if is_whole and waiting and known and (missing or total == 1):
        here = f"{in_words(known & waiting)} {'waits' if len(known & waiting) == 1 else 'wait'}"
        if missing and 2 * len(missing) < total:
            whom = tuple(missing & suspects)
            what = f"no line of torch's watchdog is of {in_words(missing)} of {total}; {here}"
            found.append(Finding("missing", whom, "world", what, "possible", source))
        elif found:  # the logs of one pod or host: nothing is known of the others
            of = f" of {total}" if world_size or plan else ""
            more = f"there are lines of {in_words(known)}{of} alone: add the logs of the other ranks"
            found[0] = replace(found[0], evidence=f"{found[0].evidence}; {more}")
    return tuple(found)


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


# -- groups ----------------------------------------------------------------------------------------------------------


def _groups(lines: Sequence[Status], plan: Plan | None) -> list[_Group]:
    """Return the groups with their members, each with all its lines."""
    found: dict[LogGroup | None, dict[tuple[int, int | None], list[Status]]] = {}
    at = grouped((_call_of(line), line.group) for line in lines if line.group is not None and line.number is not None)
    for line in lines:
        group = line.group
        if group is None and len(named := set(at.get(_call_of(line), ()))) == 1:
            [group] = named
        elif group is None and named:
            continue  # of one of several groups, each of which has a line of its own
        found.setdefault(group, {}).setdefault((line.position, line.rank), []).append(line)
    return [_group(group, members, plan) for group, members in found.items()]


def _call_of(line: Status) -> tuple[object, ...]:
    """Return what a line without a group has in common with the line that names the group of its call."""
    return line.actor, line.rank, line.position, line.number


def _group(group: LogGroup | None, found: Mapping[tuple[int, int | None], list[Status]], plan: Plan | None) -> _Group:
    members = tuple(
        _member(position, rank, lines) for (position, rank), lines in sorted(found.items(), key=lambda each: each[0][0])
    )
    least = 1 + max(member.position for member in members)
    if group is None:
        return _Group(None, "a group that the log does not name", least, members)
    if group.is_world:
        return _Group(group, "world", max(least, plan.world_size if plan else 0), members)
    desc = group.desc.rpartition(":")[2]
    ranks = {member.position: member.rank for member in members if member.rank is not None}
    local = group_at(plan, ranks, desc.partition("@")[0]) if len(ranks) == len(members) else None
    if local is not None:
        return _Group(group, str(local), len(local.ranks), members)
    return _Group(group, desc if "@" in desc else f"{desc or 'group'} {group.name[:16]}", least, members)


def _member(position: int, rank: int | None, lines: Sequence[Status]) -> _Member:
    numbers = [line.number for line in lines if line.number is not None]
    enqueued = max((line.enqueued for line in lines if line.enqueued is not None), default=None)
    completed = max((line.completed for line in lines if line.completed is not None), default=None)
    call = min(numbers, default=None)
    if call is None and enqueued is not None and completed is not None and completed < enqueued:
        call = max(completed, 0) + 1
    works = dict.fromkeys(line.work for line in lines if line.work is not None)
    return _Member(position, rank, call, enqueued, tuple(works))


# -- findings --------------------------------------------------------------------------------------------------------


def _finding(each: _Group, suspects: set[int], source: str) -> Finding:
    """Return the finding of a group."""
    waits = "; ".join(_waits(each))
    if each.is_comparable and (parts := _different(each)):
        largest = max(parts.values(), key=len)
        odd = [member for members in parts.values() if members is not largest for member in members]
        ranks = _ranks(odd) if 2 * len(largest) > each.size else ()
        number = next(iter(parts)).number
        which = " and ".join(f"{_described([work])} on {_words(members)}" for work, members in parts.items())
        return Finding("different", ranks, each.label, f"{each.label}: call {number} is {which}", "certain", source)
    if behind := each.behind:
        counts = sorted({member.enqueued for member in behind if member.enqueued is not None})
        parts_of = (
            f"{_words([m for m in behind if m.enqueued == count])} enqueued no call after {count}"
            for count in counts[:_SHOWN]
        )
        evidence = f"{each.label}: {', '.join(parts_of)}; {waits}"
        if len(behind) > len(each.waiting):
            return Finding("ahead", (), each.label, evidence, "possible", source)
        if suspects and set(_ranks(behind)) == suspects:
            return Finding("behind", _ranks(behind), each.label, evidence, "likely", source)
        return Finding("differ", (), each.label, evidence, "possible", source)
    calls = {member.call for member in each.waiting}
    cause = "differ" if each.is_comparable and len(calls) > 1 else "waiting"
    return Finding(cause, (), each.label, f"{each.label}: {waits}", "possible", source)


def _different(each: _Group) -> dict[Work, list[_Member]]:
    """Return the members by their call at the first number at which calls differ; empty where none do."""
    by_number = grouped((work.number, (work, member)) for member in each.members for work in member.works)
    for _, made in sorted(by_number.items(), key=itemgetter(0)):
        first = {_signature(work): work for work, _ in reversed(made)}
        if len(first) > 1:
            return grouped((first[_signature(work)], member) for work, member in made)
    return {}


def _signature(work: Work) -> tuple[object, ...]:
    """Return what of a call is the same on all members of its group."""
    operation = work.operation.lstrip("_")
    return (operation, work.sent, work.received) if operation in _EQUAL else (operation,)


def _waits(each: _Group) -> Iterator[str]:
    """Yield who waits in which call."""
    parts = grouped(
        ((member.call or 0, member.work.operation if member.work else ""), member) for member in each.waiting
    )
    for (number, operation), members in sorted(parts.items(), key=lambda part: part[0])[:_SHOWN]:
        verb = "waits" if len(members) == 1 else "wait"
        what = f", {_described([member.work for member in members if member.work])}" if operation else ""
        yield f"{_words(members)} {verb} in call {number}{what}"
    if len(parts) > _SHOWN:
        yield f"and {len(parts) - _SHOWN} more calls"


def _described(works: Sequence[Work]) -> str:
    """Return an operation with its sizes, if they are the same in these calls."""
    operation = works[0].operation.lstrip("_")
    sizes = {(work.sent, work.received) for work in works}
    sent, received = sizes.pop()
    if sizes or sent is None or received is None:
        return operation
    given = "" if sent == received else f"{sent} to "
    return f"{operation} of {given}{received} {'element' if received == 1 and not given else 'elements'}"


def _ranks(members: Iterable[_Member]) -> tuple[int, ...]:
    """Return the ranks of members; none unless all are known."""
    return all_known(member.rank for member in members)


def _words(members: Sequence[_Member]) -> str:
    """Return members in words."""
    return ranks_in_words(_ranks(members), (member.position for member in members))
