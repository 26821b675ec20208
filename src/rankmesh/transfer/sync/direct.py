"""Versions over process groups: one for each engine, of the trainer's ranks and its own.

```
engine    request/ENGINE     "I hold version 3, over group g1"      stays until it is served
trainer   go/ENGINE/7        "version 4, over group g1, these boxes"    written by the coordinator of a publish alone
both      group g1           the messages of the transfer, over gloo or NCCL
```

With a job key (`rankmesh.launch.job_key`) these texts carry an authentication code, and one without it is ignored.

A publish serves the engines that have asked. It waits for those that took the version before, as long as its timeout:
an engine that dies, or hangs, is left out. The trainer sends to each engine on a thread of its own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.gloo import PAIR_TIMEOUTS, GlooDevices, delete_address, put_gloo_under
from rankmesh.backend.nccl import Communicator
from rankmesh.backend.protocol import NotJoined
from rankmesh.errors import AgreementError, ConnectError, PlanError, StoreLost, TransferError, first_line
from rankmesh.launch.job_key import VARIABLE, JobKey
from rankmesh.rendezvous import BoundedChannel, ChannelLost, Outcome, Round, StoreChannel
from rankmesh.rendezvous.waiting import answered_within, submit
from rankmesh.runtime.served_store import open_at
from rankmesh.transfer.live.agreement import ExchangeError, in_one_line
from rankmesh.transfer.live.exchange import Exchange, MessageSchedule, P2PTransport, PendingMessage, batches, start_each
from rankmesh.transfer.live.run import longest_message, schedule, schedule_of
from rankmesh.transfer.live.shards import local
from rankmesh.transfer.sync.delta import Delta, History, restricted
from rankmesh.transfer.sync.layouts import ranks_of
from rankmesh.transfer.sync.link import Announced, Given, Side, other_layouts

__all__ = ["Connect", "GlooGroup", "Group", "NcclGroup", "Publisher", "Requester"]

_log = logging.getLogger("rankmesh.sync")

PREFIX = "rankmesh-sync"
_SAME_KEY = f"set {VARIABLE} to one key for the trainer and all engines, or nowhere"
_Result = TypeVar("_Result")

# Seconds between the first two looks for requests, and between later ones; of one look for an answer; that a call may
# take longer than its limit.
_PAUSE, _LONGEST_PAUSE, _SLICE, _MOMENT = 0.0005, 0.005, 1.0, 5.0


class Group(P2PTransport, Protocol):
    """A transport between a trainer and one engine."""

    def close(self, failed: bool) -> None:
        """End it; after a failure every call that waits in it returns with an error."""


# Makes the transport ``key`` of the ranks ``members``, in their order; all of them do. The tensors of this rank are on
# ``device``. (store, key, members, rank, timeout, device)
Connect = Callable[[Store, str, Sequence[int], int, timedelta, torch.device], Group]


class GlooGroup:
    """A gloo group of its own, outside of torch's registries, whose pairs connect when they first talk."""

    def __init__(
        self, store: Store, key: str, members: Sequence[int], rank: int, timeout: timedelta, _: torch.device
    ) -> None:
        self._places = {member: place for place, member in enumerate(members)}
        self._place = self._places[rank]
        self._store = PrefixStore(f"{PREFIX}/{key}", store.clone())  # type: ignore[attr-defined]
        self._devices = GlooDevices()
        self._group = dist.ProcessGroup(self._store, self._place, len(members))
        try:
            put_gloo_under(
                self._group,
                self._devices,
                self._store,
                ranks=members,
                rank=self._place,
                name=key,
                timeout=timeout / PAIR_TIMEOUTS,  # each message has a limit of its own
                within=timeout,
                lazy=True,
                device_types=["cpu"],
            )
        except NotJoined as error:
            self.close(failed=True)
            raise ExchangeError(f"the ranks did not connect ({first_line(error)})") from error

    def staging(self, tensors: Sequence[Tensor]) -> torch.device:
        return torch.device("cpu")

    def together(self, device: torch.device) -> bool:
        return False

    def start(self, row: Sequence[PendingMessage]) -> None:
        start_each(self._group, self._places, row)

    def close(self, failed: bool) -> None:
        if failed:
            self._devices.cut()
        else:  # all members have connected, and read it no more
            delete_address(self._store, self._place)
        self._devices.release()
        del self._group


