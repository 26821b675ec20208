"""Recordings of a job of any size in the forms that torch's flight recorder publishes, without running it.

```
rank 0    tp/0/0 1  dp/0/0 1  tp/0/0 2  dp/0/0 2 ...    half of the calls along tp, half along dp
last      ...                                           one call short along dp: the one that hangs
```

One file of each kind is written in torch's way, frames and all, with marks for what differs between ranks, which are
then put in. So the files of 8,192 ranks are made in minutes, and each is what a rank of such a job leaves.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankmesh.core.ranges import ranges

__all__ = ["FORMS", "WIDTH", "documents", "write"]

# Ranks along tp.
WIDTH = 8

_SIZES = ([4096, 2048], [2048], [151_552, 256], [1])
_DEPTH = 12
_MARKS = {"tp": "<the rank's tp>", "dp": "<the rank's dp>"}


def write(folder: Path, ranks: int, calls: int, form: str) -> None:
    """Write a file for each rank of a job of tp and dp, in which the last rank is one call behind along dp."""
    for rank, content in _contents(ranks, calls, FORMS[form]):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)


def documents(ranks: int, calls: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank of the same job with the document of its watch, which numbers stacks and lists the world."""

    def numbered(document: dict[str, Any]) -> _Template:
        stacks = [entry["frames"] for entry in document["entries"][:2]]
        entries = [{**entry, "frames": place % 2} for place, entry in enumerate(document["entries"])]
        return _text({**document, "entries": entries, "stacks": stacks})

    world = {"0": {"name": "0", "desc": "default_pg", "ranges": [[0, ranks, 1]]}}
    for rank, content in _contents(ranks, calls, numbered):
        about = {"rank": rank, "world_size": ranks, "host": f"node{rank // WIDTH}"}
        made = json.loads(content)
        for group in made["pg_config"].values():
            group["ranges"] = ranges(json.loads(group.pop("ranks")))
        yield rank, {**made, "pg_config": world | made["pg_config"], "rankmesh": about}


def _contents(
    ranks: int, calls: int, template_of: Callable[[dict[str, Any]], _Template]
) -> Iterator[tuple[int, bytes]]:
    """Yield each rank with its file, which is made of one of three templates."""
    for group, waiting in ((False, False), (True, False), (True, True)):
        template = template_of(_document(calls - (group and not waiting), hangs=waiting))
        for rank in range(ranks):
            if (rank % WIDTH == WIDTH - 1, rank % WIDTH == WIDTH - 1 and rank != ranks - 1) == (group, waiting):
                yield rank, template(_values(rank, ranks))


def _values(rank: int, ranks: int) -> dict[str, str]:
    """Return what replaces the marks in the file of a rank: names, descriptions and members of its groups."""
    row, column = divmod(rank, WIDTH)
    members = {"tp": range(row * WIDTH, (row + 1) * WIDTH), "dp": range(column, ranks, WIDTH)}
    about = {"tp": (f"tp/0/{row}", f"tp@dp{row}"), "dp": (f"dp/0/{column}", f"dp@tp{column}")}
    texts: dict[str, str] = {}
    for kind, mark in _MARKS.items():
        name, description = about[kind]
        listed = ", ".join(map(str, members[kind]))
        texts |= {f"{mark} name": name, f"{mark} desc": description, f"{mark} ranks": f"[{listed}]"}
    return texts


def _document(calls: int, *, hangs: bool) -> dict[str, Any]:
    """Return the document of a rank with marks; where it hangs the last call is not over."""
    kinds = list(_MARKS.values())
    config = {
        f"{mark} name": {"name": f"{mark} name", "desc": f"{mark} desc", "ranks": f"{mark} ranks"} for mark in kinds
    }
    frames = [_frames(line) for line in (311, 327)]
    entries = [_entry(place, kinds[place % 2], frames[place % 2], place < calls - hangs) for place in range(calls)]
    status = {"last_enqueued_collective": calls // 2, "last_started_collective": -1, "last_completed_collective": -1}
    return {
        "version": "2.10",
        "pg_config": config,
        "comm_lib_version": "2.27.5",
        "pg_status": {"1": status, "2": status},
        "entries": entries,
    }


def _frames(line: int) -> list[dict[str, Any]]:
    """Return a stack as torch records it: its functions innermost, then the program's."""
    torch = "/usr/lib/python3/site-packages/torch/distributed"
    inner = [("all_reduce", f"{torch}/distributed_c10d.py", 3245), ("wrapper", f"{torch}/c10d_logger.py", 83)]
    outer = [(f"part_{depth}", f"/job/model/part_{depth}.py", line + depth) for depth in range(_DEPTH - len(inner))]
    return [{"name": name, "filename": file, "line": number} for name, file, number in (*inner, *outer)]


def _entry(place: int, mark: str, frames: list[dict[str, Any]], done: bool) -> dict[str, Any]:
    number, size, time = place // 2 + 1, _SIZES[place % len(_SIZES)], 1795315552476996176 + place * 1_000_000
    return {
        "frames": frames,
        "record_id": place,
        "pg_id": 1 + place % 2,
        "process_group": (f"{mark} name", f"{mark} desc"),
        "thread_name": "python",
        "thread_id": "139848781085568",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": time,
        "input_sizes": [size],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [size],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": time + 1000,
        "time_discovered_completed_ns": time + 2000 if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
    }


# -- forms: from a document with marks to the file of a rank -----------------------------------------------------------

_Template = Callable[[Mapping[str, str]], bytes]


class _AsTorch(pickle._Pickler):
    """Writes a pickle as torch's pickler does: of what comes again it remembers texts and frames, nothing else."""

    def memoize(self, obj: Any) -> None:
        if isinstance(obj, str) or (isinstance(obj, dict) and "filename" in obj):
            super().memoize(obj)  # type: ignore[misc]


def _pickle(document: dict[str, Any]) -> _Template:
    file = io.BytesIO()
    _AsTorch(file, 2).dump(document)
    return _filled(file.getvalue(), lambda text: b"X" + struct.pack("<I", len(text)) + text)


def _json(document: dict[str, Any]) -> _Template:
    entries = [{name: value for name, value in entry.items() if name != "frames"} for entry in document["entries"]]
    return _text({**document, "entries": entries})


def _text(document: dict[str, Any]) -> _Template:
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    return _filled(text.encode(), lambda text: b'"' + text + b'"')


def _gzip(document: dict[str, Any]) -> _Template:
    plain = _json(document)
    return lambda values: gzip.compress(plain(values), 1)


def _filled(content: bytes, written: Callable[[bytes], bytes]) -> _Template:
    """Return a function that replaces the marks of the content."""

    def template(values: Mapping[str, str]) -> bytes:
        result = content
        for mark, text in values.items():
            result = result.replace(written(mark.encode()), written(text.encode()))
        return result

    return template


FORMS: dict[str, Callable[[dict[str, Any]], _Template]] = {"pickle": _pickle, "json": _json, "gzip": _gzip}
