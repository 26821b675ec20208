"""Heartbeats: replies, silence and closed connections are told apart; hostile data ends nothing."""

import ctypes
import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.limits import AT_ONCE, LONG, until
from tests.sockets import descriptors

from rankmesh.launch.job_key import JobKey
from rankmesh.survival import heartbeat as module
from rankmesh.survival.heartbeat import PING, Address, Heartbeat
from rankmesh.survival.liveness import LivenessPort, listens_here

KEY = JobKey("the key of the job of these tests")


def running(reply):
    """A heartbeat that has the key."""
    made = Heartbeat("127.0.0.1", reply)
    made.start(KEY)
    return made


def exchange(addresses, message, seconds, key=KEY):
    """Send a message as a process that has the key."""
    return module.exchange(addresses, key, message, seconds)


@pytest.fixture
def heartbeat():
    """A process that replies with what it got."""
    made = running(lambda message: {"got": message})
    yield made
    made.close()


def _at(port):
    return Address("127.0.0.1", port)


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
    assert time.monotonic() - started < AT_ONCE


def test_many_at_once(heartbeat):
    """600 members, more than are asked at a time; a long message arrives whole."""
    message = {"what": "end", "members": list(range(20_000))}
    replies = exchange(dict.fromkeys(range(600), _at(heartbeat.port)), {"what": "ping"}, 30)
    assert replies == {key: {"got": PING} for key in range(600)}
    assert exchange({1: _at(heartbeat.port)}, message, 30) == {1: {"got": message}}


def test_a_reply_that_fails_is_no_silence(capfd):
    """A program error in a reply is printed; the process replies still."""

    def reply(message):
        raise (KeyError if message == PING else OSError)("a bug")

    one = running(reply)
    try:
        for message in (PING, {"what": "end"}, PING):
            assert exchange({1: _at(one.port)}, message, 10) == {1: {}}
    finally:
        one.close()
    printed = capfd.readouterr().err
    assert printed.count("KeyError: 'a bug'") == 2
    assert "OSError: a bug" in printed


def _noticed(address, timeout):
    """What a watch of an address finds, and after how many seconds."""
    watcher, found, event = running(dict), [], threading.Event()
    late = []
    started = time.monotonic()

    def lost(presence):
        found.append(presence)
        event.set()

    watcher.watch(address, timeout, lambda: late.append(time.monotonic() - started), lost)
    event.wait(LONG)
    watcher.close()
    return found, time.monotonic() - started, late


def test_a_process_that_is_gone_is_noticed_at_once(heartbeat):
    """Its connection closes, long before the timeout."""
    timer = threading.Timer(0.3, heartbeat.close)
    timer.start()
    found, seconds, late = _noticed(_at(heartbeat.port), LONG)
    timer.join()
    assert (found, late) == (["gone"], [])
    assert seconds < AT_ONCE


def test_others_have_a_moment_to_end_a_step(heartbeat, monkeypatch):
    """A process that is gone counts as lost a moment later, and not if it is watched no more by then."""
    monkeypatch.setattr(module, "_SKEW", 0.5)
    watcher, found = running(dict), []
    watcher.watch(_at(heartbeat.port), 60, lambda: None, lambda presence: found.append((presence, time.monotonic())))
    time.sleep(0.2)
    began = time.monotonic()
    heartbeat.close()
    until(lambda: found)
    ((presence, at),) = found
    assert (presence, at - began >= 0.5) == ("gone", True)
    monkeypatch.setattr(module, "_SKEW", 3.0)
    watcher.watch(_at(heartbeat.port), 60, lambda: None, found.append)  # its port is closed
    time.sleep(0.1)
    watcher.unwatch()
    time.sleep(3.2)
    watcher.close()
    assert len(found) == 1


def test_an_unresponsive_process_is_noticed_after_the_timeout(stalled):
    """And a little earlier there is a warning."""
    found, seconds, late = _noticed(_at(stalled), 1.0)
    assert found == ["unresponsive"]
    assert seconds >= 1.0
    assert 0.7 <= late[0] < seconds


def test_a_watch_that_is_ended_finds_nothing(stalled):
    """A member watches another one instead."""
    watcher, found = running(dict), []
    watcher.watch(_at(stalled), 0.3, lambda: None, found.append)
    watcher.unwatch()
    time.sleep(0.8)
    watcher.close()
    assert found == []


def test_how_long_it_stood_still(heartbeat):
    """Seconds without a look at its connections, beyond those that it sleeps; counted anew on request."""
    assert heartbeat.stood_still() < AT_ONCE
    heartbeat._longest = 300.0
    assert heartbeat.stood_still() == 300.0
    heartbeat.start_over()
    assert heartbeat.stood_still() < AT_ONCE


def test_a_host_to_which_no_route_leads_shows_nothing():
    """A network that is down refuses at once, on this host: the process at the other end may live."""
    assert exchange({3: Address("255.255.255.255", 9)}, PING, 1.0) == {3: "unresponsive"}


FORKED = """
import os, time
from rankmesh.launch.job_key import JobKey
from rankmesh.survival.heartbeat import Heartbeat

heartbeat = Heartbeat("127.0.0.1", dict)
heartbeat.start(JobKey("the key of the job of these tests"))
if os.fork() == 0:  # as the worker of a DataLoader, which looks only now and then whether its parent lives
    time.sleep(600)
    os._exit(0)
print(heartbeat.port, heartbeat.liveness, flush=True)
time.sleep(600)
"""


