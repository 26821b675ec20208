"""``tests.again``: what passes when it is run again alone is unstable, and more than two unstable tests fail a run."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = '''
import pathlib
import pytest

def runs(name):
    """Count the runs of a test."""
    file = pathlib.Path(__file__).with_name(name)
    file.write_text((file.read_text() if file.exists() else "") + "x")
    return len(file.read_text())

@pytest.mark.parametrize("name", ["first", "b c::d@e]", "third"])
def test_chance(name):
    assert runs(name) > 1

def test_broken():
    assert runs("broken") > 9
'''


def _run(folder, chosen, *arguments):
    """Run some of these tests; the exit status and the last line."""
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-p", "tests.again", "-c", settings, "-k", chosen)
    done = subprocess.run(
        [*map(str, command), *arguments, str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_two_unstable_tests_are_listed_and_pass_and_a_third_fails_the_check(tmp_path, monkeypatch):
    """What several runs of one check list is counted together."""
    counted = tmp_path / "unstable.txt"
    monkeypatch.setenv("RANKMESH_UNSTABLE", str(counted))
    status, output = _run(tmp_path, "chance and not third", "-n", "2", "--dist", "worksteal")
    assert (status, "2 unstable in" in output) == (0, True), output
    names = counted.read_text(encoding="utf-8").splitlines()
    assert names == ["test_some.py::test_chance[b c::d@e]]", "test_some.py::test_chance[first]"]
    assert all(f"UNSTABLE {name} (call)\n" in output for name in names)
    status, output = _run(tmp_path, "third", "-n", "0")
    assert (status, "1 unstable in" in output) == (1, True), output


def test_a_test_that_fails_twice_has_failed(tmp_path):
    """It is run again once, and no more; it fails the run beside one that is unstable."""
    status, output = _run(tmp_path, "broken or first", "-n", "0")
    assert status == 1
    assert "1 failed, 2 deselected, 1 unstable in" in output, output
    assert (tmp_path / "broken").read_text(encoding="utf-8") == "xx"
