"""Words of messages for a new user: one language of SPECs, sizes that fit, the frame of the user."""

import json
import subprocess
import sys

import pytest

import rankmesh as rm
from rankmesh.core.mesh import Mesh
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


@pytest.mark.parametrize(
    ("text", "world", "fits"),
    [("tp=3,dp=*", 4, "sizes of tp that fit: 1, 2, 4"), ("tp=2,cp=5,pp=*", 12, "sizes of cp that fit: 1, 2, 3, 6")],
)
def test_sizes_that_fit(text, world, fits):
    """A size that does not divide the world is told with those that do."""
    with pytest.raises(rm.LayoutError, match=fits):
        Mesh.parse(text, world_size=world)


def test_two_kinds_that_cannot_both_stay_inside_a_level():
    """The ranks of both are counted, and one that fits is kept."""
    cluster = rm.Cluster.parse("host=8,leaf=4")
    with pytest.raises(rm.PlacementError) as caught:
        rm.place(read_plan("tp=8,dp=4"), cluster, within={"tp": "host", "dp": "host"})
    assert str(caught.value) == (
        "tp and dp cannot both stay inside a host: together they have 32 ranks, a host has 8; keep tp=host"
    )


def test_rails_are_not_a_level():
    """A fabric whose switches cut across hosts is refused, with what to write instead."""
    with pytest.raises(rm.ClusterError, match="levels are nested, and the rails of a fabric"):
        rm.Cluster.parse("host=8,rail=4")


def test_one_axis_more_is_shown_without_json():
    """A group that one plan has and the other does not is there, or absent."""
    one, more = (json.loads(read_plan(text).to_json()) for text in ("tp=2,dp=2", "tp=2,dp=2,pp=1"))
    shown = [(left, right) for _, left, right in differences(one, more)]
    assert ("absent", "there") in shown
    assert not any("{" in text or "[" in text for pair in shown for text in pair)
