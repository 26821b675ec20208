"""Real programs with one fault each: the watch names the rank and the cause, and nobody else."""

import os
from contextlib import closing

import pytest
from tests.limits import LONG
from tests.slow.faults import Job, trial

from rankmesh.debug.slow.report import SlowReport


def _named(folder, kind, rank, ranks):
    with closing(Job(folder, LONG, ranks)) as job:
        processes = job.ranks()
        seconds, innocent = trial(job, kind, rank, processes[rank], within=LONG)
        assert seconds is not None, job.report()
        assert not innocent
        return (folder / "log").read_text()


@pytest.mark.long
def test_a_late_loader(tmp_path):
    """Of 4 ranks, one whose data are late: a line says so, and one that it is over."""
    printed = _named(tmp_path, "input", 3, 4)
    assert "rankmesh: slow: rank 3 (host " in printed
    assert "; in next_batch at program.py:" in printed
    assert "rankmesh: slow: over: rank 3 " in printed
    assert len(SlowReport.read(tmp_path / "watch").computes) == 4


@pytest.mark.nightly
@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("kind", ["stop", "input", "layers"])
def test_a_fault_of_a_rank(tmp_path, kind):
    """Of 16 ranks: one that is stopped for 80 ms again and again, whose data are late, or with twice the layers."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("16 ranks need two processors")
    _named(tmp_path, kind, 6, 16)
