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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.gloo import PAIR_TIMEOUTS, GlooDevices, delete_address, put_gloo_under
from rankmesh.backend.nccl import Communicator
from rankmesh.backend.protocol import NotJoined
from rankmesh.errors import AgreementError, PlanError, StoreLost, first_line
from rankmesh.launch.job_key import VARIABLE, JobKey
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel
from rankmesh.rendezvous.waiting import answered_within, submit
from rankmesh.transfer.live.agreement import ExchangeError
from rankmesh.transfer.live.exchange import Exchange, MessageSchedule, P2PTransport, PendingMessage, batches
from rankmesh.transfer.live.run import longest_message, schedule, schedule_of
from rankmesh.transfer.live.shards import local
from rankmesh.transfer.live.stream import Slices
from rankmesh.transfer.planning.transfer import Transfer
from rankmesh.transfer.sync.delta import Delta, History, restricted
from rankmesh.transfer.sync.layouts import ranks_of

__all__ = ["Announced", "Connect", "GlooGroup", "Group", "NcclGroup", "Publisher", "Requester"]

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
        for one in row:
            call = self._group.send if one.sending else self._group.recv
            one.work = call([one.tensor], self._places[one.message.peer], 0)

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


class Request(TypedDict):
    """A request of an engine: the version of a ``run`` that it has, and the group over which it receives the next."""

    number: int
    version: int | None
    run: str
    group: str
    digest: str


class Served(TypedDict):
    """The answer to a request: the group of a version, whose changes are those ``since`` another one."""

    number: int
    since: int | None
    group: str
    budget: int


@dataclass(eq=False)
class Member:
    """One rank of either side: ``rank`` is its number in the transfer, ``device`` has its tensors.

    It reaches the other side through the ``store``, and sends messages over the group of one engine.
    """

    store: Store
    moves: Transfer
    rank: int
    timeout: timedelta
    budget: int
    connect: Connect
    device: torch.device

    def __post_init__(self) -> None:
        longest_message(self.moves, self.budget)  # which refuses a budget that is too small
        self._channel, self._job_key = BoundedChannel(StoreChannel(self.store, PREFIX)), JobKey.of_environment()

    def ask(self, call: Callable[[StoreChannel], _Result]) -> _Result:
        """Return what a call of the shared store gives. Raises ``StoreLost`` where it does not answer."""
        try:
            return self._channel.ask(call)
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
        members = (*ranks_of(self.moves.source), *ranks_of(self.moves.target))
        make = partial(self.connect, self.store, key, members, self.rank, self.timeout, self.device)
        return answered_within(submit(make, "rankmesh-sync"), self.timeout.total_seconds() + _MOMENT)

    def schedule(self, delta: Delta | None, budget: int) -> MessageSchedule:
        """Return the messages that carry what a delta has changed."""
        longest = longest_message(self.moves, budget)
        if delta is None:
            return schedule_of(self.moves, self.rank, longest)
        return schedule(self.moves, restricted(self.moves.of(self.rank), delta), longest)


def _all_requests(channel: StoreChannel) -> dict[str, str | None]:
    listed = {text for texts in channel.posted("engines").values() for text in texts}
    return {engine: channel.read(f"request/{engine}") for engine in sorted(listed)}


class Publisher:
    """A trainer rank that sends; the first version waits for ``least`` engines. ``run`` names this trainer."""

    def __init__(self, member: Member, tensors: Mapping[str, Tensor], run: str, least: int) -> None:
        self._member, self._tensors, self.run, self._least = member, tensors, run, least
        self.history, self.memory = History(), 0
        self._groups: dict[str, tuple[str, Group]] = {}
        self._served: dict[str, int] = {}  # the last request of each engine that was served
        self._expected: set[str] = set()  # engines that took the last version
        self._ignored: set[str] = set()  # requests that are not of the job key

    def write(self) -> str:
        """Return the groups that this rank has, for the coordinator."""
        return json.dumps({engine: key for engine, (key, _) in self._groups.items()})

    def announce(self, texts: Mapping[int, str]) -> str:
        """Choose the engines that get the newest version, and write to them: one rank does."""
        groups_of = [json.loads(text) for text in texts.values()]
        served: dict[str, Served] = {}
        found = self._requests()
        budget = self._member.budget // max(1, len(found))
        for engine, request in found.items():
            key = request["group"]
            if not key or any(groups.get(engine) != key for groups in groups_of):
                key = f"{engine}-{request['number']}"
            since = request["version"] if request["run"] == self.run else None
            served[engine] = {"group": key, "since": since, "number": request["number"], "budget": budget}
            history = {"history": self.history.to_data(), "version": self.history.newest}
            go = {**served[engine], "run": self.run, **history}
            self._member.put(f"go/{engine}/{request['number']}", json.dumps(go))
        return json.dumps(served)

    def _requests(self) -> dict[str, Request]:
        """Wait for requests, and return those that are not served yet, by engine."""
        end, pause = time.monotonic() + self._member.timeout.total_seconds(), _PAUSE
        digest = self._member.moves.digest
        while True:
            there = dict(self._read(self._member.ask(_all_requests)))
            for engine in [engine for engine, one in there.items() if one["digest"] != digest]:
                refused = {"refused": digest}
                self._member.put(f"go/{engine}/{there.pop(engine)['number']}", json.dumps(refused))
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
                    yield engine, self._member.unsealed(f"request/{engine}", text)
            except AgreementError as error:  # noqa: PERF203  - the others go on
                self._ignored.add(str(text))
                _log.warning("rankmesh: an engine is ignored: %s", error)

    def send(self, value: str) -> dict[str, str]:
        """Send the newest version to the engines that were chosen; return why it did not reach an engine, by engine."""
        served: dict[str, Served] = json.loads(value)
        self.memory = 0
        device = self._member.device
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
            self._groups[engine] = one["group"], self._member.connected(one["group"])
        tensors = {name: local(tensor) for name, tensor in self._tensors.items()}
        exchange = Exchange(self._groups[engine][1], tensors, {}, self._member.timeout)
        exchange.all(self._member.schedule(self.history.since(one["since"]), one["budget"]))
        self.memory += exchange.memory

    def _drop(self, engine: str, *, failed: bool) -> None:
        _, group = self._groups.pop(engine, ("", None))
        if group is not None:
            group.close(failed)

    def discard(self) -> None:
        """Do nothing: nothing was sent."""

    def close(self) -> None:
        """End all groups."""
        for engine in list(self._groups):
            self._drop(engine, failed=False)
        with suppress(RuntimeError):
            keys = [f"go/{engine}/{number}" for engine, number in self._served.items()]
            self._member.ask(
                lambda channel: channel.delete(["engines", *keys, *(f"request/{e}" for e in self._served)])
            )


