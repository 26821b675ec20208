"""Peers: how a member reaches the others, from the start of the job to its end.

```
heartbeats     whether another member lives, and short messages
stores         each member serves one, so the death of each costs as much as of any other
```
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.cut import Drain
from rankmesh.backend.nccl import outlive_errors
from rankmesh.errors import ConnectError, first_line, in_words
from rankmesh.launch.job_key import VARIABLE, JobKey
from rankmesh.launch.started import started_by
from rankmesh.rendezvous import Round, StoreChannel
from rankmesh.rendezvous.gather import gather
from rankmesh.rendezvous.waiting import Worker, answered_within, submit
from rankmesh.runtime.devices import capabilities
from rankmesh.runtime.init import device_of, together
from rankmesh.runtime.served_store import is_served, serve_at
from rankmesh.survival.ask import address_of
from rankmesh.survival.cut_store import CutStore
from rankmesh.survival.epoch import Contact, Epoch
from rankmesh.survival.heartbeat import REPLY, Address, Heartbeat, Message, Presence, exchange
from rankmesh.survival.liveness import listens_here
from rankmesh.survival.members import Members
from rankmesh.survival.transport import Connection
from rankmesh.survival.world import EpochWorld, old_keys

__all__ = ["Peers"]

_HERE = "127.0.0.1"
# Seconds that an attempt takes at most, and between two attempts to announce something.
_MOMENT, _SETTLE = 2.0, 0.02
# Seconds that a member has for a reply to a process that joins, and between two questions.
_ASKED, _AGAIN = 2.0, 0.2
# Seconds after which the log says that a process waits to join: as long as members reply, until they change.
_LOGGED = 10.0

_log = logging.getLogger("rankmesh.survival")


class Peers:
    """The other members, which are processes, as this one reaches them.

    ``member`` is this one's number, ``reply`` what it replies to a message, from ``introduce`` on. All members have so
    many ``seconds`` to find each other through the launcher's store.
    """

    def __init__(self, reply: Callable[[Message], Message], seconds: float, join: str | None = None) -> None:
        key = JobKey.of_environment()
        launch = started_by()
        local = capabilities(launch, None)
        self.joined = None if join is None else address_of(join, "join=", key)[0]
        if self.joined is None:
            launch, store, among, decision = together(launch, local, timedelta(seconds=seconds))
            self.backend, self.member = str(decision.backend), launch.rank
        else:
            self.backend, self.member = "nccl" if local.index is not None else "gloo", -1
        outlive_errors(self.backend)
        self.device = device_of(self.backend, local)
        several_hosts = self.joined is not None or launch.local_world_size != launch.world_size
        towards = self.joined[:2] if self.joined else (str(launch.address), launch.port)
        address = _address(*towards) if several_hosts else _HERE
        self._drain = Drain()
        self._announcing: list[threading.Thread] = []
        self._closing = threading.Event()
        self._heartbeat = Heartbeat(address, reply)
        self._server: TCPStore | None
        self._server = served = serve_at(address)
        self.key = ""
        self._prepared: dict[int, Future[CutStore]] = {}
        self._preparing = Worker("rankmesh-store")
        self._contact = Contact(launch.host, address, self._heartbeat.port, served.port, self._heartbeat.liveness)
        self.contacts: dict[int, Contact] = {self.member: self._contact}
        self._here: set[int] = set()  # members whose ports the kernel of this host has had
        self._learn = None
        if self.joined is None:
            among = among or Round(StoreChannel(store, "rankmesh/survive"), "contacts", [0], 0, not is_served())
            self._learn = partial(self._gather, among, seconds, key)
        elif key is not None:
            self._start(key)

    def admit(self, joined: Mapping[int, Contact]) -> None:
        self.contacts.update(joined)
        self._here |= {member for member, contact in joined.items() if self._listens(contact)}

    def _listens(self, contact: Contact) -> bool | None:
        """Return whether the process at a contact lives, by the kernel of this host; None if it is on another host."""
        if contact.address != self._contact.address:
            return None
        return listens_here(contact.address, contact.liveness or contact.heartbeat)

    def ended(self, members: Collection[int]) -> set[int]:
        here = self._here.intersection(members) - {self.member}
        return {member for member in here if self._listens(self.contacts[member]) is False}

    def introduce(self) -> Message | None:
        """Ask the members of a running job until they agree; at the start, gather where all members are.

        Raises ``ConnectError`` if none of them replies, if a rank is missing, or if the ranks have different keys.
        """
        if self.joined is not None:
            return self._ask_to_join(self.joined)
        learn, self._learn = self._learn, None  # nothing else needs the launcher's store
        if learn is not None:
            learn()
        return None

    def _ask_to_join(self, first: Address) -> Message:
        known, log_at = [first], time.monotonic() + _LOGGED
        message = {"what": "join", "contact": vars(self._contact)}
        while True:
            for address in known:
                reply = self._exchange({0: address}, message, _ASKED)[0]
                if not isinstance(reply, dict):
                    continue
                if isinstance(reply.get("welcome"), dict):
                    return dict(reply["welcome"])
                known = [address, *(Address(str(at), int(port)) for at, port in reply.get("members", ()))]
                break
            else:
                raise ConnectError(
                    f"no member of a job with this {VARIABLE} replies at {known[0].host}:{known[0].port}; give join= "
                    f"what job.address is on a rank that lives, and {VARIABLE} what job.key is there",
                    address=known[0][:2],
                )
            if time.monotonic() > log_at:
                log_at = math.inf
                _log.info("rankmesh: %s:%s replies; this process joins when the members change next", *first[:2])
            time.sleep(_AGAIN)

    @property
    def hosts(self) -> Mapping[int, str]:
        return {member: contact.host for member, contact in self.contacts.items()}

    def _start(self, key: JobKey) -> None:
        """Reply to those that have this key, and to nobody else."""
        self.key = key.text
        self._heartbeat_key = key.of_use("heartbeat")
        self._heartbeat.start(self._heartbeat_key)

    def _gather(self, among: Round, seconds: float, key: JobKey | None) -> None:
        """Learn where the others are, and the key of the job, through the launcher's store; every member does."""
        mine = {**vars(self._contact), "key": "" if key is None else key.fingerprint}
        learned = gather(among, mine, _with_key, seconds, "survive()")
        if learned["differs"]:
            raise ConnectError(
                f"{in_words(learned['differs'])} have another {VARIABLE} than rank 0, or one of them has none; set "
                "the same on every rank, or on none",
                rank=self.member,
                ranks=tuple(learned["differs"]),
            )
        self.admit({member: Contact.read(data) for member, data in enumerate(learned["contacts"])})
        self._start(key or JobKey(learned["key"]))

    # -- heartbeats ---------------------------------------------------------------------------------------------

    def exchange(self, members: Collection[int], message: Message, seconds: float) -> Mapping[int, Message | Presence]:
        addresses = {member: self.contacts[member].replies_at for member in members if member != self.member}
        return self._exchange(addresses, message, seconds)

    def _exchange(
        self, addresses: Mapping[int, Address], message: Message, seconds: float
    ) -> dict[int, Message | Presence]:
        return exchange(addresses, self._heartbeat_key, message, seconds)

    def announce(self, members: Collection[int], message: Message, seconds: float) -> None:
        call = partial(self._announce, members, message, time.monotonic() + seconds)
        thread = threading.Thread(target=call, daemon=True, name="rankmesh-announce")
        thread.start()
        self._announcing = [*(one for one in self._announcing if one.is_alive()), thread]

    def _announce(self, members: Collection[int], message: Message, end: float) -> None:
        # Who has much to do replies late, and nothing else tells a spare, or one that is done, of the end of an epoch.
        patience = REPLY
        while True:
            replies = self.exchange(members, message, patience)
            members = [member for member, reply in replies.items() if reply == "unresponsive"]
            patience = min(2 * patience, _MOMENT)
            if not members or time.monotonic() >= end or self._closing.wait(_SETTLE):
                return

    def watch(self, member: int, timeout: float, late: Callable[[], object], lost: Callable[[Presence], None]) -> None:
        self._heartbeat.watch(self.contacts[member].replies_at, timeout, late, lost)

    def stood_still(self) -> float:
        return self._heartbeat.stood_still()

    def start_over(self) -> None:
        self._heartbeat.start_over()

    # -- stores -------------------------------------------------------------------------------------------------

    def client(self, server: int, seconds: float) -> CutStore:
        made = self._prepared.pop(server, None)
        if made is None or (made.done() and made.exception() is not None):
            made = submit(lambda: self._connected(server, seconds), "rankmesh-store")
        try:
            client = answered_within(made, seconds + _MOMENT)
        except RuntimeError as error:
            raise ConnectError(
                f"member {self.member}: the store of member {server} does not answer ({first_line(error)})",
                rank=self.member,
                missing=(server,),
            ) from error
        client.store.set_timeout(timedelta(seconds=seconds))
        return client

    def prepare(self, servers: Collection[int], seconds: float) -> None:
        # Torch asks for the names of both ends of each, which takes seconds where an answer of a name server is lost.
        # A member that has ended has no store, and nothing ends a call that tries to connect to it but its limit.
        limit = min(seconds, _MOMENT)
        self._prepared = {server: made for server, made in self._prepared.items() if server in servers}
        for server in servers:
            if server not in self._prepared:
                self._prepared[server] = self._preparing.submit(partial(self._connected, server, limit))
        self._preparing.close()

    def forget(self, before: int) -> None:
        self._preparing.submit(partial(self._forget, before))
        self._preparing.close()

    def _forget(self, before: int) -> None:
        store = self._server
        if store is not None and hasattr(store, "list_keys"):  # an older torch cannot list them
            for key in old_keys(store.list_keys(), before):
                store.delete_key(key)

    def _connected(self, server: int, seconds: float) -> CutStore:
        contact = self.contacts[server]
        return CutStore(contact.address, contact.store, timedelta(seconds=seconds))

    def world(self, connection: Connection, epoch: Epoch, members: Members, seconds: float) -> EpochWorld:
        return EpochWorld(
            *(connection, epoch, members, self.member),
            backend=self.backend,
            device=self.device,
            seconds=seconds,
            drain=self._drain,
        )

    # -- waiting ------------------------------------------------------------------------------------------------

    def event(self) -> threading.Event:
        return threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def committed(self, step: int) -> None:
        """Nothing: the others learn of it in the round that ends an epoch."""

    def close(self) -> None:
        """Reply no more, watch nobody, and serve no store; the threads of all of it have ended."""
        self._closing.set()
        self._drain.close()
        self._heartbeat.close()
        for thread in self._announcing:
            thread.join()
        self._prepared.clear()
        self._server = None


def _with_key(contacts: list[dict[str, str | int]]) -> dict[str, object]:
    """Return the contacts of the members, and a new key if the launcher handed out none."""
    keys = [contact.pop("key") for contact in contacts]
    differs = [rank for rank, fingerprint in enumerate(keys) if fingerprint != keys[0]]
    return {"contacts": contacts, "differs": differs, "key": "" if any(keys) else JobKey.new().text}


def _address(host: str, port: int) -> str:
    """Return the address of this host on the way to another one, at which the others reach it."""
    family, kind, _, _, place = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing: the kernel chooses the way
        return str(probe.getsockname()[0])
