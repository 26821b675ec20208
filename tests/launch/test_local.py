"""Processes of this machine that are ranks: what they leave, and who is killed when the time is over."""

import multiprocessing
import os
import subprocess
import sys
import time
from math import inf

import pytest

from rankmesh.core.private import write_whole
from rankmesh.launch.local import end_all, output_to, wait

FORK = multiprocessing.get_context("fork")


def _leaves(folder, rank):
    output_to(folder / f"output-{rank}")
    os.write(1, f"rank {rank}\n".encode())
    subprocess.run([sys.executable, "-c", "print('its child')"], check=True)
    write_whole(folder / f"result-{rank}", b"done")
    raise SystemExit(rank)


def _stays(folder, rank):
    write_whole(folder / f"result-{rank}", b"begun")
    time.sleep(600)


@pytest.fixture
def started(tmp_path):
    """Start a target as rank 0, 1, ...; no process is left."""
    processes = []

    def start(*targets):
        processes.extend(FORK.Process(target=target, args=(tmp_path, rank)) for rank, target in enumerate(targets))
        for process in processes:
            process.start()
        return processes

    yield start
    end_all(processes)


def test_statuses_output_and_results(started, tmp_path):
    """Each rank's status, what it and its children printed, and a file that is whole; no draft is left."""
    assert wait(started(_leaves, _leaves), lambda: inf) == [0, 1]
    assert (tmp_path / "output-1").read_text() == "rank 1\nits child\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output-0", "output-1", "result-0", "result-1"]


def test_the_earliest_end_counts(started, tmp_path):
    """The time is over as soon as it was said once: a rank that is left is killed, and has no status."""

    def seconds_left():
        begun = (tmp_path / "result-1").exists() and not processes[0].is_alive()
        return next(answers) if begun else inf

    processes = started(_leaves, _stays)
    answers = iter([0.2, *[inf] * 10_000])
    assert wait(processes, seconds_left) == [0, None]


def test_an_error_meanwhile_leaves_no_process(started):
    """What is raised while ranks run, such as an interrupt, ends them first."""

    def interrupted():
        raise KeyboardInterrupt

    processes = started(_stays)
    with pytest.raises(KeyboardInterrupt):
        wait(processes, interrupted)
    assert not processes[0].is_alive()