class NcclGroup:
    """An NCCL communicator of its own, outside of torch's registries, between the GPUs of the ranks' tensors."""

    def __init__(
        self, store: Store, key: str, members: Sequence[int], rank: int, timeout: timedelta, device: torch.device
    ) -> None:
        if device.type != "cuda":
            raise PlanError(
                f"the tensors of rank {rank} are on {device}, and NCCL moves what is on GPUs; move them there, or "
                "connect with GlooGroup",
                rank=rank,
            )
        self._places = {member: place for place, member in enumerate(members)}
        self._place, self._device = self._places[rank], device
        part = PrefixStore(f"{PREFIX}/{key}", store.clone())  # type: ignore[attr-defined]
        try:
            self._made = Communicator(part, self._place, len(members), name=key, limit=timeout, device=device)
        except NotJoined as error:
            raise ExchangeError(f"the ranks did not connect ({first_line(error)})") from error

    def staging(self, tensors: Sequence[Tensor]) -> torch.device:
        return self._device

    def together(self, device: torch.device) -> bool:
        return True

    def start(self, row: Sequence[PendingMessage]) -> None:
        calls = [(one.tensor, self._places[one.message.peer], one.sending) for one in row]
        for batch in batches([call[1:] for call in calls], self._place, len(self._places)):
            work = self._made.start([calls[number] for number in batch])
            for number in batch:
                row[number].work = work

    def close(self, failed: bool) -> None:
        self._made.close()


# A request of an engine: the version of a ``run`` that it has, and the group over which it receives the next.
# The answer: the group of a version, whose changes are those ``since`` another one.
Request = dict[str, Any]
Served = dict[str, Any]


class Member:
    """One rank of either side, as it reaches the other: through the store ``at``, and over the group of an engine."""

    def __init__(self, at: Store | tuple[str, int], connect: Connect, side: Side) -> None:
        self._at, self._connect, self.side, self.moves = at, connect, side, side.layouts.direct
        self._job_key = JobKey.of_environment()
        self._channel: BoundedChannel | None = None

    @cached_property
    def _store(self) -> Store:
        """The store that trainer and engines share."""
        longest_message(self.moves, self.side.budget)  # which refuses a budget that is too small
        if isinstance(self._at, Store):
            return self._at
        host, port = self._at
        serves = self.side.rank == self.side.layouts.trainer_ranks[0]
        try:
            return open_at(host, port, self.side.timeout, serves=serves)
        except ConnectError as error:
            raise ConnectError(
                f"no store of a trainer answers at {host}:{port} ({first_line(error)}); start the trainer, whose rank "
                f"0 serves it, within {self.side.timeout.total_seconds():g} s",
                address=self._at,
            ) from error

    def reach(self) -> BoundedChannel:
        """Return the channel to the other side; ``ConnectError`` if its store does not answer."""
        self._channel = self._channel or BoundedChannel(StoreChannel(self._store, PREFIX))
        return self._channel

    @property
    def serves(self) -> bool:
        """Return whether this rank, the trainer's first one, serves a store that ends with it."""
        return self.side.is_first and not isinstance(self._at, Store)

    def ask(self, call: Callable[[StoreChannel], _Result]) -> _Result:
        """Return the result of a call of the shared store. Raises ``StoreLost`` where it does not answer."""
        try:
            return self.reach().ask(call)
        except ChannelLost as error:
            raise StoreLost(
                f"the store that trainer and engines share does not answer ({error}); the trainer's rank 0, which "
                "serves it, is gone or unreachable; look at its log"
            ) from error

    def sealed(self, name: str, text: str) -> str:
        """Return a text to write under a name, behind its authentication code where there is a job key."""
        return text if self._job_key is None else f"{self._job_key.of_use(f'sync {name}').tag(text.encode())} {text}"

    def unsealed(self, name: str, text: str) -> Any:
        """Return the data of a text that was read under a name; ``AgreementError`` if it is not of the job key."""
        tag, _, sealed = text.partition(" ")
        if self._job_key is not None and not self._job_key.of_use(f"sync {name}").is_tag(tag, sealed.encode()):
            raise AgreementError(f"{name!r} in the store of a sync was not written with the job key; {_SAME_KEY}")
        try:
            return json.loads(text if self._job_key is None else sealed)
        except ValueError as error:
            raise AgreementError(f"{name!r} in the store of a sync is not JSON; {_SAME_KEY}") from error

    def put(self, key: str, text: str) -> None:
        """Write a text for the other side."""
        self.ask(lambda channel: channel.write(key, self.sealed(key, text)))

    def connected(self, key: str) -> Group:
        """Return the transport of this name, once all its members have connected."""
        members, side = (*ranks_of(self.moves.source), *ranks_of(self.moves.target)), self.side
        make = partial(self._connect, self._store, key, members, side.rank, side.timeout, side.weights.device)
        return answered_within(submit(make, "rankmesh-sync"), side.timeout.total_seconds() + _MOMENT)

    def schedule(self, delta: Delta | None, budget: int) -> MessageSchedule:
        """Return the messages that carry what a delta has changed."""
        longest = longest_message(self.moves, budget)
        # An engine receives into its staging whatever is joined, so a box of any size is copied once, by the trainer.
        if delta is None:
            return schedule_of(self.moves, self.side.rank, longest, longest)
        return schedule(self.moves, restricted(self.moves.of(self.side.rank), delta), longest, longest)


