"""rankmesh in the workers of a real Ray: their world is there already, and stays."""

import json
import sys

import pytest
from tests.launchers.conftest import ROOT, needs


def _workers(run, tmp_path, what):
    needs("Ray", modules=("ray", "pandas"))
    script = ROOT / "tests" / "launchers" / "ray_job.py"
    done = run(sys.executable, script, what, tmp_path, limit=110, RAY_TRAIN_V2_ENABLED="1", RAY_USAGE_STATS_ENABLED="0")
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.timeout(150)
def test_four_lines_and_a_check_in_four_workers(run, tmp_path):
    """4 workers: each knows its place, makes its groups, and proves a layout; Ray's world is there afterwards."""
    found = _workers(run, tmp_path, "well")
    assert [(one["launcher"], one["rank"], one["size"], one["local"]) for one in found] == [
        ("ray", rank, 4, rank) for rank in range(4)
    ]
    assert all(one["sum"] == 2 and one["ok"] and one["still there"] for one in found), found


@pytest.mark.timeout(150)
def test_a_wrong_size_in_four_workers(run, tmp_path):
    """4 workers for a plan of 8: refused in each, with both sizes."""
    found = _workers(run, tmp_path, "wrong")
    assert all("received a plan for 8 ranks in a job of 4" in one["error"] for one in found), found