class Announced:
    """A version that the trainer sends this engine."""

    def __init__(self, go: Mapping[str, Any]) -> None:
        if "refused" in go:
            raise AgreementError(
                f"the trainer publishes another pair of layouts (digest {go['refused'][:12]}); give both sides the "
                "same two layouts",
                digest=go["refused"],
            )
        self.run, self.version, self.group = str(go["run"]), int(go["version"]), str(go["group"])
        self.what = {"version": self.version, "of": self.group}  # what all ranks of the engine must have found
        self.budget = int(go["budget"])
        self.delta = History(go["history"]).since(go["since"])


class Requester:
    """One rank of an engine that asks, and receives; ``engine`` is the engine's id."""

    def __init__(self, member: Member, engine: str) -> None:
        self._member, self.engine, self.memory = member, engine, 0
        self._number, self._key = 0, ""
        self._group: Group | None = None
        self._in_use: tuple[str, int | None] = ("", None)

    def ask(self) -> str:
        """Ask the trainer for the next version, as one rank does for all."""
        key = f"request/{self.engine}"
        run, version = self._in_use
        digest = self._member.moves.digest
        request = Request(number=self._number, version=version, run=run, group=self._key, digest=digest)
        text = self._member.sealed(key, json.dumps(request))

        def ask(channel: StoreChannel) -> None:
            listed = channel.read(key) is not None
            channel.write(key, text)
            if not listed:
                channel.post("engines", 0, self.engine)

        self._member.ask(ask)
        return ""

    def await_version(self, end: float) -> Announced | None:
        """Return the trainer's answer; None at ``end`` (``monotonic``), when the request remains."""
        key = f"go/{self.engine}/{self._number}"
        while True:
            left = max(0.0, end - time.monotonic())
            text = self._member.ask(
                lambda channel: channel.read(key) if channel.wait(key, min(left, _SLICE)) else None  # noqa: B023
            )
            if text is not None or not left:
                return None if text is None else Announced(self._member.unsealed(key, text))

    def fill(self, announced: Announced, into: Mapping[str, Tensor]) -> tuple[int, list[tuple[str, Slices]]]:
        """Receive what changed; return its bytes, and where they are. Raises ``ExchangeError``."""
        if self._key != announced.group or self._group is None:
            self.drop(failed=True)
            self._group = self._member.connected(announced.group)
            self._key = announced.group
        steps = self._member.schedule(announced.delta, announced.budget)
        exchange = Exchange(self._group, {}, into, self._member.timeout)
        exchange.all(steps)
        self.memory = exchange.memory
        pieces = [piece for row in steps.receives for message in row for piece in message.pieces]
        return sum(piece.bytes for piece in pieces), [(piece.name, piece.here) for piece in pieces]

    def answered(self, announced: Announced, *, whole: bool, first: bool) -> None:
        """End the request: all ranks have the version, or none; the ``first`` rank deletes the answer."""
        if first:
            key = f"go/{self.engine}/{self._number}"
            with suppress(RuntimeError):
                self._member.ask(lambda channel: channel.delete([key]))
        self._number += 1
        if whole:
            self._in_use = announced.run, announced.version
        else:
            self.drop(failed=True)

    def drop(self, *, failed: bool) -> None:
        """End the group; the next request is for another one."""
        if self._group is not None:
            self._group.close(failed)
        self._key, self._group = "", None

    def close(self) -> None:
        """Withdraw the request, and end the group."""
        self.drop(failed=False)
        keys = [f"request/{self.engine}", f"go/{self.engine}/{self._number}"]
        with suppress(RuntimeError):
            self._member.ask(lambda channel: channel.delete(keys))
