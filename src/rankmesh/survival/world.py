"""The world of one epoch: a default group of all members, the groups of its plan, and the way out of both.

```
store client   a connection of this epoch alone      cut: whoever waits for a key comes back
default group  all members, the plan's ranks first   cut: whoever waits for another member comes back
groups         the plan's
```
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.cut import Drain
from rankmesh.backend.nccl import device_done
from rankmesh.backend.world_group import WorldGroup
from rankmesh.debug.watch.switch import THEMSELVES
from rankmesh.debug.watch.watch import Watch
from rankmesh.errors import ConnectError, RankmeshError, first_line
from rankmesh.rendezvous import StoreChannel, gather
from rankmesh.rendezvous.waiting import leave_behind, submit, wait_for
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.members import Members

if TYPE_CHECKING:
    from rankmesh.survival.transport import Connection

__all__ = ["FINISHED", "EpochWorld", "has_finished", "old_keys"]

_Result = TypeVar("_Result")

THEMSELVES.add(__name__)

# How many ranks have returned from ``train``.
FINISHED = "finished"

# Seconds between two cuts: a connection may be made while the others are cut.
_AGAIN = 0.05
# Seconds that a call has to return after a cut, before its thread is left behind.
_GRACE = 0.2
# Members that gloo connects before ``train``: one that waits there for a member that is lost can be left behind, one
# that waits for its first word to it in ``train`` cannot.
_EAGER_SIZE = 64
# Of the seconds of connecting: how long a call of gloo's may take. Gloo does not end a message that is under way to a
# member that dies, and whoever sends it has to be in time for the round.
_CALL = 2.5
# Seconds that a member waits for what another does in ``train``: how long that takes is the program's affair.
_LONG = 30 * 86400.0


class EpochWorld:
    """The world of one epoch, for one member; ``seconds`` bounds each wait of connecting, ``drain`` is the job's."""

    def __init__(
        self,
        client: Connection,
        epoch: Epoch,
        members: Members,
        member: int,
        *,
        backend: str,
        device: torch.device,
        seconds: float,
        drain: Drain | None = None,
    ) -> None:
        self.rank, self.size = members.all.index(member), len(members.all)
        self.store = PrefixStore(_prefix(epoch), client.store)
        self.groups: LiveGroups | None = None
        self._client, self._members, self._device = client, members, device
        # Spares make none of the program's calls.
        self._calling = None if members.plan.mesh.size == self.size else members.plan.mesh.size
        self._seconds, self._drain = seconds, drain
        call = timedelta(seconds=_CALL * seconds)
        self._group = WorldGroup(
            backend, self.store, self.rank, self.size, timeout=call, eager_size=_EAGER_SIZE, drain=drain
        )
        self._world: World | None = None
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._aborted: Future[None] = Future()
        self._aborting: threading.Thread | None = None
        self._watch: Watch | None = None

    @property
    def has_rank(self) -> bool:
        """Return whether this member is at a rank of the plan, and no spare."""
        return self.rank < self._members.plan.mesh.size

    # -- in ---------------------------------------------------------------------------------------------------------

    def enter(self) -> float:
        """Join the default group and connect the groups of the plan; return the seconds it took. Collective.

        Runs on a thread, which is abandoned if the world is aborted: gloo cannot be interrupted while it waits for a
        dead member.
        """
        started = time.perf_counter()
        with self._reaching():
            self._unless_aborted(self._enter, "rankmesh-enter", "they connected")
        return time.perf_counter() - started

    def wait_for(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a call that waits for other members' messages; ``ConnectError`` if the world is aborted.

        Gloo never ends a message of which a part was sent when its receiver was killed. So over gloo a thread makes the
        call, and is left behind with it.
        """
        with self._reaching():
            if self._device.type != "cpu":
                return call()
            return self._unless_aborted(call, "rankmesh-gloo", "it waited for them")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Errors that torch raises in here for a store or a group of this world become ``ConnectError``."""
        try:
            yield
        except RankmeshError:
            raise
        except RuntimeError as error:
            raise ConnectError(
                f"rank {self.rank} no longer reaches the other members ({first_line(error)}); look at the network of "
                "its host",
                rank=self.rank,
            ) from error

    def _unless_aborted(self, call: Callable[[], _Result], thread: str, meanwhile: str) -> _Result:
        """Return the result of a call on a thread, which is left behind where it is not back soon after an abort."""
        made = submit(call, thread)
        futures: list[Future[Any]] = [made, self._aborted]
        wait(futures, return_when=FIRST_COMPLETED)
        if not made.done() and not wait([made], _GRACE).done:
            leave_behind(made)
            raise ConnectError(f"the members changed while {meanwhile}")
        try:
            return made.result()
        finally:
            del made, futures  # an error has this frame, which would have the error

    def _enter(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        self._group.make(timedelta(seconds=self._seconds))
        self._install()

    def _install(self) -> None:
        """Make the world torch's own, and connect the groups in it."""
        with self._lock:
            self._check()
            self._group.install(self._calling)
            self._world = World.current()
            self._world.backend.eager_size, self._world.backend.drain = _EAGER_SIZE, self._drain
            self._world.serves = False  # it is served for as long as its process lives, whatever happens to the world
        if self._device.type == "cuda":  # NCCL connects all members at their first call, which spares make nowhere else
            dist.all_reduce(torch.zeros(1, device=self._device))
            device_done(self._device, self._check)
        if self.has_rank:
            plan = self._members.plan
            if not plan.mesh.size == plan.world_size == self.size:
                plan = plan.replace(world_size=None)
            groups = connect(plan, timeout=self._seconds)
            with self._lock:
                self.groups = groups
                left = self._left.is_set()
            if left:  # while it connected
                groups.close()

    def _check(self) -> None:
        if self._aborted.done() or self._left.is_set():
            raise ConnectError("the members changed while they connected")

    def watch(self, limit: float | None, diagnosed: Callable[[str, tuple[int, ...]], None]) -> None:
        """Watch over the calls of this world; ``diagnosed`` takes why one hangs, and the members at fault.

        A call hangs after ``limit`` seconds, or half of its group's timeout. A spare, which makes none of the program's
        calls, is not at fault where the program waits for it.
        """

        def of_members(verdict: str, ranks: tuple[int, ...]) -> None:
            diagnosed(verdict, tuple(self._members.ranks[rank] for rank in ranks if rank < len(self._members.ranks)))

        limited = None if limit is None else timedelta(seconds=limit)
        self._watch = Watch(None, limited, diagnosed=of_members, anew=True)

    # -- what members share through the store -------------------------------------------------------------------------

    def give(self, key: str, text: str) -> None:
        """Give the other members a text."""
        with self._reaching():
            self.store.set(key, text)

    def taken(self, key: str) -> str:
        """Return a text that another member gives, or will give."""
        with self._reaching():
            wait_for(self.store, [key], _LONG)
            return str(self.store.get(key).decode())

    def first(self, key: str, text: str) -> str:
        """Return the text that the first member gave for a key; this member gives its text if it is the first."""
        with self._reaching():
            return str(self.store.compare_set(key, "", text).decode())

    def meet(self, key: str) -> None:
        """Wait until every member has come here."""
        with self._reaching():
            if self.store.add(f"{key}/came", 1) == self.size:
                self.store.set(key, "")
            wait_for(self.store, [key], _LONG)

    def gathered(self, data: object) -> list[Any]:
        """Return each member's value, in the order of their ranks; every member calls it, once an epoch."""
        name, size = "survive/gathered", range(self.size)
        return list(self.wait_for(lambda: gather(World.current().round(name, size), data, list, _LONG, "survive()")))

    def is_last(self, key: str) -> bool:
        """Return whether this rank is the last one of the plan that calls this; every rank calls it once."""
        with self._reaching():
            return self.store.add(key, 1) == self._members.plan.mesh.size

    # -- out --------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Have every call of this world return with an error, now and until it is left; from any thread."""
        with self._lock:
            if self._aborting is None and not self._left.is_set():
                self._aborting = threading.Thread(target=self._abort, daemon=True, name="rankmesh-abort")
                self._aborting.start()

    def _abort(self) -> None:
        self._aborted.set_result(None)
        whole = False
        while True:
            self._client.cut()
            self._group.cut()
            if self._world is not None:
                self._world.backend.store_lost = True
                with suppress(Exception):  # whatever it is, connections are cut on
                    if whole:
                        self._world.backend.abort(())
                    else:
                        self._world.abort()
                        whole = True
            if self._left.wait(_AGAIN):
                return

    def close(self) -> None:
        """Leave the world; what it made is gone from torch's registries."""
        with self._lock:
            self._left.set()
        if self._watch is not None:
            self._watch.close()
        if self._aborting is not None:
            self._aborting.join(self._seconds)  # a daemon: one that a backend does not let go is left behind
        if self.groups is not None:
            with suppress(ConnectError):
                self.groups.close()
        self._group.leave()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _prefix(epoch: Epoch) -> str:
    """Return the prefix of the keys that the world of an epoch has in a store."""
    return f"epoch/{epoch}"


def old_keys(keys: Iterable[str], before: int) -> list[str]:
    """Return the keys of a store that worlds and rounds of epochs before this number have left there."""
    found = ((key, re.match(r"(?:survive/)?epoch/(\d+)", key)) for key in keys)
    return [key for key, name in found if name is not None and int(name[1]) < before]


def has_finished(store: Store, epoch: Epoch, size: int) -> bool:
    """Return whether ``train`` has returned on all ranks of an epoch, by the store that its world was on.

    ``ChannelLost`` where that does not answer.
    """
    return int(StoreChannel(store, _prefix(epoch)).read(FINISHED) or 0) >= size
