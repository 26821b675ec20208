"""What ranks of a test of Sync do: one world of processes, split into a trainer and engines with their own."""

import os
import signal
import sys
import threading
from pathlib import Path

from tests.transfer import live
from tests.transfer.together import Together

import rankmesh as rm
from rankmesh.transfer.live.shards import allocate

BUDGET = 1 << 20


def sides(layouts):
    """How many ranks the trainer and one engine have."""
    return tuple(max(s.mesh.rank_range.stop for s in side.values()) for side in layouts)


def part(me, layouts):
    """Which side a process is on, None for the trainer, else the number of the engine; in a world of its own."""
    trainer, engine = sides(layouts)
    if me.rank < trainer:
        me.world(prefix="trainer", size=trainer)
        return None, me.rank
    number, rank = divmod(me.rank - trainer, engine)
    me.world(prefix=f"engine{number}", rank=rank, size=engine)
    return number, rank


def values(layouts, rank, version):
    """A trainer's shards of a version."""
    return live.shards(layouts[0], rank, version)


def fill(tensors, layouts, rank, version):
    """Train: the trainer's tensors become those of another version, in place."""
    for name, tensor in values(layouts, rank, version).items():
        tensors[name].copy_(tensor)


def empty(layouts, rank):
    """An engine's tensors before the first version."""
    made = allocate(layouts[1], rank, None)
    for tensor in made.values():
        tensor.zero_()
    return made


def wrong(tensors, layouts, rank, version):
    """The names of which an engine's shard is not that of a version."""
    return live.wrong(tensors, layouts[1], rank, version)


def model(trainer=None, engine=None, hidden=32, layers=2):
    """A small transformer on TP2·DP2 of the trainer and TP2 of the engines, or on other meshes."""
    trainer, engine = trainer or rm.Mesh(tp=2, dp=2), engine or rm.Mesh(tp=2)
    return tuple(live.model(mesh, hidden=hidden, layers=layers) for mesh in (trainer, engine))


def begin(me, layouts, place, **how):
    """The side and the rank of a process, its tensors, a trainer's of version 1, and its end of the sync."""
    engine, rank = part(me, layouts)
    tensors = values(layouts, rank, 1) if engine is None else empty(layouts, rank)
    return engine, rank, tensors, rm.Sync(*layouts, tensors, at=place, **how)


def at(me, wire, folder):
    """Where both sides meet."""
    return str(Path(folder) / "sync") if wire == "files" else me.store


def how(wire):
    """The wire that both sides ask for."""
    return {"connect": Together} if wire == "together" else {}


def stop_at(event):
    """Kill this process at its so many-th call of a function in the packages that sync; how many there were so far."""
    count = [0]

    def profile(frame, what, _argument):
        if what not in ("call", "c_call") or "/rankmesh/" not in frame.f_code.co_filename:
            return
        count[0] += 1
        if count[0] == event:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)
    return count


def stop_counting():
    """Count no further calls."""
    sys.setprofile(None)
    threading.setprofile(None)
