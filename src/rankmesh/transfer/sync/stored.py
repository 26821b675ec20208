"""Versions in a folder that trainer and engines share: /dev/shm on one host, a shared file system otherwise.

```
FOLDER/rankmesh-index         the newest version: its number, what changed, and the file of each trainer rank
FOLDER/rankmesh-3-8f1c-0      rank 3's tensors, one after the other, behind the version that they are of
FOLDER/rankmesh-3-8f1c-1      the same of the version before, which is written next
```

A reader holds a shared lock (``flock``) on the files that it reads. A trainer rank writes the older of its two files if
nobody reads it, else a new one: no reader can hold up the trainer, and the kernel drops the lock of a reader that dies.
A version is in the index once every rank has written its file.

The folder is private to one user (`rankmesh.core.private`). A trainer deletes what an earlier one has left there, and
refuses a folder that holds anything else.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankmesh.core.boxes import Box, meet
from rankmesh.core.documents import Unreadable
from rankmesh.core.private import PrivateFolder
from rankmesh.core.sharding import Sharding
from rankmesh.errors import ConnectError, PlanError, TransferError, first_line, quoted
from rankmesh.rendezvous import ChannelLost
from rankmesh.rendezvous.channel import LARGEST
from rankmesh.rendezvous.waiting import answered_within, submit
from rankmesh.transfer.live.shards import local
from rankmesh.transfer.live.stream import Slices, where
from rankmesh.transfer.planning.local import LocalMoves
from rankmesh.transfer.sync.delta import History, restricted
from rankmesh.transfer.sync.link import Announced, Given, Side, other_layouts

__all__ = ["Publisher", "Reader"]

_INDEX = "rankmesh-index"
# The files of a sync, and drafts of its index.
_OF_A_SYNC = re.compile(r"rankmesh-\d+-[0-9a-f]{12}-\d+|\.?rankmesh-index[.\d]*")
# Bytes of a file before its tensors: the version that they are of. Tensors begin at multiples of it.
_ALIGNED = 64
_PAUSE = 0.002
# Seconds that a look at a folder may take.
_MOMENT = 2.0


@contextmanager
def _opened(folder: Path, *, create: bool = False) -> Iterator[PrivateFolder]:
    """Open the folder of a sync; ``PlanError`` if it is not private, ``FileNotFoundError`` if there is none."""
    try:
        found = PrivateFolder.create(folder) if create else PrivateFolder(folder)
    except Unreadable as error:
        raise PlanError(
            f"at is {quoted(str(folder))}, which {error}; give a folder that does not exist yet: publish() creates it "
            "for this user alone",
            at=folder,
        ) from error
    with found:
        yield found


class Place(NamedTuple):
    """The place of a rank's tensor in its file: bytes ``start`` to ``stop - 1``."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: str


