"""What the README says is what happens."""

import doctest
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def _section(text, start, end):
    return text[text.index(start) + len(start) : text.index(end)]


def _run(*arguments):
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "140"},
    )
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{arguments} was not done in time")
    assert process.returncode == 0, err
    return out


def test_examples_run():
    """The planning examples print what is written."""
    outcome = doctest.testfile(str(README), module_relative=False)
    assert outcome.failed == 0
    assert outcome.attempted >= 8


def test_six_lines_run_under_torchrun(tmp_path):
    """16 ranks: the six lines, saved and started as the README says, print the line that it shows."""
    code = _section(README.read_text(), "```python\nimport torch, ", "```\n\n```\n")
    shown = README.read_text().split(code)[1].split("```\n\n```\n")[1].split("\n```")[0]
    job = tmp_path / "job.py"
    job.write_text("import torch, " + code)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "16")
    assert _run(*launcher, str(job)).strip() == shown


def test_the_table_is_what_the_demo_prints():
    """16 ranks: `rankmesh check` of the demo's layout prints the README's table, but for the times."""
    shown = _section(README.read_text(), "<!-- demo -->\n```\n", "\n```\n<!-- /demo -->")
    spec = next(line for line in (README.parent / "Makefile").read_text().splitlines() if line.startswith("SPEC ?= "))
    printed = _run(sys.executable, "-m", "rankmesh", "check", spec.removeprefix("SPEC ?= "))
    assert _timeless(printed) == _timeless(shown)


def _timeless(table):
    """The words of a table without its times, and without the lines that are as long as the times."""
    lines = [line.split() for line in table.splitlines() if line.strip() and "─" not in line]
    return [
        [word for word, following in zip(words, [*words[1:], ""], strict=True) if "ms" not in (word, following)]
        for words in lines
    ]
