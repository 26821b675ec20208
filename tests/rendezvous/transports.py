"""Every transport of a round, with participants that are threads, or simulated ranks; and participants that die."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from rankmesh import sim
from rankmesh.backend.default import default_group
from rankmesh.rendezvous import ChannelLost, StoreChannel

TRANSPORTS = ("tcp", "tcp without libuv", "prefix", "file", "hash", "simulated")


class Died(BaseException):
    """A participant that is killed: it does nothing any more."""


class Mortal:
    """What a participant calls, until its ``at``-th call, which it makes and then dies; a count where ``at`` is 0."""

    def __init__(self, inner, at):
        self.inner, self.at, self.calls = inner, at, 0

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def counted(*args, **options):
            if self.at and self.calls >= self.at:
                raise Died
            self.calls += 1
            result = found(*args, **options)
            if self.calls == self.at:
                raise Died
            return result

        return counted


def mortal(channel, at):
    """The same channel, which dies at this operation of its store, or of the channel itself where it has none."""
    if not isinstance(channel, StoreChannel):
        return (dead := Mortal(channel, at)), dead
    dead = channel._store = Mortal(channel._store, at)
    return channel, dead


class LostChannel:
    """A channel that has failed: no call comes through."""

    remote = False

    def __getattr__(self, name):
        def call(*_, **__):
            raise ChannelLost("by the test")

        return call


class Place:
    """Where participants meet by one transport; ``channel()`` is a way there for one of them."""

    def __init__(self, transport, folder):
        self.transport, self.folder = transport, folder
        self._file = str(folder / "store")
        self._served = None
        if transport in ("tcp", "tcp without libuv", "prefix"):
            libuv = transport != "tcp without libuv"
            self._served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
        if transport == "hash":
            self._served = HashStore()

    def channel(self):
        """A way to the place of this participant's own."""
        return StoreChannel(self._store())

    def _store(self):
        if self.transport == "simulated":
            return default_group().store
        if self.transport == "file":
            return FileStore(self._file, 1)
        if self.transport == "hash":
            return self._served
        found = TCPStore("127.0.0.1", self._served.port, is_master=False, wait_for_workers=False)
        return PrefixStore("job", PrefixStore("more", found)) if self.transport == "prefix" else found

    def run(self, program, participants):
        """What ``program(rank, channel)`` returns or raises for each of these, side by side."""
        if self.transport == "simulated":
            size = max(participants) + 1
            answers = sim.run(lambda: _simulated(program, participants, self), size, timeout=60)
            return [answers[rank] for rank in participants]
        # All connections first: the server of a TCPStore may ask DNS for the name of each, for seconds.
        channels = [self.channel() for _ in participants]
        with ThreadPoolExecutor(len(participants)) as threads:
            waits = [
                threads.submit(_answer, program, rank, channel)
                for rank, channel in zip(participants, channels, strict=True)
            ]
            return [wait.result(timeout=60) for wait in waits]

    def left(self):
        """How many keys are left, where the transport can count them: a FileStore counts what it has read."""
        return (self._store().num_keys() or None) if self._served is not None else None


def _simulated(program, participants, place):
    rank = dist.get_rank()
    return _answer(program, rank, place.channel()) if rank in participants else None


def _answer(program, rank, channel):
    try:
        return program(rank, channel)
    except (Exception, Died) as error:  # noqa: BLE001 - given back as what this participant met
        return error
