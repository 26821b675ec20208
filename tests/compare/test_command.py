"""``rankmesh compare``: table, report, data, and exit statuses."""

import json
import sys

import pytest
from typer.testing import CliRunner

from rankmesh.cli.app import app
from rankmesh.cli.shell import ExitCode

PROGRAM = """
import torch.distributed as dist
from rankmesh import sim
from beside import kind

def program(groups):
    total = sim.random(groups, "x", (8, 4), ("dp", None)).sum()
    dist.all_reduce(total, group=groups[kind].pg)
    sim.see("total", total)

def right(groups):
    sim.see("one", 1.0)

def unnamed(groups):
    sim.see("one", float(groups["ep"].size))

def slow(groups):
    import time
    time.sleep(0.5)
    sim.see("one", 1.0)

def fails(groups):
    sim.see("one", 1.0)
    assert groups["tp"].size == 1, "too many"
"""


@pytest.fixture
def run(tmp_path):
    """The command on a function of a file."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("kind = 'tp'\n")

    def command(function, *arguments):
        place = [f"{tmp_path}/train.py:{function}".rstrip(":")] if function else []
        return CliRunner().invoke(app, ["compare", *place, *arguments], prog_name="rankmesh")

    before = list(sys.path)
    yield command
    # The command imports the files, as a process of its own would that then ends.
    sys.path[:] = before
    for name in ("train", "beside"):
        sys.modules.pop(name, None)


def test_table_and_report(run):
    """Every value under every layout, then what made the first one differ and how to fix it; status 1."""
    done = run("program", "--layouts", "tp=2", "dp=2", "tp=2,dp=2")
    assert done.exit_code == ExitCode.DIFFERENT, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["value", "tp=2", "dp=2", "tp=2,dp=2"]
    assert lines[2].split()[0] == "total"
    assert lines[2].count("!") == 3
    assert "train.py:8: the all-reduce over tp made it differ" in done.stdout
    assert "fix: make it on dp; tried, and then everything is the same" in done.stdout


def test_data(run):
    """The keys of --json, and status 0 where all is the same."""
    done = run("program", "--layouts", "tp=2", "dp=2", "--json")
    data = json.loads(done.stdout)
    assert data["same"] is False
    assert data["layouts"] == ["tp=2", "dp=2"]
    assert {key: data["first"][key] for key in ("name", "layout", "ranks", "site", "operation", "group", "repair")} == {
        "name": "total", "layout": "tp=2", "ranks": [0, 1], "site": "train.py:8", "operation": "all-reduce",
        "group": "tp", "repair": ["group", "dp"],
    }  # fmt: skip
    assert data["first"]["element"] == []  # a number has no indices
    assert data["first"]["got"] == pytest.approx(2 * data["first"]["expected"])
    same = run("right", "--layouts", "tp=2", "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["first"] is None


@pytest.mark.parametrize(
    ("function", "arguments", "code", "word"),
    [
        ("program", [], ExitCode.USAGE, "no layouts are given"),
        ("nothing", ["--layouts", "tp=2"], ExitCode.USAGE, "no function 'nothing'"),
        ("", ["nowhere.py:program", "--layouts", "tp=2"], ExitCode.USAGE, "No such file"),
        (":", ["--layouts", "tp=2"], ExitCode.USAGE, "does not name a function"),
        ("", [":program", "--layouts", "tp=2"], ExitCode.USAGE, "does not name a function"),
        ("", ["no_such_module:f", "--layouts", "tp=2"], ExitCode.USAGE, "No module named"),
        ("program", ["--layouts", "tp=2;dp=2"], ExitCode.BAD_SPEC, "did you mean"),
        ("unnamed", ["--layouts", "tp=2"], ExitCode.LOST_RANKS, "has to be in one of them: ep=1"),
        ("unnamed", ["--layouts", "cp=2", "dp=2"], ExitCode.LOST_RANKS, "has to be in one of them: ep=1"),
        ("unnamed", ["--layouts", "tp=2"], ExitCode.LOST_RANKS, "train.py:15 in unnamed"),
        ("slow", ["--layouts", "tp=2", "--timeout", "0.2"], ExitCode.LOST_RANKS, "or pass --timeout 0.8 if it works"),
        ("slow", ["--layouts", "tp=2", "--timeout", "20"], ExitCode.OK, "same"),
        ("fails", ["--layouts", "tp=2"], ExitCode.LOST_RANKS, "under tp=2: ranks 0, 1 of 2 failed: AssertionError"),
    ],
)
def test_what_goes_wrong_is_one_line(run, function, arguments, code, word):
    """Wrong usage, a refused layout, and a program that fails have statuses of their own."""
    done = run(function, *arguments)
    assert (done.exit_code, word in done.output) == (code, True), done.output


def test_a_file_that_cannot_be_imported(run, tmp_path):
    """Its error is shown."""
    (tmp_path / "beside.py").write_text("1 / 0\n")
    done = run("program", "--layouts", "tp=2")
    assert done.exit_code == ExitCode.USAGE
    assert "cannot be imported: ZeroDivisionError" in done.output
