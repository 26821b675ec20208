"""rankmesh in the workers of a real Ray: their world is there already, and stays."""

import json
import sys

from tests.launchers.conftest import ROOT


def test_four_workers(run, tmp_path, ray):
    """4 workers: each knows its place, proves, measures, discovers, is refused a wrong size; Ray's world stays."""
    done = run(sys.executable, ROOT / "tests" / "launchers" / "ray_job.py", tmp_path, limit=150, **ray)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    for rank, one in enumerate(found):
        assert one["me"] == ["ray", rank, 4, rank, 4]
        assert [one["where"][name] for name in ("launcher", "rank", "missing")] == ["ray", rank, None]
        assert (one["sum"], one["measured"], one["ok"], one["hosts"]) == (2, ["dp", "tp"], True, [4])
        assert "received a plan for 8 ranks in a job of 4; they must be equal" in one["wrong"]
        assert one["still there"]
        assert one["variables"]
