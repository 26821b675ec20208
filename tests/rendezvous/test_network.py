"""Rounds over a network that is cut, and over a store whose server goes away as soon as it may."""

import os
import threading
import time

import pytest
from tests import limits
from tests.rendezvous.link import Link
from torch.distributed import TCPStore

from rankmesh.errors import StoreLost
from rankmesh.rendezvous import Outcome, Proposal, Round, StoreChannel, WaitPolicy
from rankmesh.rendezvous import round as rounds
from rankmesh.rendezvous.gather import or_missing


@pytest.mark.parametrize("moment", ["before it arrives", "while it waits"])
def test_a_cut_network_ends_the_wait_on_both_sides(monkeypatch, moment):
    """3 participants with 2 s of patience, the way of rank 1 to the store is cut: each hears so within its limit."""
    monkeypatch.setattr(rounds, "PATIENCE", 1.0)
    monkeypatch.setattr(rounds, "_MOMENT", 0.5)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = Link(served.port)
    answers, arrived, arrive = {}, threading.Semaphore(0), StoreChannel.arrive

    def arrives(*given):
        found = arrive(*given)
        arrived.release()
        return found

    def joined(rank):
        port = link.port if rank == 1 else served.port
        channel = StoreChannel(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        return Round(channel, "meet", range(4 if moment == "while it waits" else 3), rank)

    def participant(rank, found):
        started = time.monotonic()
        try:
            every = or_missing(lambda _: Outcome(), 2, "meet")
            answers[rank] = found.step("agree", Proposal("same"), every, WaitPolicy(2))
        except StoreLost as error:
            answers[rank] = error
        answers[rank] = answers[rank], time.monotonic() - started

    monkeypatch.setattr(StoreChannel, "arrive", arrives)
    threads = [threading.Thread(target=participant, args=(rank, joined(rank)), daemon=True) for rank in range(3)]
    link.cut = moment == "before it arrives"
    for thread in threads:
        thread.start()
    for _ in threads if moment == "while it waits" else ():
        assert arrived.acquire(timeout=limits.LONG)
    link.cut = True
    for thread in threads:
        thread.join(limits.LONG)
    assert isinstance(answers[1][0], StoreLost), answers
    assert "does not answer" in str(answers[1][0])
    for rank in (0, 2):
        assert answers[rank][0].missing == ((3,) if moment == "while it waits" else (1,)), answers
    assert all(seconds < 2 + limits.AT_ONCE for _, seconds in answers.values()), answers


def _server_reads_first(me, serves):
    """Rank 2 fails; rank 0, which serves the store, ends as soon as it may; rank 1 is slow to read why."""
    found = Round(StoreChannel(me.store), "meet", range(3), me.rank, serves=serves and me.rank == 0)
    if me.rank == 1:
        read = StoreChannel.read
        StoreChannel.read = lambda self, key: time.sleep(0.7) or read(self, key)
    if me.rank == 2:
        time.sleep(0.5)
        outcome = found.conclude("agree", lambda _: Outcome("failed", (2,), message="no more sockets"))
    else:
        outcome = found.step("agree", Proposal(), or_missing(lambda _: Outcome(), 20, "meet"), WaitPolicy(20))
    found.leave(outcome)
    if me.rank == 0:
        os._exit(0)
    return outcome.message


@pytest.mark.few(1)
@pytest.mark.parametrize("serves", [True, False])
def test_who_serves_the_store_leaves_last(outcomes, serves):
    """3 ranks, one of which fails: nobody who was to hear so loses the store instead, if its server is known."""
    _, slow, _ = outcomes(3, _server_reads_first, serves, world=None)
    assert (slow.value == "no more sockets") is serves, slow
