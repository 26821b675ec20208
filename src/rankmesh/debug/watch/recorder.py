"""The recorder: torch's own, with frames, in bounded memory; and this rank's recording as a document.

```
prepare()            before the world is initialised: how many calls torch keeps
Recorder.document()  what it has kept, with what it does not know: rank, host, members of the groups, stacks
```

A document is a dump of torch's flight recorder in JSON, with each stack once: ``frames`` is a number in ``stacks``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from rankmesh.backend import recorder as calls
from rankmesh.backend.registries import registered
from rankmesh.core.ranges import ranges
from rankmesh.debug.doctor.reader import parsed
from rankmesh.debug.doctor.sites import innermost
from rankmesh.debug.watch import stacks
from rankmesh.debug.watch.host import Look
from rankmesh.debug.watch.live_names import live_names
from rankmesh.debug.watch.setting import setting
from rankmesh.errors import ConnectError, first_line
from rankmesh.launch.started import host_name

__all__ = ["CALLS", "Recorder", "prepare"]

# Calls that torch keeps for each rank, some three kilobytes each with their frames.
CALLS = 2000
_FRAMES = 16
# Outermost frames of each: those of a thread that Python begins, and the function that it runs.
_ROOT = 4
# Descriptions that name nothing.
_UNNAMED = ("", "undefined")
# Behind the name of a group whose calls on the CPU and on the GPU are counted apart.
_OTHER = " on the CPU"
_KEPT = (
    *("record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name", "state"),
    *("time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "retired", "timeout_ms"),
    "is_p2p",
)


def prepare(*, slow: bool = False) -> None:
    """Have torch keep calls with their frames, as many as ``CALLS``; what the environment sets stays.

    ``slow``: NCCL's durations as well, unless the environment says whether slow ranks are looked for.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", str(CALLS)))
    with suppress(ConnectError):  # which whoever starts the watch reports
        wanted = setting(os.environ, [])
        slow = slow if wanted is None else wanted.slow > 0
    if slow:
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


class Recorder:
    """The recorders of this rank: made while the world lives, and still there when that is gone.

    ``anew``: what was recorded until now is of another world.
    """

    def __init__(self, *, anew: bool = False) -> None:
        self._since = time.time_ns() if anew else 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.run = os.environ.get("TORCHELASTIC_RUN_ID", os.environ.get("SLURM_JOB_ID", ""))
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        self.host = host_name()
        self._program = threading.get_ident()
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}

    def look(self) -> None:
        """Learn of the groups that were made since the last look."""
        self._groups |= registered(self._groups)

    def in_call(self, mark: stacks.Mark | None) -> tuple[dict[str, Any], stacks.Mark]:
        """Return the call that the program is in, and a mark of where it stands, after an earlier one."""
        return stacks.in_call(self._program, mark)

    def document(self, reason: str, mark: stacks.Mark | None = None, *, ended: bool = False) -> dict[str, Any]:
        """Return the recording as plain data.

        ``mark`` is where the program stood before (``stacks.in_call``).
        """
        known, kept = self.groups(), self._kept()
        table: dict[str, int] = {}
        entries = [_entry(entry, table) for entry in kept.get("entries", [])]
        groups = {name: {"name": name, "desc": desc, "ranges": ranges(r)} for name, (desc, r) in known.items()}
        about = self._about(reason) | ({"ended": True, "failure": self.failure()} if ended else self._now(mark))
        return {
            **kept,
            "pg_config": _twice({**kept.get("pg_config", {}), **groups}, entries),
            "rankmesh": about,
            "stacks": [json.loads(text) for text in table],
            "entries": entries,
        }

    def groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the groups of this rank by name: a description, which may be a framework's name, and the members."""
        self.look()
        known, found = self._groups, dict[str, str]()
        if any(desc in _UNNAMED for desc, _ in known.values()):
            found = live_names()
        return {name: (found.get(name, desc) if desc in _UNNAMED else desc, r) for name, (desc, r) in known.items()}

    def _kept(self) -> dict[str, Any]:
        return together([after(_plain(data), self._since) for data in calls.recorded()])

    def _about(self, reason: str) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "run": self.run,
            "attempt": self.attempt,
            "host": self.host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "reason": reason,
        }

    def _now(self, mark: stacks.Mark | None) -> dict[str, Any]:
        # A program that handles the error of a call, or ends by it, is still at the call that failed.
        call, failure = self.in_call(mark)[0], self.failure(RuntimeError)
        call = {**call, "running": bool(call.get("running")) and not failure}
        return {"ended": False, "failure": failure, "in_call": call, "threads": stacks.threads()}

    def failure(self, kind: type[BaseException] = BaseException) -> str:
        """Return the error of a kind by which the program ends, or that it handles, as a line; "" for none."""
        handled: Any = sys._current_exceptions().get(self._program)
        error: object = handled[1] if isinstance(handled, tuple) else handled  # a tuple until Python 3.11
        if error is None:
            error = getattr(sys, "last_value", None)
        return f"{type(error).__name__}: {first_line(error)}" if isinstance(error, kind) else ""

    def unresponsive(self, rank: int, look: Look) -> dict[str, Any]:
        """Return the recording of an unresponsive rank of this host, which has no calls."""
        seen = {"state": look.state, "alive": look.alive, "threads": {"": look.stacks.splitlines()[:200]}}
        about = {**self._about(""), "rank": rank, "pid": 0, **seen}
        return {"version": "2.10", "entries": [], "rankmesh": about}


