import threading

import pytest

from rankmesh.sim.scheduler import Abandoned, Chooser, Scheduler


def play(size, script, order="deterministic", stuck=None):
    """Run ``script(scheduler, rank, log)`` on each rank; the log."""
    log = []
    scheduler = Scheduler(size, Chooser(order), stuck or (lambda waiting: pytest.fail("stuck")))

    def body(rank):
        scheduler.await_start(rank)
        try:
            script(scheduler, rank, log)
        except RuntimeError as error:
            log.append((rank, str(error)))
        finally:
            scheduler.end(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    scheduler.start()
    assert scheduler.finished.wait(10)
    for thread in threads:
        thread.join(10)
    return log


def turns(scheduler, rank, log):
    """Two turns for each rank."""
    for turn in range(2):
        log.append((turn, rank))
        scheduler.pause(rank)


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

    def script(scheduler, rank, log):
        log.append((rank, scheduler.block(rank, "nothing", limit=[3000, 1000, 2000][rank])))

    assert play(3, script) == [(1, False), (2, False), (0, False)]


def test_a_wake_comes_before_the_limit():
    """2 ranks: a rank that is woken goes on as soon as the other one waits or ends."""

    def script(scheduler, rank, log):
        if rank == 0:
            log.append(("in time", scheduler.block(rank, "rank 1", limit=1)))
        else:
            scheduler.wake(0)
            log.append("woken")

    assert play(2, script) == ["woken", ("in time", True)]


def test_stuck_is_an_error_at_once():
    """3 ranks: when nobody can run, the owner hears of all that wait, and those that it fails go on with the error."""
    received = []

    def script(scheduler, rank, log):
        if rank:
            scheduler.block(rank, f"what {rank} wants")

    def stuck(waiting):
        received.append({rank: wait.what for rank, wait in waiting.items()})
        for rank in waiting:
            schedulers[0].wake(rank, RuntimeError(f"told {rank}"))

    schedulers = []

    def first(scheduler, rank, log):
        schedulers.append(scheduler)
        script(scheduler, rank, log)

    assert sorted(play(3, first, stuck=stuck)) == [(1, "told 1"), (2, "told 2")]
    assert received == [{1: "what 1 wants", 2: "what 2 wants"}]


def test_a_rank_that_was_given_up_does_nothing_more():
    """2 ranks: the rank that ran and was given up gets Abandoned at its next step, the other one the error."""
    running, go = threading.Event(), threading.Event()
    ended = {}
    scheduler = Scheduler(2, Chooser("deterministic"), lambda waiting: pytest.fail("stuck"))

    def body(rank):
        try:
            scheduler.await_start(rank)
            if rank == 1:
                running.set()
                go.wait(10)
            scheduler.block(rank, "the other one")
        except (Abandoned, TimeoutError) as error:
            ended[rank] = type(error)
        finally:
            scheduler.end(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    scheduler.start()
    assert running.wait(10)
    assert scheduler.abandon(lambda rank: TimeoutError()) == 1
    assert scheduler.finished.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert ended == {0: TimeoutError, 1: Abandoned}
