"""The snippets of docs/howto/launch.md that need a real launcher, run as they stand there."""

import os
import re

import pytest
from tests.docs.pages import ROOT, blocks
from tests.launchers.conftest import BIN, needs

PAGE = ROOT / "docs" / "howto" / "launch.md"
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def job(tmp_path):
    """The page's job.py in a folder of its own; the folder."""
    (text,) = (block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if block.file == "job.py")
    (tmp_path / "job.py").write_text(text, encoding="utf-8")
    return tmp_path


def _snippet(token):
    (text,) = (block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if block.run_by and token in block.text)
    return text


def test_torchrun_on_two_hosts(hosts, job):
    """4 ranks: the command of the page on both hosts, as it stands there."""
    needs("two hosts", "ip", "unshare")
    command = f"cd {job} && PATH={PATH} {_snippet('torchrun')}"
    shell = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])"
    both = [host.start("-c", shell, command) for host in hosts]
    ends = [(*process.communicate(timeout=150), process.returncode) for process in both]
    assert [status for _, _, status in ends] == [0, 0], ends
    assert "torchrun: 4 ranks, 2 in dp" in ends[0][0] + ends[1][0]


def test_the_batch_script_of_slurm(slurm, job):
    """4 ranks on two nodes: the page's script, given to sbatch."""
    (job / "job.sh").write_text(_snippet("#SBATCH"), encoding="utf-8")
    done = slurm.batch(job / "out", "-D", job, job / "job.sh", PATH=PATH)
    assert done.returncode == 0, done
    assert "every group was proved: 4 groups of 2 kinds on 4 ranks (gloo)" in done.stdout
    assert "slurm: 4 ranks, 2 in dp" in done.stdout


def test_mpirun(run, job):
    """4 ranks: the two commands of the page, with as many ranks as this machine has no slots for."""
    needs("Open MPI", "mpirun.openmpi")
    commands = re.sub(r"\bmpirun\b", "mpirun.openmpi --oversubscribe", _snippet("mpirun -np"))
    done = run("sh", "-ec", f"cd {job}; {commands}", PATH=PATH)
    assert done.returncode == 0, done.stderr
    assert "every group was proved: 4 groups of 2 kinds on 4 ranks (gloo)" in done.stdout
    assert "openmpi: 4 ranks, 2 in dp" in done.stdout


@pytest.mark.nightly
def test_mpiexec(run, job):
    """4 ranks: the command of the page with MPICH's launcher."""
    needs("MPICH", "mpiexec.hydra")
    done = run("sh", "-ec", f"cd {job}; {_snippet('mpiexec').replace('mpiexec', 'mpiexec.hydra')}", PATH=PATH)
    assert done.returncode == 0, done.stderr
    assert "mpich: 4 ranks, 2 in dp" in done.stdout


@pytest.mark.nightly
def test_ray(run, job, ray):
    """4 workers: the page's file, as it stands there."""
    (job / "with_ray.py").write_text(_snippet("TorchTrainer"), encoding="utf-8")
    done = run(BIN / "python", job / "with_ray.py", limit=250, HOME=str(job), **ray)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 3 of 4 by ray is in tp@dp1" in done.stdout + done.stderr
