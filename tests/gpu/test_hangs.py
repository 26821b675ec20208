"""Hangs on NCCL: the programs of ``tests.hangs`` whose mistake is the same there, watched until their verdict."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.hangs.keep import KEPT
from tests.hangs.programs import ON_NCCL
from tests.hangs.test_hangs import _check, _found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The recordings of the chosen programs, run now by ranks that share a GPU."""
    folder = tmp_path_factory.mktemp("hangs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HANGS_BACKEND": "nccl"}
    command = [sys.executable, "-m", "tests.hangs.running", str(folder), *sorted(ON_NCCL)]
    subprocess.run(command, check=True, timeout=580, env=environment, cwd=KEPT.parents[2])
    if os.environ.get("HANGS_KEEP"):
        shutil.copytree(folder, os.environ["HANGS_KEEP"], dirs_exist_ok=True)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(ON_NCCL))
def test_a_new_run(name, runs):
    """4 to 16 ranks on NCCL, run now: watched until the verdict, which is the known one."""
    _check(_found(runs / name, ON_NCCL[name]), ON_NCCL[name])
