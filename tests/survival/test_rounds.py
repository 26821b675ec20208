"""How the members agree where some of them wake, or connect, late: nobody waits for a round that others have left."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from rankmesh.errors import ConnectError
from rankmesh.survival.agreement import EpochEnd, Report
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.members import Members
from rankmesh.survival.rounds import Rounds

TIMEOUT = 1.0
# A member waits for the others for 12 timeouts at most; less than this is soon, on a machine with other work, too.
SOON = 9 * TIMEOUT


@dataclass
class Client:
    """A connection to the store of a member."""

    store: TCPStore


@dataclass
class Job:
    """Members that are threads: ``wakes`` says when one replies that was stopped, ``late`` how long one connects.

    All times are seconds from the beginning. The hosts of members on other ``sides`` refuse connections.
    """

    size: int
    wakes: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[tuple[int, int], float] = field(default_factory=dict)
    sides: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.began = time.monotonic()
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(self.size)]
        self.members = [Peers(self, member) for member in range(self.size)]

    def asleep(self, member):
        """For how many seconds a member is still stopped."""
        return self.wakes.get(member, 0.0) - (time.monotonic() - self.began)

    def agreed(self):
        """The outcome of each member, and the seconds until it had it."""
        threads = [threading.Thread(target=one.agree, daemon=True) for one in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        return [(one.outcome, one.seconds) for one in self.members]


class Peers:
    """The others, as one member reaches them."""

    def __init__(self, job, member):
        self.job, self.member, self.rounds = job, member, Rounds(TIMEOUT)
        self.epoch, self.outcome, self.seconds = Epoch(), None, 0.0
        self.outcomes = {}

    def agree(self):
        """What a member does at the end of an epoch."""
        time.sleep(max(self.job.asleep(self.member), 0.0))
        started, members = self.now(), Members.first("dp=*", world_size=self.job.size, spares=1, shrink="dp")
        stopped = set(self.job.wakes) if self.member not in self.job.wakes else set()
        end = EpochEnd(self.epoch, {0: members}, {}, stopped, ())
        self.outcome = self.rounds.agree(self, end, Report(torn="a collective failed"))
        self.seconds = self.now() - started
        self.outcomes[self.epoch] = self.outcome.text
        self.epoch = self.epoch.after(self.outcome.text)

    def exchange(self, members, message, seconds):
        """The reply of each that replies within so many seconds."""
        end, replies = self.now() + seconds, {}
        for member in members:
            if member != self.member:
                asleep = self.job.asleep(member)
                time.sleep(max(0.0, min(asleep, end - self.now())))
                other = self.job.members[member]
                place, server = str(other.epoch), other.rounds.server
                outcome = other.outcomes.get(Epoch.read(message["epoch"]))
                reply = {"epoch": place, "outcome": outcome, "server": server}
                replies[member] = "unresponsive" if self.job.asleep(member) > 0 else reply
                if self.job.sides.get(member) != self.job.sides.get(self.member):
                    replies[member] = "gone"
        return replies

    def client(self, server, seconds):
        """A connection to the store of a member, late or not."""
        time.sleep(self.job.late.pop((self.member, server), 0.0))
        try:
            limit = timedelta(seconds=seconds)
            return Client(TCPStore("127.0.0.1", self.job.stores[server].port, is_master=False, timeout=limit))
        except RuntimeError as error:
            raise ConnectError("no answer") from error

    @staticmethod
    def ended(members):
        """Nobody has: members stop and wake."""
        return set()

    @staticmethod
    def event():
        """What nobody sets."""
        return threading.Event()

    def stood_still(self):
        """For how long this member was stopped."""
        return self.job.wakes.get(self.member, 0.0)

    @staticmethod
    def now():
        """Seconds."""
        return time.monotonic()


def assert_agreed(job):
    """All have one outcome, by which the job goes on, and nobody waits as long as for one that takes its time."""
    limit = sum(job.late.values()) + max(job.wakes.values(), default=0) + SOON
    outcomes = job.agreed()
    assert len({outcome.text for outcome, _ in outcomes}) == 1
    assert outcomes[0][0].agreed
    assert set(outcomes[0][0].ranks) <= set(job.wakes)
    assert max(seconds for _, seconds in outcomes) < limit


def test_one_connects_to_a_store_whose_member_serves_no_round_any_more():
    """0 wakes and serves a round; 1, which served one until then, is there, and 3 connects to the store of 1."""
    assert_agreed(Job(5, wakes={0: 0.5}, late={(3, 1): 1.2}))


@pytest.mark.long
@settings(max_examples=8)
@given(
    wakes=st.dictionaries(st.sampled_from([0, 1, 4]), st.floats(0.2, 1.5), max_size=1),
    late=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 1)), st.floats(0.1, 1.5), max_size=3),
)
def test_whoever_wakes_and_connects_when(wakes, late):
    """One that is stopped wakes while the others agree, some of which connect to a store late."""
    assert_agreed(Job(5, wakes=wakes, late=late))


@pytest.mark.parametrize(("sides", "on"), [((0, 0, 1, 1), {0, 1}), ((0, 1, 1, 2), {})])
def test_members_without_a_majority_end_soon(sides, on):
    """Hosts that refuse connections are no proof that their members have ended: the others wait for the timeout."""
    job = Job(4, sides=dict(enumerate(sides)))
    outcomes = job.agreed()
    assert {member for member, (outcome, _) in enumerate(outcomes) if outcome.agreed} == set(on)
    assert {outcome.reason for outcome, _ in outcomes if not outcome.agreed} == {"missing"}
    assert all(TIMEOUT < seconds < SOON for outcome, seconds in outcomes if not outcome.agreed)


@pytest.mark.parametrize(("seconds", "ended"), [(2.9, (1,)), (3.0, ())])
def test_a_member_that_stood_still_reports_no_ends(seconds, ended):
    """The others may have gone on without it meanwhile, and what ended since says nothing about this epoch."""
    peers = SimpleNamespace(stood_still=lambda: seconds, ended=lambda _: {1})
    assert Rounds(4.0)._ended(peers, [0, 1]) == ended