def _places(shardings: Mapping[str, Sharding], rank: int) -> tuple[dict[str, Place], int]:
    """Return the place of each tensor of a rank in its file, and the file's length; equal on all ranks."""
    end, found = _ALIGNED, {}
    for name, sharding in shardings.items():
        if sharding.holds(rank):
            shape = sharding.of(rank).shape
            stop = end + prod(shape) * sharding.itemsize
            found[name] = Place(end, stop, shape, sharding.dtype)
            end = -(-stop // _ALIGNED) * _ALIGNED
    return found, end


class File:
    """One file of a trainer rank, mapped: its tensors by name, and the version that they are of.

    ``version`` is what its writer has in it, None while that is of none.
    """

    def __init__(
        self, folder: PrivateFolder, name: str, places: Mapping[str, Place], length: int, *, create: bool
    ) -> None:
        self.name = name
        self._descriptor = folder.create_file(name) if create else folder.open(name)
        try:
            if create:
                # A file system that is full is an error here, and would be a signal later.
                os.posix_fallocate(self._descriptor, 0, length)
            elif os.fstat(self._descriptor).st_size != length:
                raise FileNotFoundError(name)
            access = mmap.ACCESS_WRITE if create else mmap.ACCESS_COPY
            self._map = mmap.mmap(self._descriptor, length, access=access)
        except BaseException:
            folder.remove(name) if create else None
            raise
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensors = {
            name: whole[place.start : place.stop].view(getattr(torch, place.dtype)).view(place.shape)
            for name, place in places.items()
        }
        self.version: int | None = None

    @property
    def stamp(self) -> str:
        """The version that the file is of; nothing while it is written."""
        return os.pread(self._descriptor, _ALIGNED, 0).rstrip(b"\0").decode(errors="replace")

    @stamp.setter
    def stamp(self, text: str) -> None:
        self._map[:_ALIGNED] = text.encode().ljust(_ALIGNED, b"\0")

    def lock(self, *, exclusive: bool) -> bool:
        """Take the lock if nobody else has one that forbids it; return whether it is taken."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Give the lock back."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def flush(self) -> None:
        """Let other hosts see what was written, if they share the file system."""
        self._map.flush()

    def __del__(self) -> None:
        """Close the file; its memory is freed with the last tensor of it."""
        with suppress(OSError, AttributeError):
            os.close(self._descriptor)


class Publisher:
    """One trainer rank's files in a folder."""

    memory = 0

    def __init__(self, folder: Path, side: Side) -> None:
        self._folder, self._side, self._moves = folder, side, side.layouts.stored
        self._places, self._length = _places(self._moves.source, side.rank)
        self._history = History()
        self._number = 0
        self._current: File | None = None
        self._older: File | None = None
        self._writing: File | None = None
        self._is_prepared = False

    def publish(self, given: Given) -> dict[str, str]:
        """Write this rank's part beside the current one, which it replaces once the index has the version."""
        try:
            self._side.published(given, self._history, self._write, self._announce)
        except BaseException:  # an index that still appears finds no file of the version
            self._remove(self._writing)
            self._writing = None
            raise
        if self._writing is not None:
            self._older, self._current, self._writing = self._current, self._writing, None
            self._current.unlock()
        return {}

    def _prepare(self) -> None:
        """Make the folder, and delete what this rank of a killed trainer left; its readers keep what they have."""
        with _opened(self._folder, create=True) as folder:
            names = folder.names()
            foreign = sorted(name for name in names if not _OF_A_SYNC.fullmatch(name))
            if foreign:
                raise PlanError(
                    f"at is {quoted(str(self._folder))}, which holds {len(foreign)} files that are not of a sync, such "
                    f"as {quoted(foreign[0])}; give a folder that does not exist yet",
                    at=self._folder,
                )
            for name in names:
                if name.startswith(f"rankmesh-{self._side.rank}-"):
                    folder.remove(name)
        self._is_prepared = True

    def _write(self) -> str:
        """Write this rank's part of the newest version; return the file's name."""
        if not self._is_prepared:
            self._prepare()
        if not self._places:
            return ""
        file = self._writing = self._free()
        file.stamp = ""
        changed, file.version = self._history.since(file.version), None
        tensors = self._side.weights.tensors
        for name, tensor in file.tensors.items():
            shard = local(tensors[name])
            boxes = None if changed is None else changed.get(name, ())
            for here in [()] if boxes is None else self._parts(name, boxes):
                tensor[here].copy_(shard[here])
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        file.version = self._history.newest
        file.stamp = f"{self._side.id} {file.version}"
        file.flush()
        return file.name

    def _parts(self, name: str, boxes: Sequence[Box]) -> list[Slices]:
        shard = self._moves.source[name].of(self._side.rank)
        pairs = ((whole, meet(whole, box)) for whole in shard.boxes for box in boxes)
        return [where(shard, shared) for _, shared in pairs if shared is not None]

    def _free(self) -> File:
        """Return a file that is not of the current version, and that nobody reads."""
        file, self._older = self._older, None
        if file is not None:
            if file.lock(exclusive=True):
                return file
            self._remove(file)
        self._number += 1
        with _opened(self._folder, create=True) as folder:
            name = f"rankmesh-{self._side.rank}-{self._side.id}-{self._number}"
            file = File(folder, name, self._places, self._length, create=True)
        file.lock(exclusive=True)
        return file

    def _announce(self, files: Mapping[int, str]) -> str:
        """Put the newest version, which all ranks have written, into the index: one rank does."""
        index = {
            "digest": self._moves.digest,
            "run": self._side.id,
            "history": self._history.to_data(),
            "files": {str(rank): name for rank, name in files.items() if name},
        }
        with _opened(self._folder) as folder:
            folder.write(_INDEX, json.dumps(index).encode())
        return ""

    def _remove(self, *files: File | None, index: bool = False) -> None:
        """Delete files, if the folder is still there; readers of a file go on."""
        with suppress(OSError, PlanError), _opened(self._folder) as folder:
            for name in (*([_INDEX] if index else []), *(file.name for file in files if file is not None)):
                folder.remove(name)

    def close(self) -> None:
        """Delete the files of this rank; the last one to do so deletes the folder."""
        if self._is_prepared:
            self._remove(self._current, self._older, self._writing, index=self._side.is_first)
            with suppress(OSError):
                self._folder.rmdir()
        self._current = self._older = self._writing = None


class _Part(NamedTuple):
    """A box of a tensor: where it is in the file of a trainer's rank, and where in the engine's tensor."""

    source: int
    name: str
    here: Slices
    there: Slices
    bytes: int


class Reader:
    """One rank of an engine that reads the files in a folder."""

    memory = 0

    def __init__(self, folder: Path, side: Side) -> None:
        self._folder, self._side = folder, side
        self._moves = moves = side.layouts.stored
        self._local = moves.of(side.rank)
        self._sources = tuple(sorted({move.source for move in self._local.receives}))
        self._places = {source: _places(moves.source, source) for source in self._sources}
        self._target = {name: s.of(side.rank) for name, s in moves.target.items() if s.holds(side.rank)}
        self._files: dict[str, File] = {}
        self._in_use: tuple[str, int] | None = None
        self._pending: Future[Announced | None] | None = None

    def take(self, end: float) -> int | None:
        """Copy what changed, once all ranks have locked the files of one version."""
        announced, _ = self._side.newest(lambda: self.await_version(end), last=True)
        if announced is None:
            return None
        parts = self._whole if announced.delta is None else self._parts(restricted(self._local, announced.delta))
        try:
            with self._side.weights.changed(announced.version):
                into = {name: local(tensor) for name, tensor in self._side.weights.tensors.items()}
                for part in parts:
                    tensor = announced.files[part.source].tensors[part.name]
                    into[part.name][part.there].copy_(tensor[part.here])
        finally:
            announced.release()
        self._in_use = announced.run, announced.version
        return sum(part.bytes for part in parts)

    def await_version(self, end: float) -> Announced | None:
        """Wait for a version newer than the one in use, and return it; None at ``end`` (``monotonic``).

        A thread looks, and is left behind if the file system does not answer: the next call waits for it. One that is
        interrupted ends it.
        """
        stop = threading.Event()
        pending = self._pending or submit(partial(self._await, end, stop), "rankmesh-sync")
        try:
            return answered_within(pending, max(0.0, end - time.monotonic()) + _MOMENT)
        except ChannelLost as error:
            raise ConnectError(
                f"the file system of {quoted(str(self._folder))} does not answer ({error}); give a folder of another "
                "one, such as /dev/shm",
                at=self._folder,
            ) from error
        except BaseException:
            stop.set()
            raise
        finally:
            self._pending = None if pending.done() else pending

    def _await(self, end: float, stop: threading.Event) -> Announced | None:
        while (found := self._look()) is None and (left := end - time.monotonic()) > 0:
            if stop.wait(min(_PAUSE, left)):
                break
        return found

    def _look(self) -> Announced | None:
        with suppress(FileNotFoundError, BlockingIOError), _opened(self._folder) as folder:
            return self._newest(folder, self._index(folder))
        return None

    def _index(self, folder: PrivateFolder) -> Mapping[str, Any]:
        try:
            return dict(json.loads(folder.read(_INDEX, LARGEST)))
        except (TypeError, ValueError) as error:
            raise TransferError(
                f"{quoted(_INDEX)} in {quoted(str(self._folder))} is not an index of versions ({first_line(error)}); "
                "delete the folder and start the trainer again",
                at=self._folder,
            ) from error

    def _newest(self, folder: PrivateFolder, index: Mapping[str, Any]) -> Announced | None:
        if index["digest"] != self._moves.digest:
            raise other_layouts(index["digest"], f" at {quoted(str(self._folder))}")
        history, run = History(index["history"]), str(index["run"])
        version = history.newest
        if version is None or (run, version) == self._in_use:
            return None
        # A trainer that was started anew counts its versions anew.
        since = self._in_use[1] if self._in_use is not None and self._in_use[0] == run else None
        names = {source: index["files"][str(source)] for source in self._sources}
        files = self._locked(folder, names, f"{run} {version}")
        return None if files is None else Announced(run, version, run, history.since(since), files=files)

    def _locked(self, folder: PrivateFolder, names: Mapping[int, str], stamp: str) -> dict[int, File] | None:
        """Lock the files of a version to read, and return them; None if one of them is being written again."""
        taken: dict[int, File] = {}
        for source, name in names.items():
            file = self._file(folder, source, name)
            if file is None or not file.lock(exclusive=False):
                break
            taken[source] = file
            if file.stamp != stamp:
                break
        else:
            for name in self._files.keys() - set(folder.names()):
                del self._files[name]
            return taken
        for file in taken.values():
            file.unlock()
        return None

    def _file(self, folder: PrivateFolder, source: int, name: str) -> File | None:
        if name not in self._files:
            places, length = self._places[source]
            try:
                self._files[name] = File(folder, name, places, length, create=False)
            except OSError:
                return None
        return self._files[name]

    @cached_property
    def _whole(self) -> list[_Part]:
        """All that is copied, looked up once, since that takes as long as a third of the copy."""
        return self._parts(self._local)

    def _parts(self, moves: LocalMoves) -> list[_Part]:
        found = []
        for source, ones in groupby(moves.receives, key=lambda move: move.source):
            shards = {name: self._moves.source[name].of(source) for name in self._places[source][0]}
            for move in ones:
                here, there = where(shards[move.name], move.box), where(self._target[move.name], move.box)
                found.append(_Part(source, move.name, here, there, move.bytes))
        return found

    def close(self) -> None:
        """Close the files."""
        self._files, self._pending = {}, None
