"""Sync: a trainer's weights, brought to inference engines version by version.

```
trainer  publish(1) ── train ── publish(2) ── train ── publish(3)
engine   receive() -> 1  generate  receive() -> 2  generate
engine                       (joins)  receive() -> 2       receive() -> 3
```

The trainer and each engine are jobs of their own; ``at`` is all that they share. Each side agrees inside its own world;
a version is announced by one rank of the trainer once all of them have it, and an engine changes to it once all its
ranks have it, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.core.axes import integer
from rankmesh.core.options import time_limit
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, quoted
from rankmesh.launch.address import host_and_port
from rankmesh.transfer.planning.transfer import BUDGET
from rankmesh.transfer.sync import direct, stored
from rankmesh.transfer.sync.delta import Changed, Delta, delta_of
from rankmesh.transfer.sync.layouts import Layouts
from rankmesh.transfer.sync.link import Side, Weights

__all__ = ["Published", "Received", "Sync"]


@dataclass(frozen=True)
class Published:
    """The result of `publish` on one rank: ``failed`` has the engines that it did not reach, and why."""

    version: int
    seconds: float
    memory: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """The result of `receive` on one rank: the ``version``, ``bytes`` that arrived, ``memory`` for buffers."""

    version: int
    bytes: int
    seconds: float
    memory: int = 0


class Sync:
    """The weights of a trainer for engines: ``publish`` on all ranks of the trainer, ``receive`` on all of an engine.

    Both sides give both layouts. In a folder, versions are files, which engines read when they like. Over a store the
    weights travel through a group for each engine: the first ``publish`` waits until ``engines`` of them ask, each
    further one for the engines that took the version before, and it serves every engine that has asked.

    Args:
        trainer: the trainer's shardings by name, as `Transfer` takes them, in the ranks of the trainer's own world.
        engine: the engine's shardings by name, in the ranks of the engine's own world.
        tensors: the shards of this rank under its own side. ``publish`` reads a trainer's shards, ``receive`` changes
            an engine's.
        at: the place where the sides meet: a folder that they share (``"/dev/shm/NAME"`` is shared memory),
            ``"host:port"``, where rank 0 of the trainer serves a store, or a store of torch's.
        engines: the engines that the first ``publish`` over a store waits for (default 1).
        budget: bytes of the buffers of a rank (default 256 MiB).
        timeout: seconds, or a timedelta, that any wait may take (default 60).
        connect: makes the transports of a store: ``direct.GlooGroup`` (default), or ``direct.NcclGroup`` between GPUs.
            Both sides give the same (`rankmesh.transfer.sync.direct`).

    Raises ``PlanError`` for layouts or options that do not fit.
    """

    def __init__(
        self,
        trainer: Mapping[str, Sharding],
        engine: Mapping[str, Sharding],
        tensors: Mapping[str, Tensor],
        *,
        at: str | Path | Store,
        engines: int = 1,
        budget: int = BUDGET,
        timeout: float | timedelta = 60.0,
        connect: direct.Connect = direct.GlooGroup,
    ) -> None:
        self._layouts, self._weights = Layouts(trainer, engine), Weights(tensors)
        budget, least = integer(budget, "budget", least=1), integer(engines, "engines", least=0)
        place, limit = _place_of(at), time_limit(timeout)
        self._timeout = limit.total_seconds()
        self._publishes: Callable[[Side], stored.Publisher | direct.Publisher]
        self._receives: Callable[[Side], stored.Reader | direct.Requester]
        if isinstance(place, Path):
            self._publishes, self._receives = partial(stored.Publisher, place), partial(stored.Reader, place)
        else:
            self._publishes = partial(direct.Publisher, place, connect, least)
            self._receives = partial(direct.Requester, place, connect)
        at = str(place) if isinstance(place, Path) else ""
        self._begin = partial(Side, layouts=self._layouts, weights=self._weights, timeout=limit, budget=budget, at=at)
        self._everything = True
        self._publisher: stored.Publisher | direct.Publisher | None = None
        self._receiver: stored.Reader | direct.Requester | None = None
        self.lock = self._weights.lock

    @property
    def version(self) -> int | None:
        """The version of the tensors in use: the last one published, or received; None before the first."""
        return self._weights.version

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors in use; hold ``lock`` to read them while another thread receives."""
        return self._weights.tensors

    def publish(self, version: int, changed: Changed = None) -> Published:
        """Publish this rank's tensors as a version, which is a number above the last one; every trainer rank calls it.

        ``changed`` are the names that have changed since the last version, or a dict from names to boxes of the whole
        tensors, (start, stop) by dimension, or None for a whole one; None: everything has. The tensors may change again
        once this returns. Engines that cannot be reached are left out.

        Raises ``AgreementError`` when ranks differ or stay away, ``TransferError`` when one has a problem. No engine
        gets such a version, and the next one is sent whole.
        """
        if self._receiver is not None:
            raise PlanError("publish() of a Sync that has received; an engine does not publish")
        started, everything, self._everything = time.perf_counter(), self._everything, True
        if self._publisher is None:
            self._publisher = self._publishes(self._begin("trainer"))

        def given() -> tuple[int, Delta | None]:
            number, delta = self._checked(version, changed)
            return number, None if everything else delta

        try:
            failed = self._publisher.publish(given)
        except BaseException:
            self._checked(version, changed)  # raises on the rank that was given what cannot be
            raise
        self._everything, self._weights.version = False, int(version)
        return Published(int(version), time.perf_counter() - started, self._publisher.memory, failed)

    def _checked(self, version: int, changed: Changed) -> tuple[int, Delta | None]:
        number = integer(version, "version", least=0)
        if self.version is not None and number <= self.version:
            raise PlanError(f"version {number} is not above {self.version}, the last one; count up", version=number)
        return number, delta_of(changed, self._layouts.trainer)

    def receive(self, wait: float | None = None) -> Received | None:
        """Change to the newest version, once there is one that is newer; every rank of an engine calls it.

        Returns None when there is none within ``wait`` seconds (None: the timeout; 0: looks once). The first version
        that an engine gets is whole, whenever it joins.

        Raises ``AgreementError`` when a rank of the engine stays away, ``TransferError`` when one fails or the trainer
        does, ``ConnectError`` when the trainer cannot be reached: the version in use then stays.
        """
        started, now = time.perf_counter(), time.monotonic()
        if self._publisher is not None:
            raise PlanError("receive() of a Sync that has published; the trainer does not receive")
        if self._receiver is None:
            self._receiver = self._receives(self._begin("engine"))
        total = self._receiver.take(now + (self._timeout if wait is None else wait))
        if total is None or self.version is None:
            return None
        return Received(self.version, total, time.perf_counter() - started, self._receiver.memory)

    def close(self) -> None:
        """Leave: files, groups and keys of this rank are gone. An engine keeps its weights.

        After the trainer's ranks have left, engines cannot read a version any more.
        """
        for one in (self._publisher, self._receiver):
            if one is not None:
                one.close()
        self._publisher, self._receiver = None, None

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place_of(at: object) -> Path | tuple[str, int] | Store:
    """Return the place where the sides find each other: a folder, an address, or a store."""
    if isinstance(at, Path | Store):
        return at
    if "/" in str(at):
        return Path(str(at))
    place = host_and_port(str(at))
    if place is None:
        raise PlanError(
            f"at is {quoted(at)}; give a folder with its path, such as '/dev/shm/weights', or an address, such as "
            "'10.0.0.1:29700'",
            at=at,
        )
    return place
