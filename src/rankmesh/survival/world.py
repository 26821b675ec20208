"""The world of one epoch: a default group of all members, the groups of its plan, and the way out of both.

```
store client   a connection of this epoch alone      cut: whoever waits for a key comes back
default group  all members, the plan's ranks first   cut: whoever waits for another member comes back
groups         those of the plan
```
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.gloo import CutStore, GlooDevices
from rankmesh.errors import ConnectError
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World
from rankmesh.survival.members import Members

__all__ = ["EpochWorld"]

# Members wait in the default group for as long as a step takes; a loss is noticed elsewhere.
_FOREVER = timedelta(days=30)
# Seconds between two cuts: a connection may be made while the others are cut.
_AGAIN = 0.05


class EpochWorld:
    """The world of one epoch, for one member."""

    def __init__(self, client: CutStore, epoch: int, members: Members, member: int, backend: str) -> None:
        self.rank, self.size = members.all.index(member), len(members.all)
        self.store = PrefixStore(f"epoch/{epoch}", client.store)
        self.groups: LiveGroups | None = None
        self.seconds: dict[str, float] = {}
        self._client, self._plan, self._backend = client, members.plan, backend
        self._devices = GlooDevices()
        self._world: World | None = None
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None

    @property
    def has_rank(self) -> bool:
        """Whether this member is at a rank of the plan, and no spare."""
        return self.rank < self._plan.mesh.size

    def enter(self) -> None:
        """Join the default group, and connect the groups of the plan; every member does."""
        started = time.perf_counter()
        with self._devices.found():
            dist.init_process_group(
                self._backend, store=self.store, rank=self.rank, world_size=self.size, timeout=_FOREVER
            )
        self._world = World.current()
        self._world.serves = False  # whoever serves the store is no rank's business: it lives as long as its process
        if self.has_rank:
            alone = self._plan.mesh.size == self._plan.world_size == self.size
            self.groups = connect(self._plan if alone else self._plan.replace(world_size=None))
        self.seconds["connect"] = time.perf_counter() - started

    def abort(self) -> None:
        """Have every call of this world return with an error, now and until it is left; from any thread."""
        with self._lock:
            if self._aborting is None and not self._left.is_set():
                self._aborting = threading.Thread(target=self._abort, daemon=True, name="rankmesh-abort")
                self._aborting.start()

    def _abort(self) -> None:
        aborted = False
        while True:
            self._client.cut()
            self._devices.cut()
            if self._world is not None:
                self._world.backend.store_lost = True
                with suppress(ConnectError, RuntimeError):
                    if aborted:
                        self._world.backend.abort(())
                    else:
                        self._world.abort()
                        aborted = True
            if self._left.wait(_AGAIN):
                return

    def close(self) -> None:
        """Leave the world; what it made is gone from torch's registries."""
        with self._lock:
            self._left.set()
        if self._aborting is not None:
            self._aborting.join()
        if self.groups is not None:
            with suppress(ConnectError):
                self.groups.close()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
