import threading

import pytest

from rankmesh.sim.baton import Abandoned, Baton, Chooser


def play(size, script, order="deterministic", stuck=None):
    """Run ``script(baton, rank, log)`` on each rank; the log."""
    log = []
    baton = Baton(size, Chooser(order), stuck or (lambda waiting: pytest.fail("stuck")))

    def body(rank):
        baton.await_turn(rank)
        try:
            script(baton, rank, log)
        except RuntimeError as error:
            log.append((rank, str(error)))
        finally:
            baton.end(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    baton.start()
    assert baton.finished.wait(10)
    for thread in threads:
        thread.join(10)
    return log


def turns(baton, rank, log):
    """Two turns for each rank."""
    for turn in range(2):
        log.append((turn, rank))
        baton.pause(rank)


def test_the_longest_ready_runs_next():
    """3 ranks take turns in the order of their numbers, and one at a time."""
    assert play(3, turns) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_seed_chooses():
    """5 ranks: the same seed gives the same order, other seeds other ones; each rank has all of its turns."""
    logs = [play(5, turns, order=seed) for seed in range(6)]
    assert logs == [play(5, turns, order=seed) for seed in range(6)]
    assert len(set(map(tuple, logs))) > 3
    assert all(sorted(log) == sorted(logs[0]) for log in logs)


def test_time_passes_when_nobody_can_run():
    """3 ranks that wait for nothing: the limits pass in their order, without any waiting."""

    def script(baton, rank, log):
        log.append((rank, baton.block(rank, "nothing", limit=[3000, 1000, 2000][rank])))

    assert play(3, script) == [(1, False), (2, False), (0, False)]


def test_a_wake_comes_before_the_limit():
    """2 ranks: a rank that is woken goes on as soon as the other one waits or ends."""

    def script(baton, rank, log):
        if rank == 0:
            log.append(("in time", baton.block(rank, "rank 1", limit=1)))
        else:
            baton.wake(0)
            log.append("woken")

    assert play(2, script) == ["woken", ("in time", True)]


def test_stuck_is_told_at_once():
    """3 ranks: when nobody can run, the owner hears of all that wait, and those that it fails go on with the error."""
    heard = []

    def script(baton, rank, log):
        if rank:
            baton.block(rank, f"what {rank} wants")

    def stuck(waiting):
        heard.append({rank: wait.what for rank, wait in waiting.items()})
        for rank in waiting:
            batons[0].wake(rank, RuntimeError(f"told {rank}"))

    batons = []

    def first(baton, rank, log):
        batons.append(baton)
        script(baton, rank, log)

    assert sorted(play(3, first, stuck=stuck)) == [(1, "told 1"), (2, "told 2")]
    assert heard == [{1: "what 1 wants", 2: "what 2 wants"}]


def test_a_rank_that_was_given_up_does_nothing_more():
    """2 ranks: the rank that ran and was given up gets Abandoned at its next step, the other one the error."""
    running, go = threading.Event(), threading.Event()
    ended = {}
    baton = Baton(2, Chooser("deterministic"), lambda waiting: pytest.fail("stuck"))

    def body(rank):
        try:
            baton.await_turn(rank)
            if rank == 1:
                running.set()
                go.wait(10)
            baton.block(rank, "the other one")
        except (Abandoned, TimeoutError) as error:
            ended[rank] = type(error)
        finally:
            baton.end(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    baton.start()
    assert running.wait(10)
    assert baton.abandon(lambda rank: TimeoutError()) == 1
    assert baton.finished.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert ended == {0: TimeoutError, 1: Abandoned}
