"""The tests of ``make test-peers``: others' own code, several releases of it, beside the drop-ins and recipes.

Each release lies in a folder of its own, ``$RANKMESH_PEERS/NAME-VERSION``, which ``fetch.py`` filled. A test that
compares with one has it first on its path, in a process that has loaded none: a rank, or a program of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def pytest_ignore_collect(collection_path):
    """``make test`` has not fetched the others. Programs that tests start are not read for examples."""
    program = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if program or "RANKMESH_PEERS" not in os.environ else None


def checkout(variable):
    """Where a variable says that another's sources lie."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout")
    return Path(os.environ[variable]).resolve()


@pytest.fixture
def asked_beside():
    """Run a module of these tests as a program with one release on its path; what it printed."""

    def run(module, peer, *arguments, limit=200):
        environment = {**os.environ, "PYTHONPATH": f"{peer}:{REPOSITORY}", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
            check=False,
            cwd=REPOSITORY,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
        return done.stdout

    return run
