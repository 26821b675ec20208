"""Heartbeats: whether a process lives, and short messages between processes, over connections of their own.

```
member 3 ──ping──> member 4        a reply: alive      closed or refused: gone      no reply in time: unresponsive
         <─reply──
```

Each member listens at an address of the job, and a thread replies: a process replies while it computes or waits in a
collective, not while it is stopped. It acts on lines of processes with the key of the job alone (``conversation``).
Nobody waits for a process whose connections are refused, there or at its liveness port. That is no proof that it has
ended: a firewall may refuse, too.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Literal

from rankmesh.errors import ConnectError
from rankmesh.launch.address import family_of
from rankmesh.launch.job_key import JobKey
from rankmesh.survival.conversation import ENDED, Address, Conversation, Message, begun
from rankmesh.survival.listener import LOOK, Listener
from rankmesh.survival.liveness import LivenessPort

__all__ = ["PING", "REPLY", "Address", "Heartbeat", "Message", "Presence", "exchange"]

Presence = Literal["gone", "unresponsive"]

PING: Message = {"what": "ping"}
# Seconds in which a member that lives replies.
REPLY = 0.3
# Seconds without a reply after which the liveness port is looked at: seldom, since nobody accepts what connects there.
# As many lie between two attempts to connect.
_SLOW = 0.05
# Connections that one process opens at a time.
_AT_ONCE = 256
# Of a timeout, and seconds at most: how often a member is pinged.
_SHARE, _SELDOM = 10, 0.5
# Seconds until a process that is gone counts as lost. Others may be about to end a step that it has ended, which they
# can without it: interrupted, all would do that step again.
_SKEW = 0.05


class Heartbeat:
    """This process as others see it: a thread that replies, and one that pings another member.

    It listens at the address ``host`` and replies once it has the key of the job (``start``). ``reply`` is called for
    each message, on the replying thread, and returns the reply at once.
    """

    def __init__(self, host: str, reply: Callable[[Message], Message]) -> None:
        self._reply = reply
        self._key = JobKey.new()  # which nobody has
        self._watches: list[_Watch] = []
        self._looked, self._longest = time.monotonic(), 0.0
        self._over = threading.Event()
        with ExitStack() as made:
            server = socket.create_server((host, 0), family=family_of(host), backlog=1024)
            self._listening = made.enter_context(server)
            self._liveness = LivenessPort(host)
            made.pop_all()
        self.port = int(self._listening.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-heartbeat")

    def start(self, key: JobKey) -> None:
        """Reply from now on to those that have this key."""
        self._key, self._looked = key, time.monotonic()
        self._listener = Listener(self._woken, self._listening, key, self._reply)
        self._thread.start()

    @property
    def liveness(self) -> int:
        """The liveness port of this process, 0 for none."""
        return self._liveness.port

    def stood_still(self) -> float:
        """Return the longest time in seconds that this process gave no reply, since ``start_over``."""
        return max(self._longest, time.monotonic() - self._looked - LOOK)

    def start_over(self) -> None:
        """Count anew how long this process stood still."""
        self._longest = 0.0

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - connections that close would show that the process has ended
            traceback.print_exc()
            self._over.wait()
        finally:
            self._listener.close()

    def _serve(self) -> None:
        going_on = True
        while going_on:
            ready = self._listener.wait()
            self._longest = self.stood_still()
            self._looked = time.monotonic()
            going_on = self._listener.handle(ready)

    def watch(
        self, address: Address, timeout: float, late: Callable[[], object], lost: Callable[[Presence], None]
    ) -> None:
        """Ping the process at an address from now on, instead of the one before; ``lost`` is called at most once.

        ``late`` is called shortly before the end of ``timeout`` seconds without a reply.
        """
        self.unwatch()
        self._watches.append(_Watch(address, self._key, timeout, late, lost))

    def unwatch(self) -> None:
        """Ping nobody."""
        for watch in self._watches:
            watch.stop()
        self._watches = [watch for watch in self._watches if watch.thread.is_alive()]

    def close(self) -> None:
        """Reply no more, and ping nobody: no thread is left. A second call has no effect."""
        self.unwatch()
        if self._over.is_set():
            return
        self._over.set()
        with suppress(OSError):  # it may have ended
            self._wake.send(b".")
        for thread in (self._thread, *(watch.thread for watch in self._watches)):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._watches.clear()
        for one in (self._wake, self._woken, self._listening):
            one.close()
        self._liveness.close()


class _Ended(Exception):
    """The process at the other end has ended, as its ports suggest."""


class _Watch:
    """One member that is pinged, on a thread that ``stop`` ends at once."""

    def __init__(
        self,
        address: Address,
        key: JobKey,
        timeout: float,
        late: Callable[[], object],
        lost: Callable[[Presence], None],
    ) -> None:
        self._address, self._key, self._timeout, self._late, self._lost = address, key, timeout, late, lost
        self._interval = min(timeout / _SHARE, _SELDOM)
        self._replied, self._warned = time.monotonic(), False
        self._stopped = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self.thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-heartbeat-watch")
        self.thread.start()

    def stop(self) -> None:
        """End the watch: from now on it does not call ``lost``."""
        self._stopped.set()
        with suppress(OSError):  # the thread may have ended
            self._wake.send(b".")

    def _run(self) -> None:
        with self._wake, self._woken:
            presence = self._attempt()
            while presence is None and not self._stopped.wait(_SLOW):
                presence = self._attempt()
            if presence == "gone":
                self._stopped.wait(_SKEW)
            if presence is not None and not self._stopped.is_set():
                self._lost(presence)

    def _attempt(self) -> Presence | None:
        """Ping on one connection until it ends; return what that shows, None if nothing or if the watch is stopped."""
        try:
            with _Connected(self._address, self._key, self._woken) as connected:
                while self._answered(connected):
                    self._replied, self._warned = time.monotonic(), False
                    connected.reply(self._replied + self._interval)  # none is owed, but an end shows at once
        except _Ended:
            return "gone"
        except (OSError, ConnectError, ValueError, RecursionError):
            self._warn()  # the network failed, or somebody else replies there
        return "unresponsive" if time.monotonic() >= self._replied + self._timeout else None

    def _answered(self, connected: _Connected) -> bool:
        connected.conversation.request(PING)
        if connected.reply(self._soon) is not None:
            return True
        self._warn()
        return connected.reply(self._replied + self._timeout) is not None

    @property
    def _soon(self) -> float:
        """The time at which ``late`` is called, if no reply comes until then."""
        return self._replied + self._timeout - min(1.0, self._timeout / 4)

    def _warn(self) -> None:
        if not self._warned and not self._stopped.is_set() and time.monotonic() >= self._soon:
            self._warned = True
            self._late()


class _Connected:
    """A conversation with a process, and a connection to its liveness port, if it has one that can be reached."""

    def __init__(self, address: Address, key: JobKey, woken: socket.socket) -> None:
        self._woken, self._liveness = woken, socket.socket()
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.PollSelector())
            self.conversation = opened.enter_context(closing(Conversation(address, key)))
            errors = [self.conversation.error]
            if address.liveness:
                self._liveness, error = begun(address.host, address.liveness)
                errors.append(error)
            opened.enter_context(self._liveness)
            if any(error in ENDED for error in errors):
                raise _Ended
            if self.conversation.error:
                raise OSError(self.conversation.error, os.strerror(self.conversation.error))
            self._selector.register(woken, selectors.EVENT_READ)
            if address.liveness and not error:
                self._selector.register(self._liveness, selectors.EVENT_READ)
            self._selector.register(self.conversation.socket, selectors.EVENT_READ)
            self._opened = opened.pop_all()

    def __enter__(self) -> _Connected:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def reply(self, end: float) -> Message | None:
        """Return the reply that comes until ``end``, None if none comes or the watch is stopped.

        Raises ``_Ended`` if the process ends, ``OSError`` if the connection does without showing that.
        """
        while True:
            self._selector.modify(self.conversation.socket, self.conversation.events)
            ready = [key.fileobj for key, _ in self._selector.select(max(end - time.monotonic(), 0))]
            if self._liveness in ready:
                if _has_ended(self._liveness):
                    raise _Ended
                self._selector.unregister(self._liveness)  # it cannot be reached
            if self.conversation.socket in ready and (reply := self._next_reply()) is not None:
                return reply
            if not ready or self._woken in ready:
                return None

    def _next_reply(self) -> Message | None:
        try:
            return self.conversation.go_on()
        except ConnectionRefusedError:
            raise _Ended from None
        except ConnectionError:
            if self.conversation.replied:
                raise _Ended from None
            raise


def _has_ended(liveness: socket.socket) -> bool:
    """Return whether what came of a connection to a liveness port shows that its process has ended."""
    if error := liveness.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return error in ENDED
    try:
        return not liveness.recv(1)
    except OSError as failed:
        return failed.errno in ENDED


def exchange(
    addresses: Mapping[int, Address], key: JobKey, message: Message, seconds: float
) -> dict[int, Message | Presence]:
    """Send a message to several members at once; return the reply of each within ``seconds``, or why there is none."""
    members, found = list(addresses), dict[int, Message | Presence]()
    for start in range(0, len(members), _AT_ONCE):
        some = {member: addresses[member] for member in members[start : start + _AT_ONCE]}
        with _Exchange(some, key, message, time.monotonic() + seconds) as exchanged:
            found.update(exchanged.replies())
    return found


class _Exchange:
    """One message to several members, until ``end``."""

    def __init__(self, addresses: Mapping[int, Address], key: JobKey, message: Message, end: float) -> None:
        self._addresses, self._end = addresses, end
        self._found: dict[int, Message | Presence] = {}
        self._opened, self._selector = ExitStack(), selectors.PollSelector()
        self._opened.enter_context(self._selector)
        for member, address in addresses.items():
            conversation = self._opened.enter_context(closing(Conversation(address, key)))
            if conversation.error:
                # Another error, such as that no route leads there, shows nothing.
                self._found[member] = "gone" if conversation.error in ENDED else "unresponsive"
                continue
            conversation.request(message)
            self._selector.register(
                conversation.socket, conversation.events, partial(self._go_on, member, conversation)
            )

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def replies(self) -> Mapping[int, Message | Presence]:
        """Wait for the replies, and return them."""
        look_at = time.monotonic() + _SLOW
        while len(self._found) < len(self._addresses) and (now := time.monotonic()) < self._end:
            for ready, _ in self._selector.select(max(min(self._end, look_at) - now, 0)):
                ready.data()
            if time.monotonic() >= look_at:
                look_at = math.inf
                for member in self._addresses.keys() - self._found.keys():
                    self._look(member, self._addresses[member].liveness)
        return {member: self._found.get(member, "unresponsive") for member in self._addresses}

    def _go_on(self, member: int, conversation: Conversation) -> None:
        try:
            reply = conversation.go_on()
            if reply is None:
                key = self._selector.get_key(conversation.socket)
                self._selector.modify(conversation.socket, conversation.events, key.data)
                return
            self._found[member] = reply
        except ConnectionRefusedError:
            self._found.setdefault(member, "gone")
        except ConnectionError:
            # Closed without a reply: the process has ended, or it does not know this one. Its port shows which.
            self._look(member, self._addresses[member].port)
        except (OSError, ConnectError, ValueError, RecursionError):
            self._found.setdefault(member, "unresponsive")
        self._selector.unregister(conversation.socket)

    def _look(self, member: int, port: int) -> None:
        """Look whether a port of a member is still open."""
        if port:
            one, error = begun(self._addresses[member].host, port)
            self._opened.enter_context(one)
            if error in ENDED:
                self._found.setdefault(member, "gone")
            elif not error:
                self._selector.register(one, selectors.EVENT_WRITE, partial(self._looked, member, one))

    def _looked(self, member: int, one: socket.socket) -> None:
        self._selector.unregister(one)
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in ENDED:
            self._found.setdefault(member, "gone")
