"""Strangers: whoever connects without the key of the job ends nothing, delays nothing and learns nothing."""

import json
import logging
import random
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from tests.limits import AT_ONCE, until
from tests.sweeping import ALL

from rankmesh.launch.job_key import JobKey
from rankmesh.survival import listener
from rankmesh.survival.conversation import NONCE, SealedLines, new_nonce
from rankmesh.survival.heartbeat import PING, Address, Heartbeat, exchange

KEY, OTHER = JobKey("the key of the job of these tests"), JobKey("the key of another job of these tests")
END = {"what": "end", "epoch": "0", "over": True, "suspects": [], "evicted": {"1": "by a stranger"}}


class Member:
    """A process that replies, and the messages that it has acted on."""

    def __init__(self):
        self.acted = []
        self.heartbeat = Heartbeat("127.0.0.1", self._reply)
        self.heartbeat.start(KEY)
        self.address = Address("127.0.0.1", self.heartbeat.port)

    def _reply(self, message):
        if message != PING:
            self.acted.append(message)
        return {"epoch": "0"}

    def replies(self, key=KEY, message=PING, seconds=20):
        """What it replies to somebody with a key."""
        return exchange({1: self.address}, key, message, seconds)[1]

    def connect(self):
        """A connection, and the nonce that it began with."""
        one = socket.create_connection(self.address[:2], timeout=20)
        return one, one.recv(NONCE + 1)[:NONCE]


@pytest.fixture
def member():
    """A member of a job."""
    made = Member()
    yield made
    made.heartbeat.close()


@pytest.fixture
def noticed(member):
    """What another member, which watches this one, has found."""
    found, watcher = [], Heartbeat("127.0.0.1", dict)
    watcher.start(KEY)
    watcher.watch(member.address, 20, lambda: found.append("late"), found.append)
    yield found
    watcher.close()


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(END).encode() + b"\n",  # the line that once ended a job
        b"\xff\x00\n",
        b"[1]\n",
        b"{" * 100_000 + b"\n",
        b"x" * (2 << 20),
        b'{"what":\n',
        b"",
        b"\n" * 300,
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_what_has_no_key_ends_its_own_connection_alone(member, caplog, data):
    """It is refused without a reply, and with one line in the log however often it comes; others get replies."""
    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        for _ in range(3):
            one, _ = member.connect()
            with one:
                with suppress(OSError):  # what was not read ends the connection with a reset
                    one.sendall(data)
                    one.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    assert one.recv(100) == b""
                assert member.replies() == {"epoch": "0"}
    assert member.acted == []
    assert [record.args for record in caplog.records] == [("127.0.0.1",)] * any(data)


def test_the_key_of_another_job(member):
    """A member of another job, as behind an address that was used again, is refused; it takes nobody for gone."""
    assert member.replies(OTHER, END, 1.0) == "unresponsive"
    assert member.acted == []
    assert member.replies(KEY, END) == {"epoch": "0"}
    assert member.acted == [END]


def test_a_recorded_connection_cannot_be_played_back(member):
    """Lines that were sent once are refused on another connection, and a second time on their own."""
    one, nonce = member.connect()
    with one:
        lines = SealedLines(KEY, nonce)
        sent = lines.seal(new_nonce().decode()) + lines.seal(END)
        one.sendall(sent)
        assert lines.open(one.recv(1000)) == {"epoch": "0"}
        one.sendall(sent)
        with suppress(ConnectionError):
            assert one.recv(100) == b""
    again, _ = member.connect()
    with again:
        again.sendall(sent)
        with suppress(ConnectionError):
            assert again.recv(100) == b""
    assert member.acted == [END]


