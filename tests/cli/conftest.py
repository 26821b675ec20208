import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.limits import LONG
from typer.testing import CliRunner

from rankmesh.cli.app import app


@dataclass(frozen=True)
class Ran:
    """What one run of the command gave."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 100 columns without colours, whatever runs the tests."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "RANKMESH_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def rankmesh() -> Callable[..., Ran]:
    """Run the command in this process."""

    def run(*arguments: object) -> Ran:
        result = CliRunner().invoke(app, [str(token) for token in arguments], prog_name="rankmesh")
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process() -> Callable[..., Ran]:
    """Run the command as a process of its own."""

    def run(*arguments: object, **environment: str) -> Ran:
        command = [sys.executable, "-m", "rankmesh", *map(str, arguments)]
        env = {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=LONG)
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
