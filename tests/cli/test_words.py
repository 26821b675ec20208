"""Words of messages for a new user: one language of SPECs, the frame of the user."""

import json
import subprocess
import sys

import pytest

import rankmesh as rm
from rankmesh.core.source import read_plan
from rankmesh.runtime.agreement import differences
from rankmesh.transfer.layouts.sides import sizes_of

PROGRAM = """import rankmesh as rm
def train():
    rm.connect("tp=3,dp=*")
train()
"""


@pytest.mark.parametrize("debug", ["", "1"])
def test_an_error_ends_at_the_line_of_the_user(tmp_path, debug):
    """A traceback has the user's frames and one of rankmesh; RANKMESH_DEBUG=1 shows all."""
    (tmp_path / "job.py").write_text(PROGRAM, encoding="utf-8")
    environment = {"PATH": "/usr/bin:/bin", "RANKMESH_DEBUG": debug}
    found = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    frames = [line for line in found.stderr.splitlines() if line.startswith("  File ")]
    assert sum("job.py" in frame for frame in frames) == 2
    assert (sum("rankmesh" in frame for frame in frames) == 1) == (not debug)
    assert found.stderr.splitlines()[-1].startswith(
        "rankmesh.errors.ConnectError: torch.distributed is not initialised"
    )


def test_the_world_of_a_side():
    """megatron:world=8 of a side is the same as of a SPEC: dp follows from it."""
    assert sizes_of("megatron:world=8,tp=2,pp=2") == {"tp": 2, "pp": 2, "dp": 2}
    assert sizes_of("vllm:tp=2") == {"tp": 2}
    with pytest.raises(rm.LayoutError, match=r"world=8 of side .* does not go with tp 3; use a multiple of 3 ranks"):
        sizes_of("megatron:world=8,tp=3")


def test_one_axis_more_is_shown_without_json():
    """A group that one plan has and the other does not is there, or absent."""
    one, more = (json.loads(read_plan(text).to_json()) for text in ("tp=2,dp=2", "tp=2,dp=2,pp=1"))
    shown = [(left, right) for _, left, right in differences(one, more)]
    assert ("absent", "there") in shown
    assert not any("{" in text or "[" in text for pair in shown for text in pair)