def _all_requests(channel: StoreChannel) -> dict[str, str | None]:
    listed = {text for texts in channel.posted("engines").values() for text in texts}
    return {engine: channel.read(f"request/{engine}") for engine in sorted(listed)}


class Publisher(Member):
    """A trainer rank that sends; the first version waits for ``least`` engines."""

    def __init__(self, at: Store | tuple[str, int], connect: Connect, least: int, side: Side) -> None:
        super().__init__(at, connect, side)
        self._least, self.memory = least, 0
        self._history = History()
        self._groups: dict[str, tuple[str, Group]] = {}
        self._served: dict[str, int] = {}  # the last request of each engine that was served
        self._expected: set[str] = set()  # engines that took the last version
        self._ignored: set[str] = set()  # requests that are not of the job key

    def publish(self, given: Given) -> dict[str, str]:
        """Send a version to the engines that one rank chooses, on a thread for each."""
        return self._send_all(json.loads(self.side.published(given, self._history, self._write, self._announce)))

    def _write(self) -> str:
        """Reach the store, and return the groups that this rank has, for the coordinator."""
        self.reach()
        return json.dumps({engine: key for engine, (key, _) in self._groups.items()})

    def _announce(self, texts: Mapping[int, str]) -> str:
        """Choose the engines that get the newest version, and write to them."""
        groups_of = [json.loads(text) for text in texts.values()]
        served: dict[str, Served] = {}
        found = self._requests()
        budget = self.side.budget // max(1, len(found))
        for engine, request in found.items():
            key = request["group"]
            if not key or any(groups.get(engine) != key for groups in groups_of):
                key = f"{engine}-{request['number']}"
            since = request["version"] if request["run"] == self.side.id else None
            served[engine] = {"group": key, "since": since, "number": request["number"], "budget": budget}
            history = {"history": self._history.to_data(), "version": self._history.newest}
            go = {**served[engine], "run": self.side.id, **history}
            self.put(f"go/{engine}/{request['number']}", json.dumps(go))
        return json.dumps(served)

    def _requests(self) -> dict[str, Request]:
        """Wait for requests, and return those that are not served yet, by engine."""
        end, pause = time.monotonic() + self.side.timeout.total_seconds(), _PAUSE
        digest = self.moves.digest
        while True:
            there = dict(self._read(self.ask(_all_requests)))
            for engine in [engine for engine, one in there.items() if one["digest"] != digest]:
                refused = {"refused": digest}
                self.put(f"go/{engine}/{there.pop(engine)['number']}", json.dumps(refused))
            found = {engine: one for engine, one in there.items() if one["number"] != self._served.get(engine)}
            awaited = [engine for engine in self._expected if engine in there and engine not in found]
            if (not awaited and len(found) >= (0 if self._served else self._least)) or time.monotonic() >= end:
                return found
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, texts: Mapping[str, str | None]) -> Iterator[tuple[str, Request]]:
        """Yield the requests by engine; one that is not of the job key is ignored, and logged once."""
        for engine, text in texts.items():
            try:
                if text and text not in self._ignored:
                    yield engine, self.unsealed(f"request/{engine}", text)
            except AgreementError as error:  # noqa: PERF203  - the others go on
                self._ignored.add(str(text))
                _log.warning("rankmesh: an engine is ignored: %s", error)

    def _send_all(self, served: Mapping[str, Served]) -> dict[str, str]:
        """Send the newest version to these engines; return why it did not reach an engine, by engine."""
        self.memory, device = 0, self.side.weights.device
        if device.type == "cuda":  # what this thread has given the GPU is done before other threads send it
            torch.cuda.current_stream(device).synchronize()
        for engine in self._groups.keys() - served.keys():
            self._drop(engine, failed=False)
        self._served.update({engine: one["number"] for engine, one in served.items()})
        self._expected = set(served)
        interrupted = threading.Event()
        sending = {
            engine: submit(partial(self._send, engine, one, interrupted), "rankmesh-sync")
            for engine, one in served.items()
        }
        failed: dict[str, str] = {}
        try:
            wait(sending.values())
        except BaseException:
            # Nobody waits for the messages any more: without their connections the threads end, and make no others.
            interrupted.set()
            for engine in served:
                self._drop(engine, failed=True)
            raise
        for engine, sent in sending.items():
            if (error := sent.exception()) is not None:  # whatever it is, the other engines go on
                failed[engine] = first_line(error)
                self._drop(engine, failed=True)
                self._expected.discard(engine)
        return failed

    def _send(self, engine: str, one: Served, interrupted: threading.Event) -> None:
        if self._groups.get(engine, ("", None))[0] != one["group"]:
            if interrupted.is_set():
                raise ExchangeError("publish() was interrupted")
            self._drop(engine, failed=True)
            self._groups[engine] = one["group"], self.connected(one["group"])
        tensors = {name: local(tensor) for name, tensor in self.side.weights.tensors.items()}
        exchange = Exchange(self._groups[engine][1], tensors, {}, self.side.timeout)
        exchange.all(self.schedule(self._history.since(one["since"]), one["budget"]))
        self.memory += exchange.memory

    def _drop(self, engine: str, *, failed: bool) -> None:
        _, group = self._groups.pop(engine, ("", None))
        if group is not None:
            group.close(failed)

    def close(self) -> None:
        """End all groups."""
        for engine in list(self._groups):
            self._drop(engine, failed=False)
        with suppress(RuntimeError):
            keys = [f"go/{engine}/{number}" for engine, number in self._served.items()]
            self.ask(lambda channel: channel.delete(["engines", *keys, *(f"request/{e}" for e in self._served)]))
        # The rank that serves the store leaves last: others may still be sending the last version.
        side = self.side
        end = Round(StoreChannel(side.store), f"sync/{side.id}", side.ranks, side.rank, self.serves, epoch=0)
        end.leave(Outcome(), stay=True, all_read=True)


