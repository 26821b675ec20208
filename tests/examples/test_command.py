"""The commands of the example, as a user types them."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.training import train_one
from tests.limits import LONG
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_gpt"
TINY = ("--hidden=16", "--heads=2", "--sequence=16", "--dtype=float64")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PNG = b"\x89PNG\r\n\x1a\n"


def run(*command):
    """The output and the messages of a command that ends well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "MASTER_"))}
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout, ended.stderr


@pytest.fixture
def command(monkeypatch):
    """The command's module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("train")


@pytest.fixture
def typed(command):
    """What the command says to these words, in this process."""
    return lambda *arguments: CliRunner().invoke(command.app, list(arguments))


@pytest.mark.nightly
def test_command_saves_and_resumes(ranks, tmp_path):
    """2 ranks of torchrun, then 1: PNGs, a checkpoint, and the losses of a run on one process."""
    train = (EXAMPLE / "train.py", *TINY, "--json", "--checkpoint", tmp_path / "saved", "--figure")
    first, shown = run(*LAUNCH, 2, *train, tmp_path / "first.png", "--layout", "dp=2,ep=2", "--steps", "2")
    assert "2/2" in shown
    rest, _ = run(*train, tmp_path / "rest.png", "--resume", "--steps", "3")
    for name in ("first", "rest"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    result = json.loads(first)["losses"] + json.loads(rest)["losses"]
    assert result == pytest.approx([loss for loss, _ in ranks(1, train_one, 16, 2, 16, 3)[0]], abs=1e-9)


def test_losses_need_no_drawing(command, typed, monkeypatch):
    """With --json and no --figure no curve is drawn, so matplotlib may be absent."""
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    ended = typed(*TINY, "--json", "--steps", "1")
    assert len(json.loads(ended.stdout)["losses"]) == 1
    assert "needs matplotlib" in typed(*TINY, "--steps", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--groups", "x"], "error: --groups x is unknown; give one of rankmesh"),
        (["--dtype", "x"], "error: --dtype x is unknown; give one of float32"),
        (["--resume"], "error: --resume needs --checkpoint"),
        (["--relayout", "2:tp=1", "--json"], "error: --relayout needs --survive"),
        (["--survive", "--relayout", "x:tp=1", "--json"], "error: --relayout x:tp=1 is not a step and sizes"),
        (["--layout", "tp=2", "--figure", "x.png"], "error: world_size is 1, but tp 2"),
        (["--heads", "3"], "error: 2 · heads = 6 does not divide hidden = 64"),
    ],
)
def test_refusal_is_one_sentence(typed, monkeypatch, tmp_path, arguments, printed):
    """Words that mean nothing, or do not go together: one line on stderr, without a traceback; nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = typed(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(printed)
    assert not list(tmp_path.iterdir())


def test_a_layout_with_too_few_ranks_for_copies(command, typed, monkeypatch):
    """4 ranks: what each alone holds has a copy on another rank, so a layout of one rank is refused at the start."""
    monkeypatch.setattr(command, "WORLD_SIZE", 4)
    result = typed("--survive", "--relayout", "2:dp=1", "--json")
    assert result.stderr.startswith("error: --relayout 2:dp=1 leaves 1 ranks for --redundancy 1; add --redundancy 0")


def test_help_teaches(typed):
    """--help says what is trained, and how it is started on several ranks."""
    printed = typed("--help").stdout
    for token in ("torchrun --nproc-per-node 8", "--layout", "megatron", "--checkpoint", "--resume"):
        assert token in printed


@pytest.mark.nightly
def test_compare_prints_a_table():
    """2 ranks: the comparison of the documentation, shortened; the difference is that of float64."""
    table, _ = run(EXAMPLE / "compare.py", "dp=2,ep=2", "--steps", "1", "--dtype", "float64")
    *_, row = table.splitlines()
    layout, size, largest = (cell.strip() for cell in row.strip("|").split("|"))
    assert (layout, size) == ("dp=2 ep=2", "2")
    assert float(largest) < 1e-9


def _launches():
    """Every torchrun line of the example's pages and of the command's own words: ranks, and what follows."""
    pages = [EXAMPLE / "README.md", EXAMPLE / "train.py"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return sorted(set(re.findall(r"torchrun --nproc-per-node (\d+) \S*train\.py ([^`\n]*)", text)))


@pytest.mark.parametrize(("size", "arguments"), _launches())
def test_written_commands_are_accepted(command, typed, monkeypatch, size, arguments):
    """Each launch that the pages show is taken by the command in a world of that size, up to the first step."""
    monkeypatch.setattr(command, "WORLD_SIZE", int(size))
    for start in ("world", "_survive"):
        monkeypatch.setattr(command, start, _stops)
    result = typed(*arguments.split())
    assert isinstance(result.exception, Started), result.output


class Started(Exception):
    """The command has found nothing to refuse."""


def _stops(*_):
    raise Started


def test_written_files_exist():
    """The page names the files that are there, each with what it shows."""
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in (EXAMPLE / "gpt").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"`(\w+\.py)`", page.partition("## What to read")[2].partition("Three places")[0]))
    assert (EXAMPLE / "loss.png").read_bytes().startswith(PNG)
