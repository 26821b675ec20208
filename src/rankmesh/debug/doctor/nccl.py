"""Logs of NCCL (``NCCL_DEBUG=INFO`` or ``WARN``): ranks of communicators, versions, and errors of the network.

```
node-1:983:1261 [3] NCCL INFO ncclCommInitRank comm 0x55f0 rank 3 nranks 8 cudaDev 3 ... commId 0x5ae7 - Init START
node-1:983:1261 [3] NCCL INFO ncclCommInitRank comm 0x55f0 rank 3 nranks 8 cudaDev 3 ... commId 0x5ae7 - Init COMPLETE
node-1:983:1357 [3] net_ib.cc:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.9<44206> with status=12 ...
node-1:983:983 [3] NCCL INFO NCCL version 2.27.3+cuda12.9
```

Either end of a connection may be at fault: an error of the network names no rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.groups import DEFAULT
from rankmesh.debug.doctor.lines import Line, ranks_of_processes
from rankmesh.debug.doctor.texts import Text
from rankmesh.errors import first_of

__all__ = ["NcclLog", "lines_of_nccl", "nccl_log_of"]

_RANKS, _SHOWN = 2**20, 3
_Process = tuple[str, int]

_HEAD = r"(?<![\w.\-])(?P<host>[\w.\-]{1,200}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,4}\] "
_INIT = re.compile(
    _HEAD
    + r"NCCL INFO [^\n]{0,100}?\bcomm (?P<comm>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7})\b"
    r"(?:[^\n]{0,120}? commId (?P<id>0x[0-9a-f]{1,16}))?[^\n]{0,40} - Init (?P<state>START|COMPLETE)"
)
_VERSION = re.compile(_HEAD + r"NCCL INFO NCCL version (?P<version>[\w.+\-]{1,40})")
_WARN = re.compile(_HEAD + r"[^\n]{0,200}?NCCL WARN (?P<what>[^\n]{1,300})")
_NETWORK = re.compile(
    r"Got completion (?:from peer )?|async (?:fatal )?event|[Cc]onnection (?:closed|refused|reset)|Connection timed out"
    r"|connect to \S+ (?:returned|failed)|No route to host|Network is unreachable|socket progress error|Broken pipe"
    r"|NET/\w+ ?: .{0,60}(?:error|timed? ?out)|Call to (?:ibv_|recv|send|connect)\S{0,40} (?:failed|timed)"
)
# What the statuses of a completion mean that are seen most.
_STATUS = {"5": "flushed after an earlier error", "12": "the peer did not answer: a link, a switch or its process"}


@dataclass(frozen=True)
class NcclLog:
    """The lines of NCCL in a log: communicators that are made, versions by process, errors of the network.

    ``inits`` are by communicator and size, rank in it and process; True where it is complete. A communicator is ""
    before NCCL 2.18, where several of a rank have one key.
    """

    path: str
    inits: Mapping[tuple[str, int, int, _Process], bool]
    versions: Mapping[_Process, str]
    errors: tuple[tuple[_Process, str], ...]


def nccl_log_of(text: Text) -> tuple[NcclLog, ...]:
    """Parse the lines of NCCL in a text; return nothing if it has none."""
    lines = "\n".join(text.lines_with(" NCCL "))
    inits: dict[tuple[str, int, int, _Process], bool] = {}
    for m in _INIT.finditer(lines):
        if int(m["rank"]) < int(m["size"]) <= _RANKS:
            key = m["id"] or "", int(m["size"]), int(m["rank"]), _process(m)
            inits[key] = inits.get(key, False) or m["state"] == "COMPLETE"
    versions = {_process(m): m["version"] for m in _VERSION.finditer(lines)}
    errors = tuple((_process(m), m["what"]) for m in _WARN.finditer(lines) if _NETWORK.search(m["what"]))
    return (NcclLog(text.path.name, inits, versions, errors),) if inits or versions or errors else ()


def _process(line: re.Match[str]) -> _Process:
    return line["host"], int(line["pid"])


def lines_of_nccl(logs: Sequence[NcclLog]) -> Iterator[Line | str]:
    """Yield the ranks that began or completed a communicator; versions and errors in words."""
    inits = [(key, done) for log in logs for key, done in log.inits.items()]
    largest = max((size for (_, size, *_), _ in inits), default=0)
    names = ranks_of_processes((process, rank) for (_, size, rank, process), _ in inits if size == largest) or {}
    source = first_of([log.path for log in logs])
    yield from _versions({process: version for log in logs for process, version in log.versions.items()}, names)
    if errors := [error for log in logs for error in log.errors]:
        yield f"network: {'; '.join(_errors(errors, names))}"
    for (comm, size), made in grouped((key[:2], (*key[2:], done)) for key, done in inits).items():
        done = {rank for rank, _, is_complete in made if is_complete}
        if not comm or len(done) == len({rank for rank, *_ in made}):
            continue
        is_whole = size == largest
        job = "" if is_whole or all(at in names for _, at, _ in made) else f"communicator {comm} of {size} ranks"
        group = GroupName(comm, DEFAULT if is_whole else "", tuple(range(size)) if is_whole or job else None)
        one = Line(source=source, rank=0, job=job, is_position=bool(job), group=group, trust="" if done else "possible")
        for place, at in {place: at for place, at, _ in made}.items():
            of_rank = replace(one, rank=place if is_whole or job else names[at])
            waits = replace(of_rank, number=1, operation="ncclCommInitRank")
            yield replace(of_rank, enqueued=1) if place in done else waits


def _in_words(process: _Process, names: Mapping[_Process, int]) -> str:
    """Return a process in words: ``rank 3 on node-1``, or ``process 983 on node-1`` where its rank is not known."""
    return f"{f'rank {names[process]}' if process in names else f'process {process[1]}'} on {process[0]}"


def _versions(versions: Mapping[_Process, str], names: Mapping[_Process, int]) -> Iterator[str]:
    """Yield which processes of the job run which version of NCCL, if there are several versions."""
    parts = grouped((version, process) for process, version in versions.items())
    if len(parts) > 1:
        by_size = sorted(parts.items(), key=lambda part: len(part[1]))
        yield "versions: " + "; ".join(
            f"NCCL {version} runs in {first_of([_in_words(one, names) for one in processes])}"
            for version, processes in by_size[:_SHOWN]
        )


def _errors(errors: Sequence[tuple[_Process, str]], names: Mapping[_Process, int]) -> Iterator[str]:
    """Yield the first errors of the network, one of each process."""
    first = dict(reversed(errors))
    for process, what in list(first.items())[::-1][:_SHOWN]:
        status = re.search(r"status=(?:\w{1,40}\()?(\d{1,3})\b", what)
        meaning = f" ({_STATUS[status[1]]})" if status and status[1] in _STATUS else ""
        yield f"{_in_words(process, names)}: {what.strip()[:160]}{meaning}"
    if len(errors) > min(len(first), _SHOWN):
        yield f"{len(errors)} such lines of {len(first)} processes"
