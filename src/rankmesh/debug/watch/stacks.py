"""Stacks: the places of this process's threads, and the call of ``torch.distributed`` that each is in, with its peer.

```
train.py:31 in step
  distributed_c10d.py in recv        ->   recv on pp@tp0 from rank 2, at train.py:31 in step
```

The flight recorder keeps neither roots nor, with gloo, what two members exchange. A waiting call has them in its frame.

A program that waits in the same line again has a frame at the same place again: what tells one call from the next is
how many were made (``Mark``).
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

import rankmesh
from rankmesh.backend import recorder
from rankmesh.debug.doctor.sites import innermost, is_library

__all__ = ["Mark", "in_call", "stands", "threads"]

# Where a program stands: a frame, an instruction in it, and the calls made on the group that it waits for, or on all.
Mark = tuple[int, int, int]

_TORCH = f"{Path(dist.__file__).parent.parent}/"
_OURS = f"{Path(rankmesh.__file__).parent}/"
_CALLS = f"{Path(dist.__file__).parent}/distributed_c10d.py"
_COLLECTIVES = {"connect": f"{_OURS}runtime/connect.py", "warm_up": f"{_OURS}runtime/warm.py"}
# Names that torch gives its flight recorder for calls of other names.
_RECORDED = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}
_KNOWN = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier"}
    | {"send", "recv", "isend", "irecv", "monitored_barrier", "new_group", "init_process_group", "batch_isend_irecv"}
    | set(_RECORDED)
)
# Calls that gloo's recorder does not have, and functions that read data, beside those of torch's loader.
_BETWEEN_TWO = frozenset({"send", "recv", "batch_isend_irecv"})
_LOADER = f"{_TORCH}utils/data/"
# Parts of torch that wait for collectives in C++.
_MAY_WAIT = tuple(f"{_TORCH}{part}" for part in ("distributed/", "autograd/", "nn/parallel/", "_ops.py"))
_READS = re.compile(r"_*(read|load|fetch|collate)(_\w+)?$|_*(get|next)_?(batch|data|item)\w*$|__(next|getitem)__$")
_WAITS = ("wait(", "synchronize(", ".item(", "result(")
_DEPTH = 64


def threads() -> dict[str, list[str]]:
    """Return the stack of each thread, innermost line first: ``train.py:31 in step``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    return {
        f"{names.get(ident, 'thread')} ({ident})": [_line(each) for each in islice(_outwards(frame), _DEPTH)]
        for ident, frame in sys._current_frames().items()
        if ident != here
    }


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _source(frame: FrameType | None) -> str:
    """Return the text of a line; a frame may be between two lines."""
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def in_call(program: int, before: Mark | None = None) -> tuple[dict[str, Any], Mark]:
    """Return the call that the program is in, and a mark of where it stands; ``before`` is an earlier mark.

    ``program`` is the thread that the program runs on, looked at first. A program whose mark has moved, or that
    sleeps, is running: it waits in no call, even if some are under way. If the stacks of ranks were read one by one, a
    running rank could appear to wait for a call that another rank made in the meantime.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # this very frame: what it knows would live until cycles are looked for
    first = frames.pop(program, None) or frames.pop(threading.main_thread().ident or 0, None)
    user = _users(first)
    for frame in [first, *frames.values()]:
        found = _found(frame)
        if found is not None:
            call = _call(found, user) | recorder.group_in_creation(frame)
            # Our own functions that wait poll by themselves, at changing places, and may call on many groups.
            meets = call["operation"] in _COLLECTIVES
            made = recorder.calls_made("" if meets else call.get("group", ""))
            mark = (id(found), 0 if meets else found.f_lasti, made)
            return {**call, "running": not meets and _moved(before, mark)}, mark
    if first is None:
        return {"running": True}, (0, 0, 0)
    mark = (id(first), first.f_lasti, recorder.calls_made())
    inner = next(_outside(first), None)
    source = _source(inner)
    moved = _moved(before, mark)
    if any(word in source for word in _WAITS) and not moved:
        return {"operation": "wait", "site": _line(user)}, mark
    return {"site": _line(user), "running": "sleep(" in source or moved}, mark


def stands(program: int) -> tuple[str, str]:
    """Return the state of a program and its line.

    It ``reads`` its data, ``waits``, is in a part of torch that ``may wait``, or computes: "".
    """
    frames = [*_outwards(sys._current_frames().get(program))]
    user = _users(frames[0] if frames else None)
    parts = [_part(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    if "loader" in parts or (user and "reads" in parts[: frames.index(user) + 1]):
        state = "reads"
    elif "of two" in parts or "wait(" in _source(user) or (parts and parts[0] and "wait(" in _source(frames[0])):
        state = "waits"
    else:
        state = "may wait" if parts and parts[0] == "may wait" else ""
    return state, _line(user)


@lru_cache(1 << 14)
def _part(file: str, name: str) -> str:
    """Return the part that a function has in the state of a program: ``torch`` for one of torch with no other part."""
    if file == _CALLS and name in _BETWEEN_TWO:
        return "of two"
    if file.startswith(_TORCH):
        return "loader" if file.startswith(_LOADER) else "may wait" if file.startswith(_MAY_WAIT) else "torch"
    return "reads" if _READS.match(name) else ""


def _moved(before: Mark | None, mark: Mark) -> bool:
    return before is not None and before != mark


def _users(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program, else of a framework."""
    return innermost(_outside(frame), lambda each: each.f_code.co_filename)


def _outside(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames that are neither torch's nor ours, nor of the standard library, innermost first."""
    for each in _outwards(frame):
        if not _is_inside(each.f_code.co_filename):
            yield each


@lru_cache(1 << 12)
def _is_inside(file: str) -> bool:
    return file.startswith((_TORCH, _OURS)) or is_library(file)


def _found(frame: FrameType | None) -> FrameType | None:
    """Return the outermost function of torch.distributed, or of ours that waits, in which this thread is."""
    found = None
    for each in _outwards(frame):
        file, name = each.f_code.co_filename, each.f_code.co_name
        if (file == _CALLS and name in _KNOWN) or _COLLECTIVES.get(name) == file:
            found = each
    return found


def _call(frame: FrameType, program: FrameType | None) -> dict[str, Any]:
    """Return a call at its line; on a thread of torch, such as one of a backward pass, at the line of the program."""
    name, site = frame.f_code.co_name, _line(_users(frame) or program)
    return {"operation": _RECORDED.get(name, name), "site": site, **recorder.call_facts(frame)}
