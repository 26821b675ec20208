"""What is known of members that have not arrived: slow ones are told from those that have stopped."""

from types import SimpleNamespace

import pytest

from rankmesh.survival.epoch import Epoch
from rankmesh.survival.rounds import REPLY, Probe


class _Peers:
    """Members that each reply after so many seconds, on a clock of their own."""

    def __init__(self, **after):
        self.after = {int(name[1:]): seconds for name, seconds in after.items()}
        self.time, self.asked = 0.0, []

    def now(self):
        return self.time

    def exchange(self, members, _, seconds):
        self.asked.append(seconds)
        self.time += min(seconds, max(self.after[member] for member in members))
        return {member: {"epoch": "3"} if self.after[member] <= seconds else "unresponsive" for member in members}


def _probe(peers, suspects=(), timeout=6.0):
    return Probe(peers, Epoch(3), suspects, (), timeout, 0.0)


def test_a_member_that_replies_late_may_arrive():
    """Each of its replies takes a second, as on a host with many processes: it lives, however long the others wait."""
    peers = _Peers(m4=1.0)
    probe = _probe(peers)
    while peers.time < 20:
        assert probe.any_may_arrive([4])
    assert max(peers.asked) <= 1.5


def test_a_member_that_never_replies_does_not_arrive():
    """It has the timeout; once it is known to be unresponsive, nobody waits longer for its replies."""
    peers = _Peers(m4=1e9)
    probe = _probe(peers)
    while probe.any_may_arrive([4]):
        assert peers.time < 6.0 + 1.5
    assert peers.time >= 6.0
    suspect = _Peers(m4=1e9)
    assert not _probe(suspect, suspects=(4,)).any_may_arrive([4])
    assert suspect.asked == [REPLY]


def test_patience_ends_with_what_it_is_for():
    """A member that replies at once again is asked as at first."""
    peers = _Peers(m4=1.0)
    probe = _probe(peers)
    for _ in range(4):
        probe.ask([4])
    peers.after[4] = 0.0
    probe.ask([4])
    probe.ask([4])
    assert peers.asked[-1] == REPLY


@pytest.mark.parametrize(
    ("servers", "expected"),
    [({0: 0}, 0), ({0: None, 4: 2}, 2), ({4: 3}, None), ({4: 5}, None), ({0: "0"}, None), ({0: 1}, None), ({}, None)],
)
def test_who_serves_another_round(servers, expected):
    """Member 3 serves a round: a lower member that serves one too, in this epoch, and is not to be left out."""
    replies = {member: {"epoch": "2", "server": server} for member, server in servers.items()}
    replies |= {7: {"epoch": "1", "server": 0}, 8: "gone"}
    peers = SimpleNamespace(exchange=lambda *_: replies, now=lambda: 0.0)
    probe = Probe(peers, Epoch(2), (), {1: "late"}, 10.0, 0.0)
    probe.ask(list(replies))
    assert probe.lower_server(3) == expected