def _plain(data: bytes) -> dict[str, Any]:
    found = parsed(data)
    return dict(found) if isinstance(found, Mapping) else {}


def after(kept: Mapping[str, Any], since: int) -> dict[str, Any]:
    """Return a recorder's calls since a time in nanoseconds; they count from 0 if none is lost."""
    entries = kept.get("entries") or []
    new = [entry for entry in entries if int(entry.get("time_created_ns") or 0) >= since]
    if len(new) < len(entries):
        new = [{**entry, "record_id": number} for number, entry in enumerate(new)]
    return {**kept, "entries": new}


def together(kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the recordings of one rank's gloo and NCCL recorders.

    Each counts the calls of a group by itself: if both have calls of one group, the first one's get another name.
    """
    recorders = [each for each in kept if each.get("entries")]
    if len(recorders) < 2:
        return dict(recorders[0] if recorders else kept[0])
    first, second = recorders
    both = {_group(entry) for entry in first["entries"]} & {_group(entry) for entry in second["entries"]}
    entries = [*(_apart(entry, both) for entry in first["entries"]), *second["entries"]]
    entries.sort(key=lambda entry: int(entry.get("time_created_ns") or 0))
    lost = sum(int(each["entries"][0].get("record_id") or 0) for each in recorders)
    return {
        **first,
        **second,
        "pg_config": {**first.get("pg_config", {}), **second.get("pg_config", {})},
        "entries": [{**entry, "record_id": lost + number} for number, entry in enumerate(entries)],
    }


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _apart(entry: Mapping[str, Any], both: Collection[str]) -> Mapping[str, Any]:
    name, desc = entry["process_group"]
    return {**entry, "process_group": (f"{name}{_OTHER}", desc)} if name in both else entry


def _twice(config: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the groups by name, those with calls on the CPU and on the GPU under both names."""
    apart = {name for entry in entries if (name := _group(entry)).endswith(_OTHER)}
    return {**config, **{name: config.get(name.removesuffix(_OTHER), {}) for name in apart}}


def _entry(entry: Mapping[str, Any], table: dict[str, int]) -> dict[str, Any]:
    """Return one call with its stack in the table."""
    return {name: entry[name] for name in _KEPT if name in entry} | _lines(entry.get("frames"), table)


def _lines(frames: Sequence[Any] | None, table: dict[str, int]) -> dict[str, int]:
    """Return the number of a stack in the table, up to the program's first line and where its thread begins."""
    if not frames:
        return {}
    place = innermost(range(len(frames)), lambda place: str(frames[place]["filename"])) or 0
    kept = max(_FRAMES, place + 1)
    return {
        "frames": table.setdefault(json.dumps([*frames[:kept], *frames[max(kept, len(frames) - _ROOT) :]]), len(table))
    }
