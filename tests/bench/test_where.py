"""Where the benchmarks are: in the repository, and not in the package that is installed from it."""

import pytest

from rankmesh.cli.bench import run
from rankmesh.cli.shell import Failed


def test_the_command_runs_them_in_a_checkout(capfd):
    """rankmesh bench hands its words on to python -m bench, and its exit status back."""
    assert run(["--only", "nothing"]) == 2
    assert "the sections are live, dry" in capfd.readouterr().err


def test_an_installed_package_says_where_they_are(tmp_path):
    """Without the repository around it the command names what to clone and to run."""
    with pytest.raises(Failed, match="the installed package has no benchmarks; run make bench") as caught:
        run(["--quick"], checkout=tmp_path)
    assert caught.value.code == 2