def test_a_killed_process_is_gone_while_a_child_of_it_lives():
    """It is noticed at once, and whoever asks finds nobody, though the child has all descriptors of its parent."""
    with subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE) as killed:
        address = Address("127.0.0.1", *map(int, killed.stdout.readline().split()))
        children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text(encoding="utf-8").split()
        try:
            assert listens_here(address.host, address.liveness) is True
            timer = threading.Timer(0.3, killed.kill)
            timer.start()
            found, seconds, _ = _noticed(address, LONG)
            assert exchange({1: address}, PING, AT_ONCE) == {1: "gone"}
            assert listens_here(address.host, address.liveness) is False
            assert listens_here("192.0.2.1", address.liveness) is None  # not an address of this host
            assert (found, Path(f"/proc/{children[0]}").exists()) == (["gone"], True)
            assert seconds < AT_ONCE
        finally:
            for child in children:
                os.kill(int(child), 9)
            killed.kill()


def test_a_liveness_port_is_open_in_no_thread_of_python():
    """Nothing of the process is open in its thread, and it is not open in the process; nothing is left."""
    before, had = sorted(descriptors()), set(Path("/proc/self/task").iterdir())
    one = LivenessPort("127.0.0.1")
    until(lambda: len(set(Path("/proc/self/task").iterdir()) - had) == 1, 10)  # the thread that started it ends
    (task,) = set(Path("/proc/self/task").iterdir()) - had
    assert [path.readlink().name.partition(":")[0] for path in (task / "fd").iterdir()] == ["socket"]
    assert sorted(descriptors()) == before
    assert int(task.name) not in {thread.native_id for thread in threading.enumerate()}
    with socket.create_connection(("127.0.0.1", one.port)) as waits:
        one.close()
        with pytest.raises(ConnectionResetError):
            waits.recv(1)
    one.close()
    until(lambda: not task.exists(), 10)  # joined, a thread is still ending
    assert (sorted(descriptors()), task.exists()) == (before, False)


def test_a_liveness_port_is_looked_at_where_no_reply_comes(stalled):
    """A process that is stopped has an open one; once it is closed, whoever asks hears so before the time is up."""
    one = LivenessPort("127.0.0.1")
    address = Address("127.0.0.1", stalled, one.port)
    assert exchange({1: address}, PING, 0.3) == {1: "unresponsive"}
    one.close()
    started = time.monotonic()
    assert exchange({1: address}, PING, LONG) == {1: "gone"}
    assert time.monotonic() - started < AT_ONCE


def test_a_liveness_port_that_cannot_be_reached_shows_nothing(heartbeat, monkeypatch):
    """Of a process that replies, behind a network that refuses to connect there: it is watched by its replies."""
    begun = module.begun

    def refused(host, port):
        return (socket.socket(), errno.EHOSTUNREACH) if port == 9 else begun(host, port)

    monkeypatch.setattr(module, "begun", refused)
    monkeypatch.setattr(module, "_SLOW", 0.0)
    address = Address("127.0.0.1", heartbeat.port, 9)
    assert exchange({1: address}, PING, 10) == {1: {"got": PING}}
    timer = threading.Timer(1.0, heartbeat.close)
    timer.start()
    found, seconds, _ = _noticed(address, LONG)
    timer.join()
    assert found == ["gone"]
    assert 1.0 <= seconds < AT_ONCE


def test_a_system_that_shares_all_descriptors(monkeypatch):
    """There is no liveness port, and there are the same replies; nothing is left."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    before = sorted(descriptors())
    one = running(dict)
    assert one.liveness == 0
    assert exchange({1: _at(one.port)}, PING, 10) == {1: PING}
    one.close()
    assert exchange({1: _at(one.port)}, PING, 10) == {1: "gone"}
    assert sorted(descriptors()) == before


def test_the_collector_is_as_it_was():
    """Whether garbage is collected is the program's affair, before and after a liveness port is made."""
    gc.disable()
    try:
        LivenessPort("127.0.0.1").close()
        assert not gc.isenabled()
    finally:
        gc.enable()
    LivenessPort("127.0.0.1").close()
    assert gc.isenabled()


def test_what_its_thread_frees_is_closed():
    """Garbage is collected on any thread: a socket that is in it is closed in the process, also by this one."""

    def collects(message):
        gc.collect()
        return message

    one = running(collects)
    gc.collect()  # what other tests have left
    before = sorted(descriptors())
    gc.disable()
    try:
        cycle = list(socket.socketpair())
        cycle.append(cycle)
        del cycle
        assert exchange({1: _at(one.port)}, PING, 10) == {1: PING}
        assert until(lambda: sorted(descriptors()) == before, 10)  # the connection that the message came by
    finally:
        gc.enable()
        one.close()


def test_a_host_that_is_not_this_one():
    """No port is opened at an address of another host; nothing is left."""
    before = sorted(descriptors())
    with pytest.raises(OSError, match="assign"):
        Heartbeat("192.0.2.1", dict)
    assert sorted(descriptors()) == before


def _ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rankmesh-heartbeat")]


def test_no_thread_is_left_after_close(stalled):
    """A thread that ran at the end of the process would free what it holds while Python shuts down."""
    watcher = running(dict)
    for _ in range(3):
        watcher.watch(_at(stalled), 60, lambda: None, lambda _: None)
    watcher.close()
    assert _ours() == []
