"""Logs of NCCL (``NCCL_DEBUG=INFO`` or ``WARN``): who made which communicator, versions, and errors of the network.

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
from dataclasses import dataclass, field

from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.evidence import Finding
from rankmesh.debug.doctor.groups import group_of_plan
from rankmesh.debug.doctor.texts import Text
from rankmesh.errors import first_of, in_words

__all__ = ["NcclLog", "findings_of_nccl", "nccl_log_of"]

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


@dataclass
class NcclLog:
    """What logs of NCCL say: the state of each process in each communicator, versions, warnings on the network."""

    path: str
    states: dict[tuple[str, int], dict[int, tuple[_Process, str]]] = field(default_factory=dict)
    versions: dict[_Process, str] = field(default_factory=dict)
    errors: list[tuple[_Process, str]] = field(default_factory=list)


def nccl_log_of(text: Text) -> NcclLog | None:
    """Return what the lines of NCCL in a text say; None if it has none."""
    log, lines = NcclLog(text.path.name), "\n".join(text.lines_with(" NCCL "))
    for match in _INIT.finditer(lines):
        size, rank = int(match["size"]), int(match["rank"])
        if rank < size <= _RANKS:
            process = match["host"], int(match["pid"])
            # Before NCCL 2.18 lines have no commId: a process has its own address for it.
            ranks = log.states.setdefault((match["id"] or "", size), {})
            if match["id"] or ranks.get(rank, (process, ""))[1] != "COMPLETE":
                ranks[rank] = process, match["state"]
    log.versions = {(m["host"], int(m["pid"])): m["version"] for m in _VERSION.finditer(lines)}
    warnings = (((m["host"], int(m["pid"])), m["what"]) for m in _WARN.finditer(lines))
    log.errors = [(process, what) for process, what in warnings if _NETWORK.search(what)]
    return log if log.states or log.versions or log.errors else None


def findings_of_nccl(logs: Sequence[NcclLog], plan: Plan | None = None) -> tuple[Finding, ...]:
    """Return the findings of all logs of NCCL of a job."""
    states: dict[tuple[str, int], dict[int, tuple[_Process, str]]] = {}
    versions: dict[_Process, str] = {}
    for log in logs:
        versions |= log.versions
        for key, found in log.states.items():
            known = states.setdefault(key, {})
            for rank, (process, state) in found.items():
                if known.get(rank, (process, ""))[1] != "COMPLETE":
                    known[rank] = process, state
    largest = max((size for _, size in states), default=0)
    whole = [found for (_, size), found in states.items() if size == largest]
    names = {process: rank for found in whole for rank, (process, _) in found.items()}
    if any(names.get(process) != rank for found in whole for rank, (process, _) in found.items()):
        names = {}
    source = first_of([log.path for log in logs])
    findings = [*_versions(versions, names, source)]
    errors = [error for log in logs for error in log.errors]
    if errors:
        findings.append(Finding("network", (), "world", "; ".join(_errors(errors, names)), "likely", source))
    for (name, size), ranks in states.items():
        findings += _unfinished(name, size, ranks, names, plan, largest, source)
    return tuple(findings)


def _process(process: _Process, names: Mapping[_Process, int]) -> str:
    """Return a process in words: ``rank 3 on node-1``, or ``process 983 on node-1`` where its rank is not known."""
    return f"{f'rank {names[process]}' if process in names else f'process {process[1]}'} on {process[0]}"


def _versions(versions: Mapping[_Process, str], names: Mapping[_Process, int], source: str) -> Iterator[Finding]:
    """Yield a finding if processes of the job run different versions of NCCL."""
    parts: dict[str, list[_Process]] = {}
    for process, version in versions.items():
        parts.setdefault(version, []).append(process)
    if len(parts) < 2:
        return
    by_size = sorted(parts.items(), key=lambda part: len(part[1]))
    odd = [process for _, processes in by_size[:-1] for process in processes]
    is_minority = 2 * len(odd) < len(versions) and all(process in names for process in odd)
    ranks = tuple(sorted(names[process] for process in odd)) if is_minority else ()
    words = "; ".join(
        f"NCCL {version} runs in {first_of([_process(one, names) for one in processes])}"
        for version, processes in by_size[:_SHOWN]
    )
    yield Finding("versions", ranks, "world", words, "likely", source)


def _errors(errors: Sequence[tuple[_Process, str]], names: Mapping[_Process, int]) -> Iterator[str]:
    """Yield the first errors of the network, one of each process."""
    first = dict(reversed(errors))
    for process, what in list(first.items())[::-1][:_SHOWN]:
        status = re.search(r"status=(?:\w{1,40}\()?(\d{1,3})\b", what)
        meaning = f" ({_STATUS[status[1]]})" if status and status[1] in _STATUS else ""
        yield f"{_process(process, names)}: {what.strip()[:160]}{meaning}"
    if len(errors) > min(len(first), _SHOWN):
        yield f"{len(errors)} such lines of {len(first)} processes"


def _unfinished(
    name: str,
    size: int,
    found: Mapping[int, tuple[_Process, str]],
    names: Mapping[_Process, int],
    plan: Plan | None,
    largest: int,
    source: str,
) -> Iterator[Finding]:
    """Yield a finding if ranks began to make a communicator and did not complete it."""
    begun = [rank for rank, (_, state) in sorted(found.items()) if state == "START"]
    if not begun or not name:
        return
    absent = [rank for rank in range(size) if rank not in found] if size <= 2 * len(found) else []
    members = tuple(names.get(process, -1) for _, (process, _) in sorted(found.items()))
    local = group_of_plan(plan, members) if len(found) == size and -1 not in members else None
    label = str(local) if local else "world" if size == largest else f"communicator {name} of {size} ranks"
    which = "rank" if size == largest else "position"
    done = len(found) - len(begun)
    words = f"{label}: {in_words(begun).replace('rank', which, 1)} began to make it and did not complete it"
    words += f"; {done} did" if done else ""
    words += f"; {in_words(absent).replace('rank', which, 1)} of {size} did not begin" if absent else ""
    words += f"; {len(found)} of {size} are in the log" if len(found) + len(absent) < size else ""
    named = tuple(absent) if len(absent) == 1 and not done and size == largest else ()
    yield Finding("missing" if named else "incomplete", named, label, words, "possible", source)
