"""Batches: how many sends and receives one call has, and that calls of different ranks cannot wait for each other."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rankmesh.transfer.live.exchange import batches


@st.composite
def _rounds(draw):
    """A number of ranks, the messages of a round between them in one order, and how many a call may have."""
    size = draw(st.integers(2, 7))
    pair = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] != pair[1])
    return size, draw(st.lists(pair, max_size=60)), draw(st.integers(2, 12))


def _of(rank, messages):
    """Peer and direction of each message of one rank: receives first, as it posts them."""
    receives = [(source, False) for source, target in messages if target == rank]
    return receives + [(target, True) for source, target in messages if source == rank]


@given(_rounds())
def test_batches_are_bounded_and_end(case):
    """Random messages among 2 to 7 ranks: each is in one call, no call is too large, all calls end."""
    size, messages, most = case
    peers = {rank: _of(rank, messages) for rank in range(size)}
    waiting = {}
    for rank, given_ in peers.items():
        found = batches(given_, rank, size, most)
        assert sorted(number for batch in found for number in batch) == list(range(len(given_)))
        assert all(len(batch) <= most for batch in found)
        waiting[rank] = [Counter((given_[number][0], given_[number][1]) for number in batch) for batch in found]
    while any(waiting.values()):
        # A call ends when each of its messages is in the call that the other end is in.
        ended = [rank for rank, calls in waiting.items() if calls and _matched(rank, waiting)]
        assert ended, "every rank waits for one that waits"
        for rank in ended:
            del waiting[rank][0]


def _matched(rank, waiting):
    """Whether the peers of this rank's call are in theirs, or through with them."""
    now = waiting[rank][0]
    return all(
        sum(call[rank, not sending] for call in waiting[peer][1:]) <= _later(rank, peer, sending, waiting)
        for (peer, sending) in now
    )


def _later(rank, peer, sending, waiting):
    """How many messages of this kind this rank itself has in later calls."""
    return sum(call[peer, sending] for call in waiting[rank][1:])


def test_a_round_of_many_messages_is_cut():
    """24,000 messages with one peer, both ways: no call has more than 4,000."""
    found = batches([(1, False)] * 12_000 + [(1, True)] * 12_000, 0, 2)
    assert [len(batch) for batch in found] == [4000] * 6
