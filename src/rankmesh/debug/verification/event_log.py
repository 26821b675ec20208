"""What one rank does in a check, and the event log that it leaves: one JSON line an event.

```
{"event": "started"}
{"event": "joined", "backend": "gloo"}                                         the world
{"event": "connected", "seconds": 0.12}                                        the groups
{"event": "proved", "group": "tp", "operations": ["all-reduce", ...], "seconds": 0.01}
{"event": "failed", "kind": "ProofError", "message": "..."}                    or
{"event": "done"}                                                              groups and world are closed
```

The log of a rank that dies ends at the group where it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.joined import watched
from rankmesh.debug.verification.verify import verify
from rankmesh.errors import first_line
from rankmesh.launch.started import Launch
from rankmesh.runtime.connect import connect
from rankmesh.runtime.init import LiveRank, enter

__all__ = ["EventLog", "Write", "ended", "line", "next_group", "run_rank", "where_it_was"]

EventLog = list[dict[str, Any]]
Write = Callable[[dict[str, Any]], None]

_PAST = {
    "started": "started",
    "joined": "joined the world",
    "connected": "connected",
    "proved": "proved a group",
}


def run_rank(
    plan: Plan,
    launch: Launch,
    backend: str | None,
    timeout: float,
    write: Write,
    diagnosed: Callable[[str], None],
) -> bool:
    """Check this rank: join the world, connect, verify each group, and write the events; whether all went well.

    ``diagnosed`` is given the diagnosis of what hangs.
    """
    write({"event": "started"})
    written: Exception | None = None
    try:
        with watched(enter(launch, backend, timeout), diagnosed) as me:
            try:
                _verified(plan, me, timeout, write)
            except Exception as error:
                # At once: it takes a while to leave a world in which something hangs.
                _write_failure(write, written := error)
                raise
    except Exception as error:  # noqa: BLE001  - whatever ends a rank is in its log, for the one that reports
        if error is not written:
            _write_failure(write, error)
        return False
    write({"event": "done"})
    return True


def _verified(plan: Plan, me: LiveRank, timeout: float, write: Write) -> None:
    import torch.distributed as dist

    write({"event": "joined", "backend": me.backend})
    with connect(plan, timeout=timeout) as groups:
        write({"event": "connected", "seconds": groups.phases["all"]})
        for group in verify(groups, str(me.device)):
            seconds = round(group.seconds, 6)
            write({"event": "proved", "group": group.name, "operations": group.operations, "seconds": seconds})
        # A rank that leaves early would close connections on which a slower one still waits.
        dist.barrier(device_ids=[me.device.index] if me.backend == "nccl" else None)


def _write_failure(write: Write, error: Exception) -> None:
    write({"event": "failed", "kind": type(error).__name__, "message": _message(error)})


def _message(error: Exception) -> str:
    """Return the first line of an error, without the place in torch's sources that its network errors begin with."""
    line = (str(error).strip().splitlines() or [first_line(error)])[0]
    return re.sub(r"^\[/\S+:\d+\] ", "", line)[:500]


def ended(log: EventLog) -> bool:
    """Return whether a rank has written its last event."""
    return bool(log) and log[-1]["event"] in ("done", "failed")


def where_it_was(log: EventLog) -> str:
    """Return the last thing that a rank is known to have done, in words that follow on what happened then.

    >>> where_it_was([{"event": "started"}, {"event": "joined"}]), where_it_was([])
    (' after it had joined the world', ', and had not begun')
    """
    past = [_PAST[event["event"]] for event in log if event["event"] in _PAST]
    return f" after it had {past[-1]}" if past else ", and had not begun"


def next_group(plan: Plan, rank: int, log: EventLog) -> str | None:
    """Return the group that the rank was at: the first of its own that it has not verified."""
    done = {event["group"] for event in log if event["event"] == "proved"}
    if not any(event["event"] == "connected" for event in log):
        return None
    return next((name for name in plan.of(rank) if name not in done), None)


def line(event: Mapping[str, Any]) -> str:
    """Return an event as one line of JSON."""
    return json.dumps(event, separators=(",", ":"))
