"""Heartbeats: replies, silence and closed connections are told apart; hostile data ends nothing."""

import errno
import socket
import threading
import time

import pytest

from rankmesh.survival.heartbeat import PING, Heartbeat, exchange


@pytest.fixture
def heartbeat():
    """A process that replies with what it got."""
    made = Heartbeat("127.0.0.1", lambda message: {"got": message})
    yield made
    made.close()


def _at(port):
    return ("127.0.0.1", port)


@pytest.fixture
def stalled():
    """A port that accepts and says nothing, as of a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_who_replies_is_alive(heartbeat, stalled):
    """Members that reply, that say nothing, and whose port is closed, all asked at the same time."""
    addresses = {1: _at(heartbeat.port), 2: _at(stalled), 3: _at(_closed())}
    started = time.monotonic()
    replies = exchange(addresses, {"what": "ping"}, 0.3)
    assert replies == {1: {"got": PING}, 2: "unresponsive", 3: "gone"}
    assert time.monotonic() - started < 5


def test_many_at_once(heartbeat):
    """600 members, more than are asked at a time; a long message arrives whole."""
    message = {"what": "end", "members": list(range(20_000))}
    replies = exchange(dict.fromkeys(range(600), _at(heartbeat.port)), {"what": "ping"}, 30)
    assert replies == {key: {"got": PING} for key in range(600)}
    assert exchange({1: _at(heartbeat.port)}, message, 30) == {1: {"got": message}}


@pytest.mark.parametrize(
    "data", [b"\xff\x00\n", b"[1]\n", b"{" * 100_000 + b"\n", b"x" * (2 << 20), b'{"what":\n', b""]
)
def test_hostile_data_ends_its_own_connection(heartbeat, data):
    """What is no message closes the connection that it came by; others get replies."""
    with socket.create_connection(_at(heartbeat.port)) as one:
        one.settimeout(10)
        try:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            assert one.recv(100) == b""
        except OSError as error:
            # What was not read ends the connection with a reset, before shutdown or during recv.
            assert isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN  # noqa: PT017 - may not occur
        assert exchange({1: _at(heartbeat.port)}, PING, 10) == {1: {"got": PING}}


def _noticed(address, timeout):
    """What a watch of an address finds, and after how many seconds."""
    watcher, found, event = Heartbeat("127.0.0.1", dict), [], threading.Event()
    late = []
    started = time.monotonic()

    def lost(presence):
        found.append(presence)
        event.set()

    watcher.watch(address, timeout, lambda: late.append(time.monotonic() - started), lost)
    event.wait(20)
    watcher.close()
    return found, time.monotonic() - started, late


def test_a_process_that_is_gone_is_noticed_at_once(heartbeat):
    """Its connection closes, long before the timeout."""
    timer = threading.Timer(0.3, heartbeat.close)
    timer.start()
    found, seconds, late = _noticed(_at(heartbeat.port), 60)
    timer.join()
    assert (found, late) == (["gone"], [])
    assert seconds < 10


def test_an_unresponsive_process_is_noticed_after_the_timeout(stalled):
    """And a little earlier there is a warning."""
    found, seconds, late = _noticed(_at(stalled), 1.0)
    assert found == ["unresponsive"]
    assert seconds >= 1.0
    assert 0.7 <= late[0] < seconds


def test_a_watch_that_is_ended_finds_nothing(stalled):
    """A member watches another one instead."""
    watcher, found = Heartbeat("127.0.0.1", dict), []
    watcher.watch(_at(stalled), 0.3, lambda: None, found.append)
    watcher.unwatch()
    time.sleep(0.8)
    watcher.close()
    assert found == []


def test_how_long_it_stood_still(heartbeat):
    """Seconds without a look at its connections, beyond those that it sleeps; counted anew on request."""
    assert heartbeat.stood_still() <= 0.5
    heartbeat._longest = 3.0
    assert heartbeat.stood_still() == 3.0
    heartbeat.start_over()
    assert heartbeat.stood_still() <= 0.5


def test_a_host_to_which_no_route_leads_shows_nothing():
    """A network that is down refuses at once, on this host: the process at the other end may live."""
    assert exchange({3: ("255.255.255.255", 9)}, PING, 1.0) == {3: "unresponsive"}
