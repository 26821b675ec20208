"""Gloo's process groups, made by their members: devices, and addresses in the store.

```
eager connection   up to 16 members        one device for all such groups, all pairs connect when the group is made
lazy connection    more, or a lazy group   a device each, pairs connect when they first talk
```
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.protocol import NotJoined
from rankmesh.rendezvous.channel import PATIENCE, ChannelLost
from rankmesh.rendezvous.waiting import answered_within, submit, wait_for

if TYPE_CHECKING:
    from rankmesh.backend.cut import Drain

__all__ = ["EAGER_SIZE", "PAIR_TIMEOUTS", "GlooDevices", "delete_address", "put_gloo_under"]

_Made = TypeVar("_Made")

# Groups up to this size connect all pairs when they are made; docs/decisions.md has the figures.
EAGER_SIZE = 16
# Gloo waits so many times as long for a pair to connect as a call of its group may take.
PAIR_TIMEOUTS = 5


class GlooDevices:
    """The devices of one world; ``drain`` reads on when their connections are cut.

    ``published`` has what gloo has written into the store, one value for each device: it contains the address.

    Groups that connect eagerly share a device. One that connects lazily needs its own: pairs then find each other by a
    number that counts inside one group, so two groups on one device would answer each other's calls.
    """

    def __init__(self, drain: Drain | None = None) -> None:
        # Gloo asks for it whenever it connects a group: it then reads the addresses of all members with one operation.
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
        self.drain, self.published = drain, set[bytes]()
        self.next_cut: Future[None] = Future()
        self._shared: list[c10d.ProcessGroupGloo.Device] = []
        self._cutting = threading.Lock()

    def of(self, *, lazily: bool) -> tuple[list[c10d.ProcessGroupGloo.Device], bool]:
        """Return the devices for one more group, and whether they are new."""
        if not lazily and self._shared:
            return self._shared, False
        # On the interfaces that GLOO_SOCKET_IFNAME names, as for the world; else where the host's name points.
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        gloo = c10d.ProcessGroupGloo
        made = [gloo.create_device(interface=name, lazy_init=lazily) for name in named]
        return made or [gloo.create_default_device(lazy_init=lazily)], True

    def keep(self, made: list[c10d.ProcessGroupGloo.Device], addresses: Iterable[bytes], *, lazily: bool) -> None:
        """Keep new devices at the addresses that gloo has published."""
        self.published.update(addresses)
        self._shared = self._shared if lazily else made

    def cut(self) -> None:
        """Have every call on these devices return, with an error where it waits for a member."""
        from rankmesh.backend.cut import Drain, cut

        with self._cutting:
            begun, self.next_cut = self.next_cut, Future()
            begun.set_result(None)
            self.drain = self.drain or Drain()
            cut(self.published, self.drain)

    def finish_cut(self) -> None:
        """Wait for a cut that another thread makes: groups are only destroyed after it."""
        with self._cutting:
            pass

    def release(self) -> None:
        """Keep no device; each ends with the last group on it."""
        self._shared = []
        self.published.clear()


def put_gloo_under(
    pg: dist.ProcessGroup,
    devices: GlooDevices,
    store: Store,
    *,
    ranks: Sequence[int],
    rank: int,
    name: str,
    timeout: timedelta,
    within: timedelta,
    eager_size: int | None = None,
    lazy: bool,
    device_types: Sequence[str],
) -> c10d.ProcessGroupGloo:
    """Put gloo under a process group, whose pairs connect now or when they first talk; the backend that was made.

    ``within`` is how long members that connect now, or that request a ``lazy`` group, wait for each other. Members of a
    group of more than ``eager_size`` connect at their first message, for which gloo waits up to ``PAIR_TIMEOUTS`` times
    ``timeout``. Raises ``NotJoined`` when a member does not join.
    """
    end = time.monotonic() + within.total_seconds()
    lazily = lazy or len(ranks) > (eager_size or EAGER_SIZE)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    of_group, is_new = devices.of(lazily=lazily)
    options._devices, options._threads = of_group, 1
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    addresses, cut = _addresses(store), devices.next_cut

    def make() -> c10d.ProcessGroupGloo:
        made = c10d.ProcessGroupGloo(addresses, rank, len(ranks), options)
        if is_new:
            published = [addresses.get(f"{number}/{rank}") for number in range(len(of_group))]
            devices.keep(of_group, published, lazily=lazily)
        return made

    try:
        with _limited(store, within):
            # On a thread, which is left behind where a member has died meanwhile: gloo waits PAIR_TIMEOUTS for it, and
            # its address is not known yet to who cuts its connections.
            made = answered_within(submit(make, "rankmesh-gloo"), within.total_seconds(), unless=cut)
        keys = [f"0/{position}" for position in range(len(ranks))]
        left = max(end - time.monotonic(), 0.0)
        # So that one that never comes is named here, not at some later collective.
        if lazy and not _asked(partial(wait_for, addresses, keys, left), left):
            raise NotJoined(f"not all of its members asked for it within {within.total_seconds():.3g} s", ())
    except ChannelLost as error:
        limit = "before it was aborted" if cut.done() else f"within {within.total_seconds():.3g} s"
        reason = f"not all of its members have connected {limit}"
        raise NotJoined(reason, _seen(addresses, ranks)) from error
    except RuntimeError as error:
        raise NotJoined(str(error), _seen(addresses, ranks)) from error
    made._set_default_timeout(timeout)
    for device_type in device_types:
        pg._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, made)
    return made


def _addresses(store: Store) -> Store:
    """Keys of the members' addresses, in the group's part of the world's store."""
    return PrefixStore("gloo/", store)


@contextmanager
def _limited(store: Any, within: timedelta) -> Iterator[None]:
    """Let a store wait for the addresses of all members no longer than this; it has one limit for all its calls."""
    before = store.timeout
    store.set_timeout(within)
    try:
        yield
    finally:
        store.set_timeout(before)


def _seen(addresses: Store, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the members whose addresses are in the store; none where the store does not answer."""
    try:
        return _asked(lambda: tuple(rank for place, rank in enumerate(ranks) if addresses.check([f"0/{place}"])))
    except RuntimeError:
        return ()


def delete_address(store: Store, position: int) -> bool:
    """Delete the address under which a member of a gloo group was found; whether the store answered."""
    try:
        _asked(lambda: _addresses(store).delete_key(f"0/{position}"))
    except RuntimeError:
        return False
    return True


def _asked(call: Callable[[], _Made], seconds: float = 0.0) -> _Made:
    """Call a store and return its result; raise ``ChannelLost`` after this many seconds."""
    return answered_within(submit(call, "rankmesh-store"), seconds + PATIENCE)
