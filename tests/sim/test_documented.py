"""What docs/simulator.md says is what happens."""

import doctest
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_examples():
    """The examples print what is written."""
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.failed == 0
    assert outcome.attempted >= 8


def test_commands(tmp_path):
    """The file of tests, run by each command as it stands, gives the lines that are shown, on threads and processes."""
    text = PAGE.read_text(encoding="utf-8")
    (name, code) = re.search(r"```python\n# (test_\w+\.py)\n(.*?)```", text, re.S).groups()
    (tmp_path / name).write_text(code, encoding="utf-8")
    console = re.search(r"```console\n(.*?)```", text, re.S)[1]
    plugin = [] if entry_points(group="pytest11", name="rankmesh") else ["-p", "rankmesh.testing.plugin"]
    runs = [part.splitlines() for part in console.split("$ ")[1:]]
    assert len(runs) == 2
    for command, *shown in runs:
        program, *arguments = shlex.split(command)
        assert program == "pytest"
        process = subprocess.run(
            [sys.executable, "-m", "pytest", *plugin, *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert process.returncode == 1
        for line in shown:
            assert line in process.stdout
