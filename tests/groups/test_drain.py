"""What reads connections that an abort cut: senders are through, and it costs little while nothing comes."""

import fcntl
import socket
import sys
import termios
import threading
import time

import pytest
from tests.limits import LONG, until
from tests.sockets import descriptors

from rankmesh.backend import cut as cutting
from rankmesh.backend.cut import Drain

SENT = bytes(16 << 20)


@pytest.fixture
def connected():
    """Two ends of a connection whose kernel buffers are smaller than what is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
    theirs.settimeout(20)
    yield ours, theirs
    theirs.close()
    ours.close()


@pytest.fixture
def drain(monkeypatch):
    """It keeps what it takes for long, as a thread may not run for seconds, and leaves no thread behind."""
    monkeypatch.setattr(cutting, "_KEPT", LONG)
    made = Drain()
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-drain"]


def _cut(one):
    one.shutdown(socket.SHUT_RD)
    return one.dup()


def test_who_sends_is_through(connected, drain):
    """16 MiB on a connection that is cut: all of them are read, which gloo does no more."""
    ours, theirs = connected
    drain.take({"one": _cut(ours)}, set)
    theirs.sendall(SENT)
    time.sleep(0.3)  # nothing comes for a while
    theirs.sendall(SENT)


def _queued(one):
    """Bytes that have come and were not read."""
    return int.from_bytes(fcntl.ioctl(one, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_what_gloo_reads_is_left_to_it(connected, drain):
    """Nothing is taken from a connection before gloo has left it, and then all of it at once."""
    ours, theirs = connected
    gloos = {"one"}
    drain.take({"one": _cut(ours)}, lambda: set(gloos))
    theirs.sendall(bytes(1000))
    time.sleep(0.3)
    assert _queued(ours) == 1000
    gloos.clear()
    assert until(lambda: not _queued(ours))


class _Counted(socket.socket):
    """Counts how often it is read."""

    reads = 0

    def recv_into(self, *given, **named):
        _Counted.reads += 1
        return super().recv_into(*given, **named)


def test_connections_on_which_nothing_comes_cost_nothing(drain):
    """100 of them, which gloo has left: each is read once, not each 20 ms."""
    pairs = [socket.socketpair() for _ in range(100)]
    drain.take({str(number): _Counted(fileno=_cut(ours).detach()) for number, (ours, _) in enumerate(pairs)}, set)
    assert until(lambda: _Counted.reads >= 100)
    time.sleep(1)
    for pair in pairs:
        for one in pair:
            one.close()
    assert 100 <= _Counted.reads <= 300


def test_all_are_closed(connected):
    """After two seconds, or as soon as the drain is closed."""
    before, drain = len(descriptors()), Drain()
    drain.take({"one": _cut(connected[0])}, set)
    drain.take({"two": connected[0].dup()}, lambda: {"two"})
    drain.close()
    assert len(descriptors()) == before
