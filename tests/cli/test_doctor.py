"""``rankmesh doctor``: text, data, page, exit statuses."""

import json

from tests.doctor.making import WORLD, call, document, write

import rankmesh as rm
from rankmesh.cli.shell import ExitCode


def _hung(folder, *, hangs=True):
    members = {WORLD: (0, 1, 2, 3)}
    without = (3,) if hangs else ()
    write(
        folder,
        {r: document([call(WORLD, 1), call(WORLD, 2, done=not hangs)], members) for r in range(4) if r not in without},
    )


def test_text(rankmesh, tmp_path):
    """The verdict comes first, then the evidence; the status says that something hangs."""
    _hung(tmp_path)
    done = rankmesh("doctor", tmp_path)
    assert done.code == ExitCode.HUNG
    lines = done.out.splitlines()
    assert lines[0].startswith("dead: rank 3 left no recording; ranks 0, 1, 2 wait in all_reduce, call 2 of world")
    assert lines[-1] == "waiting    ranks 0, 1, 2 of 4"


def test_data(rankmesh, tmp_path):
    """The data has stable keys, and names the groups after the SPEC."""
    _hung(tmp_path)
    done = rankmesh("doctor", tmp_path, "tp=2,dp=2", "--json")
    data = json.loads(done.out)
    assert data["waiting"] == [0, 1, 2]
    cause = data["causes"][0]
    assert [cause[key] for key in ("cause", "ranks", "kind", "group", "call", "operation")] == [
        "dead", [3], "world", "world", 2, "all_reduce",
    ]  # fmt: skip


def test_nothing_hangs(rankmesh, tmp_path):
    """Status 0 where nothing hangs."""
    _hung(tmp_path, hangs=False)
    done = rankmesh("doctor", tmp_path)
    assert (done.code, done.out.strip()) == (0, "no rank waits: nothing in these recordings hangs")


def test_a_layout_by_name_and_by_place(rankmesh, tmp_path):
    """The layout is an option or follows the paths; a saved plan whose name ends with a number is not a recording."""
    _hung(tmp_path)
    plan = tmp_path.parent / "plan2.json"
    plan.write_text(rm.recipes.axes(rm.Mesh(tp=2, dp=2)).to_json(), encoding="utf-8")
    files = sorted(tmp_path.iterdir())
    shown = [
        rankmesh("doctor", *arguments, "--json").out
        for arguments in ((tmp_path, "--layout", "tp=2,dp=2"), (*files, plan), (*files, "tp=2,dp=2"))
    ]
    assert shown[0]
    assert len(set(shown)) == 1