def test_a_recorded_member_cannot_be_played_back(member):
    """Whoever sends what a member has sent, to a process that asks again, does not look alive."""
    recorded = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward():
            inner, outer = socket.create_connection(member.address[:2], timeout=20), server.accept()[0]
            with inner, outer:
                recorded.append(inner.recv(NONCE + 1))
                outer.sendall(recorded[0])
                inner.sendall(outer.recv(4096))
                recorded.append(inner.recv(4096))
                outer.sendall(recorded[1])

        def play_back():
            outer = server.accept()[0]
            with outer:
                outer.sendall(recorded[0])
                outer.recv(4096)
                outer.sendall(recorded[1])
                time.sleep(0.2)

        address = Address("127.0.0.1", server.getsockname()[1])
        for serve, expected in ((forward, {"epoch": "0"}), (play_back, "unresponsive")):
            thread = threading.Thread(target=serve)
            thread.start()
            assert exchange({1: address}, KEY, PING, 2.0) == {1: expected}
            thread.join()


def test_clients_that_do_not_read_delay_nobody(member, monkeypatch):
    """Four that ask for long replies and read none: another one gets its reply at once; later they are closed."""
    monkeypatch.setattr(listener, "_READS", 4.0)
    monkeypatch.setattr(Member, "_reply", lambda self, message: {"long": "x" * 500_000})
    slow = Member()
    with ExitStack() as opened:
        for _ in range(4):
            one, nonce = slow.connect()
            opened.enter_context(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            lines = SealedLines(KEY, nonce)
            one.sendall(lines.seal(new_nonce().decode()) + b"".join(lines.seal(PING) for _ in range(20)))
        started = time.monotonic()
        assert len(slow.replies()["long"]) == 500_000
        assert slow.heartbeat.stood_still() < 4.0
        assert time.monotonic() - started < AT_ONCE
        assert until(lambda: len(slow.heartbeat._listener._clients) == 0)
    slow.heartbeat.close()


def test_many_that_say_nothing(member, noticed, monkeypatch):
    """More connections without a word than may wait: the oldest are closed, and a member that pings gets a reply."""
    monkeypatch.setattr(listener, "_UNKNOWN", 20)
    with ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(member.connect()[0])
        assert until(lambda: len(member.heartbeat._listener._clients) <= 22)
        assert member.replies() == {"epoch": "0"}
    assert noticed == []


def test_who_says_nothing_is_closed_in_time(member, monkeypatch):
    """A connection on which nobody shows the key, byte by byte or not at all, is closed after a while."""
    monkeypatch.setattr(listener, "_HELLO", 0.5)
    one, _ = member.connect()
    with one:
        end = time.monotonic() + 20
        with suppress(ConnectionError):
            while time.monotonic() < end:
                one.sendall(b"0")
                time.sleep(0.1)
        assert time.monotonic() < end


def _line(random_, nonce):
    """A line that somebody may send who does not have the key, and knows how those are made that do."""
    kind = random_.randrange(7)
    sealed = SealedLines(OTHER, nonce)
    hello = sealed.seal(new_nonce().decode())
    if kind == 0:
        return random_.randbytes(random_.randrange(1, 300))
    if kind == 1:
        return json.dumps(END).encode() + b"\n"
    if kind == 2:
        return hello + sealed.seal(END)
    if kind == 3:
        return hello[: random_.randrange(len(hello))]  # half a line
    if kind == 4:
        return nonce + b" " + json.dumps(END).encode() + b"\n"
    if kind == 5:
        return b"0" * random_.choice([1, 64, 255, 256, 257, 10_000])
    return b"\n" * random_.randrange(1, 300)


@pytest.mark.parametrize("lines", [3_000, pytest.param(100_000 if ALL else 30_000, marks=pytest.mark.nightly)])
def test_fuzz(member, noticed, lines):
    """Random lines, half lines and lines of other jobs: none is acted on, and a member that pings notices nothing."""
    random_ = random.Random(0)  # noqa: S311  - lines, no secrets
    with ExitStack() as opened:
        for number in range(lines):
            one, nonce = member.connect()
            with suppress(ConnectionError):
                one.sendall(_line(random_, nonce))
            if number % 500 == 0:
                opened.enter_context(one)  # it stays, and says nothing more
                assert member.replies() == {"epoch": "0"}
            else:
                one.close()
    assert member.replies() == {"epoch": "0"}
    assert member.acted == []
    assert noticed == []
