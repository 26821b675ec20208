"""rankmesh in the workers of a real Ray: their world is there already, and stays."""

import json
import re
import sys

import pytest
from tests.launchers.conftest import ROOT
from tests.launchers.starts import PATH, SURVIVED, SURVIVES, survived
from tests.sockets import free_port

JOB = ROOT / "tests" / "launchers" / "ray_job.py"


@pytest.fixture(scope="module")
def ran(run, ray, tmp_path_factory):
    """The job to its end, and where its workers wrote what they found."""
    folder = tmp_path_factory.mktemp("ray")
    return run(sys.executable, JOB, folder, limit=200, **ray, **PATH), folder


def test_four_workers(ran):
    """4 workers: each knows its place, proves, measures, discovers, is refused a wrong size; Ray's world stays."""
    done, folder = ran
    assert len(list(folder.glob("*.json"))) == 4, done.stderr[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    for rank, one in enumerate(found):
        assert one["me"] == ["ray", rank, 4, rank, 4]
        assert [one["where"][name] for name in ("launcher", "rank", "missing")] == ["ray", rank, None]
        assert (one["sum"], one["measured"], one["ok"], one["hosts"]) == (2, ["dp", "tp"], True, [4])
        assert "the plan is for 8 ranks, but the job has 4;" in one["wrong"]
        assert one["still there"]
        assert one["variables"]


def test_a_worker_that_dies(ran):
    """4 workers, one of which is killed in a check: Ray ends the others, and its error names that rank alone."""
    done, _ = ran
    assert done.returncode != 0
    assert set(re.findall(r"\[Rank (\d+) Error Snippet\]", done.stderr)) == {"2"}, done.stderr[-3000:]


@pytest.mark.nightly
def test_a_job_survives_the_loss_of_an_actor(run, ray):
    """4 actors, one of them a spare, one killed: Ray leaves the others alone, and they go on."""
    done = run(sys.executable, JOB.with_name("ray_actors.py"), SURVIVES, free_port(), **ray, **PATH)
    assert survived(done) == SURVIVED, done
    assert "lost 1 ActorDiedError" in done.stdout
