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

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.default import default_group
from rankmesh.core.axes import integer
from rankmesh.core.options import time_limit
from rankmesh.core.sharding import Sharding
from rankmesh.errors import AgreementError, ConnectError, PlanError, TransferError, first_line, quoted
from rankmesh.launch.address import host_and_port
from rankmesh.rendezvous import Outcome, Round, StoreChannel
from rankmesh.runtime.served_store import open_at
from rankmesh.runtime.world import World
from rankmesh.transfer.live.agreement import ExchangeError, TransferAgreement, in_one_line
from rankmesh.transfer.live.shards import problem_of, shards_of
from rankmesh.transfer.planning.transfer import BUDGET
from rankmesh.transfer.sync import direct, stored
from rankmesh.transfer.sync.delta import Changed, Delta, delta_of
from rankmesh.transfer.sync.layouts import Layouts
from rankmesh.transfer.sync.weights import Weights

__all__ = ["Published", "Received", "Sync"]

# Ranks of an engine may see different versions while they are published faster than they are read: so often they look.
_LOOKS = 100
# What the ranks of an engine agree on that see no newer version.
_NO_VERSION: Mapping[str, object] = {"version": -1, "of": ""}


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
        self._layouts = Layouts(trainer, engine)
        self._least, self._budget = integer(engines, "engines", least=0), integer(budget, "budget", least=1)
        self._timeout, self._connect = time_limit(timeout), connect
        self._at = _place_of(at)
        self._weights = Weights(tensors, staged=not isinstance(self._at, Path))
        self._everything = True
        self._publisher: stored.Publisher | direct.Publisher | None = None
        self._receiver: stored.Reader | direct.Requester | None = None
        self._asked, self._id = False, ""
        self.lock = self._weights.lock

    # -- what an engine has -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version of the tensors in use: the last one published, or received; None before the first."""
        return self._weights.version

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors in use; hold ``lock`` to read them while another thread receives."""
        return self._weights.tensors

    # -- the trainer --------------------------------------------------------------------------------------------------

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
        self._begin("trainer")

        def write() -> tuple[Mapping[str, object], str]:
            number, delta = self._checked(version, changed)
            delta = None if everything else delta
            self._publisher = self._publisher or self._trainer()
            self._publisher.history.add(number, delta)
            return {"version": number, "changed": _digest(delta)}, self._publisher.write()

        def announce(texts: dict[int, str]) -> str:
            return "" if self._publisher is None else self._publisher.announce(texts)

        try:
            outcome = self._agreed(self._agreement("publish"), write, announce, more=self._timeout.total_seconds())
        except BaseException:
            if self._publisher is not None:
                self._publisher.discard()
            self._checked(version, changed)  # raises on the rank that was given what cannot be
            raise
        publisher, number = cast("stored.Publisher | direct.Publisher", self._publisher), int(version)
        failed = publisher.send(str(outcome.value))
        self._everything = False
        self._weights.version = number
        return Published(number, time.perf_counter() - started, publisher.memory, failed)

    def _checked(self, version: int, changed: Changed) -> tuple[int, Delta | None]:
        number = integer(version, "version", least=0)
        if self.version is not None and number <= self.version:
            raise PlanError(f"version {number} is not above {self.version}, the last one; count up", version=number)
        return number, delta_of(changed, self._layouts.trainer)

    def _trainer(self) -> stored.Publisher | direct.Publisher:
        run, rank, tensors = self._id, self._rank, self._weights.tensors
        if isinstance(self._at, Path):
            return stored.Publisher(self._at, self._layouts.stored, rank, tensors, run)
        member = self._member(rank, serves=rank == self._layouts.trainer_ranks[0])
        return direct.Publisher(member, tensors, run, self._least)

    # -- an engine ----------------------------------------------------------------------------------------------------

    def receive(self, wait: float | None = None) -> Received | None:
        """Change to the newest version, once there is one that is newer; every rank of an engine calls it.

        Returns None when there is none within ``wait`` seconds (None: the timeout; 0: looks once). The first version
        that an engine gets is whole, whenever it joins.

        Raises ``AgreementError`` when a rank of the engine stays away, ``TransferError`` when one fails or the trainer
        does, ``ConnectError`` when the trainer cannot be reached: the version in use then stays.
        """
        started = time.perf_counter()
        end = time.monotonic() + (self._timeout.total_seconds() if wait is None else wait)
        if self._publisher is not None:
            raise PlanError("receive() of a Sync that has published; the trainer does not receive")
        self._begin("engine")
        return self._read(started, end) if isinstance(self._at, Path) else self._request(started, end)

    def _engine(self) -> stored.Reader | direct.Requester:
        rank = self._rank + self._layouts.shift
        if isinstance(self._at, Path):
            return stored.Reader(self._at, self._layouts.stored, rank)
        return direct.Requester(self._member(rank, serves=False), self._id)

    def _look(self, end: float) -> tuple[Any, Any, TransferAgreement]:
        """Return what receives, the version that all ranks of this engine see, None at ``end``, and their round."""
        for look in range(_LOOKS):
            found: list[Any] = []

            def await_version(found: list[Any] = found) -> tuple[Mapping[str, object], str]:
                self._receiver = self._receiver or self._engine()
                found.append(announced := self._receiver.await_version(end))
                return _NO_VERSION if announced is None else announced.what, ""

            agreement = self._agreement("receive")
            try:
                self._agreed(agreement, await_version, last=isinstance(self._at, Path))
            except (AgreementError, TransferError) as error:
                if found and isinstance(found[0], stored.Announced):
                    found[0].release()
                if look == _LOOKS - 1 or not isinstance(error, AgreementError) or "version" not in error.fields:
                    raise
            else:
                return self._receiver, found[0], agreement
        raise AssertionError

    def _read(self, started: float, end: float) -> Received | None:
        """Receive from files: all ranks lock the files of one version, and copy them."""
        reader, announced, _ = self._look(end)
        if announced is None:
            return None
        try:
            into = self._weights.begin()
            with self._weights.writing():
                total = reader.fill(announced, into)
                self._weights.commit(announced.version)
        finally:
            announced.release()
        reader.hold(announced)
        return Received(announced.version, total, time.perf_counter() - started)

    def _request(self, started: float, end: float) -> Received | None:
        """Receive over a group: ask, receive beside the weights in use, and change to what all ranks have."""
        if not self._asked:

            def enter() -> tuple[Mapping[str, object], str]:
                self._receiver = self._receiver or self._engine()
                return {"ask": ""}, ""

            self._agreed(self._agreement("ask"), enter, lambda _: cast(direct.Requester, self._receiver).ask())
            self._asked = True
        requester, announced, agreement = self._look(end)
        if announced is None:
            return None
        failure, arrived = None, None
        try:
            arrived = requester.fill(announced, self._weights.begin())
        except Exception as error:  # noqa: BLE001  - whatever it is, the other ranks must know
            failure = error if isinstance(error, ExchangeError) else ExchangeError(in_one_line(error))
            requester.drop(failed=True)
        outcome = agreement.end(failure)
        self._asked = False
        requester.answered(announced, whole=outcome.agreed, first=self._rank == self._layouts.engine_ranks[0])
        if not outcome.agreed or arrived is None:
            raise TransferError(
                f"rank {self._rank}: version {announced.version} did not arrive whole, since {outcome.message}; the "
                f"weights in use have version {self.version}; receive() asks for the next one",
                rank=self._rank,
                ranks=outcome.ranks,
                version=announced.version,
            )
        total, written = arrived
        self._weights.commit(announced.version, written)
        return Received(announced.version, total, time.perf_counter() - started, requester.memory)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _agreed(
        self,
        agreement: TransferAgreement,
        work: Callable[[], tuple[Mapping[str, object], str]],
        value: Callable[[dict[int, str]], object] | None = None,
        *,
        more: float = 0.0,
        last: bool = True,
    ) -> Outcome:
        """Agree on what ``work`` returns. If it fails on a rank, all raise: that rank its own error, if it is ours."""
        what: Mapping[str, object] = {}
        text, problem, refused = "", "", None
        try:
            what, text = work()
        except Exception as error:  # noqa: BLE001  - whatever it is, the other ranks must know
            problem, refused = in_one_line(error), error
        try:
            return agreement.start(what, problem, text, value, more, last=last or what is _NO_VERSION)
        except TransferError as error:
            if not isinstance(self._at, Path) and isinstance(refused, AgreementError | ConnectError):
                raise refused from error
            raise

    def _begin(self, side: str) -> None:
        """Agree once with the other ranks of this side on both layouts, and on an id of this side."""
        if self._id:
            return
        trains = side == "trainer"
        self._ranks = self._layouts.trainer_ranks if trains else self._layouts.engine_ranks
        self._side, self._serves = side, False
        if len(self._ranks) == 1 and not dist.is_initialized():
            self._rank, self._store = self._ranks[0], HashStore()
        else:
            world = default_group()
            self._rank, self._store, self._serves = world.rank, world.store, World.current().serves
        if self._rank not in self._ranks:
            raise PlanError(
                f"rank {self._rank} is not in the {side}'s layout, which has {len(self._ranks)} ranks; call "
                f"{'publish' if trains else 'receive'}() on these alone",
                rank=self._rank,
            )
        shardings = self._layouts.trainer if trains else self._layouts.engine
        shards = shards_of(shardings, self._rank)
        given = self._weights.tensors
        problem = problem_of(given, shardings, shards, side)
        self._weights.tensors = {name: given[name] for name in shards if name in given}
        what = {"layouts": self._layouts.direct.digest, "budget": self._budget}
        begun = self._agreement("begin").start(what, problem, value=lambda _: uuid.uuid4().hex[:12], last=True)
        self._id = str(begun.value)

    def _agreement(self, step: str) -> TransferAgreement:
        """Return a round of this side."""
        where = str(self._at) if isinstance(self._at, Path) else ""
        name = hashlib.sha256(f"{where} {self._layouts.direct.digest}".encode()).hexdigest()[:12]
        call = "publish()" if self._side == "trainer" else "receive()"
        return TransferAgreement(
            self._store,
            f"sync/{name}/{self._side}/{step}",
            self._rank,
            self._ranks,
            self._timeout,
            serves=self._serves,
            call=call,
        )

    def _member(self, rank: int, *, serves: bool) -> direct.Member:
        """Return this rank as it reaches the other side; ``rank`` is its number in the transfer."""
        store, device = self._open(serves=serves), self._weights.device
        return direct.Member(store, self._layouts.direct, rank, self._timeout, self._budget, self._connect, device)

    def _open(self, *, serves: bool) -> Store:
        """Return the store that trainer and engines share."""
        if not isinstance(self._at, tuple):
            return self._at  # type: ignore[return-value]  # a folder has none
        host, port = self._at
        try:
            return open_at(host, port, self._timeout, serves=serves)
        except ConnectError as error:
            raise ConnectError(
                f"no store of a trainer answers at {host}:{port} ({first_line(error)}); start the trainer, whose rank "
                f"0 serves it, within {self._timeout.total_seconds():g} s",
                address=self._at,
            ) from error

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: files, groups and keys of this rank are gone. An engine keeps its weights.

        After the trainer's ranks have left, engines cannot read a version any more.
        """
        for one in (self._publisher, self._receiver):
            if one is not None:
                one.close()
        if isinstance(self._publisher, direct.Publisher):
            # The rank that serves the store leaves last: others may still be sending the last version.
            name, serves = f"sync/{self._publisher.run}", isinstance(self._at, tuple) and self._rank == self._ranks[0]
            end = Round(StoreChannel(self._store), name, self._ranks, self._rank, serves, epoch=0)
            end.leave(Outcome(), stay=True, all_read=True)
        self._publisher, self._receiver, self._id = None, None, ""

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place_of(at: object) -> Path | tuple[str, int] | Store:
    """Return where the sides meet: a folder, an address, or a store."""
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


def _digest(delta: Delta | None) -> str:
    return hashlib.sha256(repr(None if delta is None else sorted(delta.items(), key=str)).encode()).hexdigest()[:16]
