"""Logs with the lines of torch's NCCL watchdog: which call each process waits in, and how far it is in each group.

```
[rank9]:[E606 09:09:08.1 ProcessGroupNCCL.cpp:757] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(
SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.
[rank9]:[E606 ...] [PG ID 2 PG GUID 5(tp) Rank 1]  failure detected by watchdog at work sequence id: 7 PG status: last
enqueued work: 9, last completed work: 6
```

Rank 9 of the job is position 1 of group 5. The first line has no group: the second one, with the same call, names it.
Launchers put their own prefixes before these lines. A launcher's number may be a host's or a local rank: only torch's
own ``[rank9]:`` is taken as the rank, else the position in the world's group, else the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rankmesh.core.documents import Unreadable, open_regular
from rankmesh.debug.doctor.groups import DEFAULT

__all__ = ["Log", "LogGroup", "Status", "Work", "read_log"]

# Bytes of a log that are read, its last ones; of a line; and how many lines of the watchdog are kept.
_SIZE, _LENGTH, _LINES = 256 << 20, 1 << 15, 1 << 16
_HEAD = 4096
# What every line has that is looked at.
_MARK = b"ProcessGroupNCCL"

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
_OF_FILE = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
# Ray prints one of several similar lines.
_FOLDED = re.compile(rb"\[repeated \d+x across cluster\]")
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


def read_log(path: Path) -> Log | None:
    """Return the lines of the watchdog in a text file; None if it has none or cannot be read."""
    name = _OF_FILE.search(path.name)
    rank, found, is_partial = int(name[1]) if name else None, dict[Status, None](), False
    try:
        with open_regular(path) as file:
            if b"\0" in file.read(_HEAD):
                return None
            size = file.seek(0, 2)
            file.seek(max(0, size - _SIZE))
            is_partial = size > _SIZE
            for line in iter(partial(file.readline, _LENGTH), b""):
                if _MARK not in line:
                    continue
                is_partial = is_partial or _FOLDED.search(line) is not None
                found.update(dict.fromkeys(_statuses(line.decode("utf-8", "replace"), rank)))
                if len(found) > _LINES:
                    is_partial = True
                    break
    except (OSError, Unreadable):
        return None
    return Log(path.name, tuple(found), is_partial) if found else None


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
        group = _group(head["group"], kind) if head["group"] else None
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


def _group(text: str, actor: str) -> LogGroup | None:
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
