"""What a user installs: the wheel, in empty environments. `make dist` tests a release's files, in several Pythons."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN, DIST, PYTHONS = "RANKMESH_WHEEL", "RANKMESH_DIST", "RANKMESH_PYTHONS"
pytestmark = pytest.mark.skipif(not os.environ.get(RUN), reason=f"takes a minute: make test-wheel runs it ({RUN}=1)")

FOUR_LINES = re.compile(r"`job\.py`:\n\n```python\n(.*?)```\n\n```console\n\$ (.*?)\n(.*?)```", re.DOTALL)
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
LIMIT = 2_000_000


def run(*command, cwd=None, timeout=120):
    """What a program printed; one that fails, or takes too long, fails the test with all that it said."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The folder with the wheels of both distributions: those of the release, or built here."""
    if DIST in os.environ:
        return Path(os.environ[DIST]).resolve()
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, ROOT / "packages" / "rankmesh-engines")
    return folder


@pytest.fixture(scope="module")
def wheel(wheels):
    """The wheel of rankmesh."""
    (found,) = wheels.glob("rankmesh-*.whl")
    return found


@pytest.fixture(scope="module", params=os.environ.get(PYTHONS, sys.executable).split())
def installed(request, wheel, tmp_path_factory):
    """The folder of programs of an environment that holds the wheel and what pip installs with it."""
    folder = tmp_path_factory.mktemp("environment")
    run(request.param, "-m", "venv", folder)
    run(folder / "bin/python", *PIP, "install", "--no-compile", wheel)
    return folder / "bin"


def test_what_the_wheel_contains(wheel):
    """The package with its types and its page, nothing beside it, below two megabytes; the licence in the metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    metadata = wheel.name.split("-py3")[0] + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"rankmesh", "rankmesh_watch.py", metadata}
    assert {"rankmesh/py.typed", "rankmesh/viz/explorer.html", "rankmesh/__main__.py"} <= {*names}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert wheel.stat().st_size < LIMIT
    (file,) = (name for name in names if name.endswith("METADATA"))
    metadata = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(file).decode())
    wanted = ("Name", "License-Expression", "Requires-Python")
    assert [metadata[name] for name in wanted] == ["rankmesh", "Apache-2.0", ">=3.10"]
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.skipif(DIST not in os.environ, reason="make dist builds the source distribution")
def test_what_the_source_distribution_contains(wheels):
    """What builds the package and its page, and no output of either, below two megabytes."""
    (source,) = wheels.glob("rankmesh-*.tar.gz")
    assert source.stat().st_size < LIMIT
    with tarfile.open(source) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"} <= names
    assert {"src/rankmesh/__init__.py", "src/rankmesh_watch.py", "explorer/package.json"} <= names
    assert not [name for name in names if re.search(r"__pycache__|node_modules|\.venv|^build/", name)]


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


def test_the_engines_are_a_wheel_of_their_own(installed, wheels, tmp_path):
    """Without it the command says how to install it; with it, what its side imports first and does not find."""
    (wheel,) = wheels.glob("rankmesh_engines-*.whl")

    def refused():
        command = (installed / "rankmesh", "layout", "gpt-oss-20b", "--side", "vllm:tp=2")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    assert refused().endswith("; pip install 'rankmesh-engines[vllm]'\n")
    run(installed / "python", *PIP, "install", "--no-deps", wheel)
    assert refused().endswith("; pip install transformers vllm\n")


def test_the_four_lines_run(installed, wheel, tmp_path):
    """The README's job runs under torchrun, with the tests' torch or, in another Python, one of its own."""
    script, command, printed = FOUR_LINES.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()
    (tmp_path / "job.py").write_text(script, encoding="utf-8")
    about = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'))"
    *version, site = run(installed / "python", "-c", about).split()
    if [*map(int, version)] == [*sys.version_info[:2]]:
        pytest.importorskip("torch")
        # At the end of the path: the wheel's own packages win over what the tests' environment has.
        torchs = Path(sys.modules["torch"].__file__).parents[1]
        Path(site, "torchs.pth").write_text(f"{torchs}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    else:
        run(installed / "python", *PIP, "install", f"{wheel}[torch]", timeout=1500)
    where = run(installed / "python", "-c", "import rankmesh; print(rankmesh.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    program, *arguments = command.split()
    assert program == "torchrun"
    assert run(installed / "python", "-m", "torch.distributed.run", *arguments, cwd=tmp_path) == printed