class Requester(Member):
    """One rank of an engine that asks, and receives beside the weights in use."""

    def __init__(self, at: Store | tuple[str, int], connect: Connect, side: Side) -> None:
        super().__init__(at, connect, side)
        self.memory = 0
        self._number, self._key = 0, ""
        self._group: Group | None = None
        self._staging: Tensor | None = torch.empty(0, dtype=torch.uint8)
        self._in_use: tuple[str, int | None] = ("", None)
        self._is_asked = False

    def take(self, end: float) -> int | None:
        """Ask, receive, and change to what all ranks of this engine have received."""
        if not self._is_asked:

            def enter() -> tuple[Mapping[str, object], str]:
                self.reach()
                return {"ask": ""}, ""

            self.side.agreed("ask", enter, lambda _: self._ask())
            self._is_asked = True
        announced, agreement = self.side.newest(lambda: self._await_version(end), last=False)
        if announced is None:
            return None
        failure, exchange = None, None
        try:
            exchange = self.receive(announced)
        except Exception as error:  # noqa: BLE001  - whatever it is, the other ranks must know
            failure = error if isinstance(error, ExchangeError) else ExchangeError(in_one_line(error))
            self._drop(failed=True)
        outcome = agreement.end(failure)
        self._is_asked = False
        self._answered(announced, whole=outcome.agreed)
        if not outcome.agreed or exchange is None:
            raise TransferError(
                f"version {announced.version} did not arrive whole, since {outcome.message}; the weights in use have "
                f"version {self.side.weights.version}; receive() asks for the next one",
                ranks=outcome.ranks,
                version=announced.version,
            )
        with self.side.weights.changed(announced.version):
            return exchange.unpack()

    def _ask(self) -> str:
        """Ask the trainer for the next version, as one rank does for all."""
        key = f"request/{self.side.id}"
        run, version = self._in_use
        digest = self.moves.digest
        request = {"number": self._number, "version": version, "run": run, "group": self._key, "digest": digest}
        text = self.sealed(key, json.dumps(request))

        def ask(channel: StoreChannel) -> None:
            listed = channel.read(key) is not None
            channel.write(key, text)
            if not listed:
                channel.post("engines", 0, self.side.id)

        self.ask(ask)
        return ""

    def _await_version(self, end: float) -> Announced | None:
        """Return the trainer's answer; None at ``end`` (``monotonic``), when the request remains."""
        key = f"go/{self.side.id}/{self._number}"
        while True:
            left = max(0.0, end - time.monotonic())
            text = self.ask(
                lambda channel: channel.read(key) if channel.wait(key, min(left, _SLICE)) else None  # noqa: B023
            )
            if text is not None or not left:
                break
        if text is None:
            return None
        go = self.unsealed(key, text)
        if "refused" in go:
            raise other_layouts(go["refused"])
        changed = History(go["history"]).since(go["since"])
        return Announced(str(go["run"]), int(go["version"]), str(go["group"]), changed, int(go["budget"]))

    def receive(self, announced: Announced) -> Exchange:
        """Receive what changed into the staging. Raises ``ExchangeError``."""
        if self._key != announced.of or self._group is None:
            self._drop(failed=True)
            self._group = self.connected(announced.of)
            self._key = announced.of
        steps = self.schedule(announced.delta, announced.budget)
        into = {name: local(tensor) for name, tensor in self.side.weights.tensors.items()}
        exchange = Exchange(self._group, {}, into, self.side.timeout, staging=self._staging)
        exchange.all(steps)
        self._staging, self.memory = exchange.staging, exchange.memory
        return exchange

    def _answered(self, announced: Announced, *, whole: bool) -> None:
        """End the request: all ranks have the version, or none; one rank deletes the answer."""
        if self.side.is_first:
            key = f"go/{self.side.id}/{self._number}"
            with suppress(RuntimeError):
                self.ask(lambda channel: channel.delete([key]))
        self._number += 1
        if whole:
            self._in_use = announced.run, announced.version
        else:
            self._drop(failed=True)

    def _drop(self, *, failed: bool) -> None:
        """End the group; the next request is for another one."""
        if self._group is not None:
            self._group.close(failed)
        self._key, self._group = "", None

    def close(self) -> None:
        """Withdraw the request, and end the group."""
        self._drop(failed=False)
        keys = [f"request/{self.side.id}", f"go/{self.side.id}/{self._number}"]
        with suppress(RuntimeError):
            self.ask(lambda channel: channel.delete(keys))
