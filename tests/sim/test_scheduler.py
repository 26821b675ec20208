import threading

import pytest

from rankmesh.sim.scheduler import Scheduler


def play(size, script, stuck=None):
    """Run ``script(scheduler, rank, log)`` on each rank; the log."""
    log = []
    scheduler = Scheduler(size, "deterministic", stuck or (lambda waiting: pytest.fail("stuck")))

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


def test_time_passes_when_nobody_can_run():
    """3 ranks that wait for nothing: the limits pass in their order, without any waiting."""

    def script(scheduler, rank, log):
        log.append((rank, scheduler.block(rank, "nothing", limit=[3000, 1000, 2000][rank])))

    assert play(3, script) == [(1, False), (2, False), (0, False)]


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
