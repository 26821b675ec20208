"""What a user installs: the wheel, in an environment that has nothing else."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = "RANKMESH_WHEEL"
pytestmark = pytest.mark.skipif(not os.environ.get(RUN), reason=f"takes a minute: make test-wheel runs it ({RUN}=1)")

FOUR_LINES = re.compile(r"`job\.py`:\n\n```python\n(.*?)```\n\n```console\n\$ (.*?)\n(.*?)```", re.DOTALL)


def run(*command, cwd=None, timeout=120):
    """What a program printed; one that fails, or takes too long, fails the test with all that it said."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of programs of an environment that holds the wheel and what pip installs with it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, ROOT / "packages" / "rankmesh-engines")
    (wheel,) = folder.glob("rankmesh-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/python", *pip[1:], "install", wheel)
    return folder / "venv/bin"


def test_the_installed_command_works(installed, tmp_path):
    """`pip install` of the wheel gives a command that answers, plans and draws, without torch."""
    assert "rankmesh show" in run(installed / "rankmesh", "show", "--help", cwd=tmp_path)
    assert "Usage: rankmesh" in run(installed / "rankmesh", "--help", cwd=tmp_path)
    assert "8 ranks" in run(installed / "rankmesh", "show", "tp=2,dp=4", cwd=tmp_path)
    run(installed / "rankmesh", "explore", "tp=2,dp=4", "--html", tmp_path / "page.html", cwd=tmp_path)
    assert "<script" in (tmp_path / "page.html").read_text(encoding="utf-8")
    listed = run(installed / "python", "-m", "pip", "--disable-pip-version-check", "list", "--format", "freeze")
    assert "rankmesh==" in listed
    assert "torch==" not in listed


def test_what_is_not_installed_is_named_with_its_extra(installed, tmp_path):
    """What needs torch says in one line what to install, and ends as wrong usage does."""
    done = subprocess.run(
        [installed / "rankmesh", "check", "tp=2"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the package 'torch' is not installed; pip install 'rankmesh[torch]'\n"


def test_the_engines_are_a_wheel_of_their_own(installed, tmp_path):
    """Without it the command says how to install it; with it, what its side imports first and does not find."""
    (wheel,) = installed.parents[1].glob("rankmesh_engines-*.whl")

    def refused():
        command = (installed / "rankmesh", "layout", "gpt-oss-20b", "--side", "vllm:tp=2")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    assert refused().endswith("; pip install 'rankmesh-engines[vllm]'\n")
    run(installed / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", wheel)
    assert refused().endswith("; pip install transformers vllm\n")


def test_the_four_lines_run_beside_a_torch_that_is_there(installed, tmp_path):
    """The README's job runs under torchrun in the same environment, as soon as it finds a torch."""
    pytest.importorskip("torch")
    script, command, printed = FOUR_LINES.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()
    (tmp_path / "job.py").write_text(script, encoding="utf-8")
    site = run(installed / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # At the end of the path: the wheel's own packages win over what the tests' environment has.
    torchs = Path(sys.modules["torch"].__file__).parents[1]
    Path(site, "torchs.pth").write_text(f"{torchs}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    where = run(installed / "python", "-c", "import rankmesh; print(rankmesh.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    program, *arguments = command.split()
    assert program == "torchrun"
    assert run(installed / "python", "-m", "torch.distributed.run", *arguments, cwd=tmp_path) == printed
