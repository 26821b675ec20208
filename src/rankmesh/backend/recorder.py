"""Torch's records of this rank's calls: its flight recorders, its counters, and the frames of its functions."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any

import torch
import torch._C._distributed_c10d as c10d_native
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "call_facts",
    "calls_kept",
    "calls_made",
    "collectives",
    "group_in_creation",
    "last_call",
    "recorded",
    "under_way",
]


# What the watch reads several times a second: without looking for an encoding.
_decoded = json.JSONDecoder().raw_decode


def recorded() -> tuple[bytes, ...]:
    """Return the pickles of torch's flight recorders: gloo's and, in a torch with NCCL, NCCL's."""
    nccl = getattr(c10d_native, "_dump_nccl_trace", None)
    with _compiler_left_out():
        generic = c10d_native._dump_fr_trace(True, True, False)  # type: ignore[attr-defined]
        return (generic,) if nccl is None else (generic, nccl(True, True, False))


class _Compiler(ModuleType):
    """Stand for ``torch._inductor`` until it is loaded: any name in it but ``codecache`` loads it."""

    def __getattr__(self, name: str) -> Any:
        if name == "codecache" and "torch._inductor.codecache" not in sys.modules:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Keep torch from loading its compiler, which takes seconds, to name the frames of code that it has compiled.

    A program that has loaded the compiler, or loads it meanwhile, keeps it.
    """
    stub = None if "_inductor" in vars(torch) else _Compiler("torch._inductor")
    if stub is not None:
        torch._inductor = stub
    try:
        yield
    finally:
        if stub is not None and vars(torch).get("_inductor") is stub:
            del torch._inductor


def under_way() -> list[dict[str, Any]]:
    """Return the unfinished calls that are recorded; reading a full recorder takes 40 ms, without calls meanwhile."""
    return _calls_kept(active=True)


def collectives() -> dict[tuple[int, str], tuple[int, int]]:
    """Return the last complete and the last enqueued collective of each group, by recorder and number; takes 10 µs."""
    return {
        (number, group): (int(about["last_completed_collective"]), int(about["last_enqueued_collective"]))
        for number, kept in enumerate(_recorders(calls=False, active=True))
        for group, about in (kept.get("pg_status") or {}).items()
    }


def calls_kept(recorder: int) -> list[dict[str, Any]]:
    """Return the calls that gloo's recorder (0) has, or NCCL's (1); reading a full one takes 40 ms."""
    read = [c10d_native._dump_fr_trace_json, getattr(c10d_native, "_dump_nccl_trace_json", None)][recorder]  # type: ignore[attr-defined]
    return json.loads(read(True, False)).get("entries") or [] if read else []


def _calls_kept(*, active: bool) -> list[dict[str, Any]]:
    return [entry for kept in _recorders(calls=True, active=active) for entry in kept.get("entries") or ()]


def _recorders(*, calls: bool, active: bool) -> list[dict[str, Any]]:
    """Return the groups and, if wanted, the calls in the flight recorders of gloo and of NCCL."""
    nccl = getattr(c10d_native, "_dump_nccl_trace_json", None)
    generic = c10d_native._dump_fr_trace_json(calls, active)  # type: ignore[attr-defined]
    return [_decoded(data.decode())[0] for data in ((generic,) if nccl is None else (generic, nccl(calls, active)))]


def calls_made(group: str = "") -> int:
    """Return the number of calls of this rank on the group of this name, or on all, as far as backends count them.

    Gloo counts what two members exchange as well, NCCL collectives alone.
    """
    named = list(c10d._world.pg_names.items())
    return sum(_calls_made(pg) for pg, name in named if not group or str(name) == group)


def _calls_made(pg: dist.ProcessGroup) -> int:
    made: dict[int, int] = {}
    for device in pg._device_types:
        with suppress(RuntimeError):  # a backend that does not count, or a group that ends
            backend: Any = pg._get_backend(device)
            made[id(backend)] = backend._get_sequence_number_for_group()
    return sum(made.values())


def last_call() -> int:
    """Return the time of this rank's last recorded call, in nanoseconds since the epoch; 0 without one."""
    return max((int(entry["time_created_ns"]) for entry in _calls_kept(active=False)), default=0)


def call_facts(frame: FrameType) -> dict[str, str | int]:
    """Group, peer, root and reduction of a call of ``torch.distributed``, from the local variables of its function."""
    given = dict(frame.f_locals)
    if not dist.is_initialized():
        return {}
    group = getattr(given.get("group"), "pg", given.get("group"))
    group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if group is None:
        return {}
    facts: dict[str, str | int] = {"group": str(group.group_name)}
    one = next((given[name] for name in ("group_src", "group_dst") if isinstance(given.get(name), int)), None)
    if one is not None:
        facts["root"] = facts["peer"] = dist.get_global_rank(group, one)
    else:
        named = next((given[name] for name in ("src", "dst") if isinstance(given.get(name), int)), None)
        if named is not None:
            facts["root"] = facts["peer"] = named
    if given.get("op") is not None:
        facts["reduction"] = str(given["op"]).rpartition(".")[2]
    return facts


def group_in_creation(frame: FrameType | None) -> dict[str, object]:
    """Return the process group that a thread creates, by its innermost frame, and how many there were; else nothing."""
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper" and frame.f_code.co_filename == c10d.__file__:
            given = frame.f_locals
            members = [*given["global_ranks_in_group"]]
            return {"group": str(given["group_name"]), "members": members, "earlier": len(c10d._world.pg_names)}
        frame = frame.f_back
    return {}
