"""How members reach each other's stores: by IPv4 where they can, over connections that are there before a loss."""

import socket
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from tests.limits import until
from tests.sockets import holdings
from torch.distributed import TCPStore

from rankmesh.errors import ConnectError
from rankmesh.rendezvous.waiting import Worker
from rankmesh.runtime.served_store import serve_at
from rankmesh.survival import cut_store, peers
from rankmesh.survival.peers import Contact, Peers


def _reached(address, port):
    with suppress(OSError), socket.create_connection((address, port), 10):
        return True
    return False


@pytest.mark.parametrize(
    ("address", "ways"),
    [
        ("127.0.0.1", {"127.0.0.1": True, "127.0.0.2": False, "::1": False}),
        ("::1", {"127.0.0.1": False, "::1": True}),
    ],
)
def test_a_store_is_served_at_its_address_alone(address, ways):
    """No other address of the host; by IPv4, so that torch asks no name server for ::ffff:127.0.0.1."""
    if not _reached_by_ipv6():
        pytest.skip("no IPv6 here")
    served = serve_at(address)
    assert {way: _reached(way, served.port) for way in ways} == ways
    other = TCPStore(address, served.port, is_master=False, wait_for_workers=False)
    served.set("key", "value")
    assert other.get("key") == b"value"


def _reached_by_ipv6():
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.fixture
def member(monkeypatch):
    """A member, which the store of member 0 is reached by, and a list of the connections that it makes."""
    served, made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    connect = peers.CutStore

    def connecting(*how):
        made.append(how[1])
        return connect(*how)

    monkeypatch.setattr(peers, "CutStore", connecting)
    one = object.__new__(Peers)
    one.member, one._prepared, one._preparing = 5, {}, Worker("rankmesh-store")
    one._closing, one._announcing = threading.Event(), []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else gets the port meanwhile, and it refuses
        ports = served.port, closed.getsockname()[1]
        one.contacts = {member: Contact("a", "127.0.0.1", 1, port, 0) for member, port in enumerate(ports)}
        yield one, made
    one._prepared.clear()


def test_a_connection_that_was_prepared_is_used(member):
    """Once: the next client is a new connection."""
    one, made = member
    one.prepare([0], 10)
    one.prepare([0], 10)  # it has one
    first, second = one.client(0, 7), one.client(0, 7)
    assert len(made) == 2
    assert first.store.timeout == timedelta(seconds=7)
    first.cut()
    with pytest.raises(RuntimeError):
        first.store.set("key", "value")
    second.store.set("key", "value")


def test_a_connection_that_could_not_be_prepared_is_tried_again(member):
    """A member that does not answer is named, and asked again when there is one to ask."""
    one, _ = member
    one.prepare([0, 1], 0.5)
    with pytest.raises(ConnectError, match="the store of member 1 does not answer"):
        one.client(1, 0.5)
    one.contacts[1] = one.contacts[0]
    one.client(1, 10).store.set("key", "value")


def test_connections_to_others_are_left(member):
    """Those that the next round will not be in; no thread and no socket of them is left."""
    one, _ = member
    before = holdings()
    one.prepare([0], 10)
    one.client(0, 10)
    one.prepare([0], 10)
    one._prepared[0].result(10)
    one.prepare([], 10)
    assert until(lambda: not holdings() - before, 10)


@pytest.mark.long
def test_a_member_that_has_ended_is_not_tried_for_long(member):
    """However long a round may wait: the thread that tries to connect to its store is gone a moment later."""
    one, _ = member
    before = holdings()
    one.prepare([1], 60)
    one._prepared.clear()
    assert until(lambda: not holdings() - before, 15)


def test_a_store_is_cut_by_its_address(monkeypatch):
    """Another thread connects to the same port of another host meanwhile: that connection stays."""
    served, others = serve_at("127.0.0.1"), []
    with socket.create_server(("127.0.0.2", served.port)) as other:

        def connecting(host, port, **how):
            others.append(socket.create_connection(("127.0.0.2", port), 10))
            return TCPStore(host, port, **how)

        monkeypatch.setattr(cut_store, "TCPStore", connecting)
        cut_store.CutStore("127.0.0.1", served.port, timedelta(seconds=10)).cut()
        with other.accept()[0] as there, others[0] as here:
            here.sendall(b"x")
            assert there.recv(1) == b"x"


def test_members_of_this_host_are_known_to_have_ended():
    """The kernel shows it of a process that it had; not of one that it never had, nor of one on another host."""
    one = object.__new__(Peers)
    one.member, one.contacts, one._here = 0, {}, set()
    with socket.create_server(("127.0.0.1", 0)) as mine, socket.create_server(("127.0.0.1", 0)) as ends:
        ports = mine.getsockname()[1], ends.getsockname()[1]
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            never = closed.getsockname()[1]
        one._contact = Contact("a", "127.0.0.1", ports[0], 1, 0)
        there = Contact("a", "192.0.2.1", ports[1], 1, 0)
        ended = Contact("a", "127.0.0.1", 1, 1, ports[1])
        one.admit({0: one._contact, 1: ended, 2: Contact("a", "127.0.0.1", never, 1, 0), 3: there})
        assert one.ended(range(4)) == set()
    assert one.ended(range(4)) == {1}


def test_an_announcement_is_made_until_all_have_replied(member, monkeypatch):
    """A member whose threads have much to do replies to a later attempt; one that has ended is not asked again."""
    one, asked = member[0], []

    def exchange(members, message, seconds):
        asked.append(sorted(members))
        busy = {2: 3, 7: 2}
        late = {who for who in members if len(asked) < busy.get(who, 1)}
        return {who: "gone" if who == 4 else "unresponsive" if who in late else {} for who in members}

    monkeypatch.setattr(one, "exchange", exchange)
    one.announce([1, 2, 4, 7], {"what": "end"}, 60)
    one._announcing[0].join(10)
    assert asked == [[1, 2, 4, 7], [2, 7], [2]]


def test_an_announcement_ends_with_the_member(member, monkeypatch):
    """However long the others would be asked."""
    one, asked = member[0], threading.Event()

    def exchange(members, message, seconds):
        asked.set()
        return dict.fromkeys(members, "unresponsive")

    monkeypatch.setattr(one, "exchange", exchange)
    one.announce([1], {"what": "end"}, 3600)
    assert asked.wait(10)
    one._closing.set()
    one._announcing[0].join(10)
    assert not one._announcing[0].is_alive()
