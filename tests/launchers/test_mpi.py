"""rankmesh under real MPI launchers: Open MPI's mpirun and MPICH's Hydra, on this machine and, told so, on two."""

import re
import sys

import pytest
from tests.launchers.conftest import needs, reported
from tests.launchers.starts import HYDRA, LIMIT, LOST_IN_USE, OPENMPI, PATH, SURVIVED, SURVIVES, python, survived

USE = ("-m", "tests.check.phases", "use", "2")
ASKED = ("tp=2,dp=2", "--timeout", "5")


def test_ranks_that_mpi4py_brings_together(run, script):
    """2 ranks of Open MPI that take themselves for ranks of two hosts: mpi4py tells them where rank 0 is."""
    needs("Open MPI", "mpirun.openmpi", modules=("mpi4py",))
    two_hosts = "OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"
    done = run(*OPENMPI, "2", "sh", "-c", f"export {two_hosts}; exec {sys.executable} {script} 'dp=*'")
    found = reported(done)
    assert [found[rank][1:4] for rank in range(2)] == [(2, 0, 1)] * 2
    assert len({line[5] for line in found.values()}) == 1


@pytest.mark.nightly
def test_an_address_that_nobody_gives(run, script):
    """2 ranks of MPICH on two hosts, with an mpi4py of another MPI or none: the error says what to set."""
    needs("MPICH", "mpiexec.hydra")
    two_hosts = "export MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0"
    done = run(*HYDRA, "2", "sh", "-c", f"{two_hosts}; exec {sys.executable} -c 'import rankmesh as rm; rm.init()'")
    assert done.returncode != 0
    assert "MASTER_ADDR" in done.stderr
    assert "mpi4py" in done.stderr


def _named(text):
    return re.findall("error: lost (.*?);", text)


@pytest.mark.nightly
def test_a_rank_that_is_stopped(run):
    """4 ranks of Open MPI, one of which is stopped: the others name it alone, and mpirun ends in failure."""
    needs("Open MPI", "mpirun.openmpi")
    done = run(*OPENMPI, "4", *python(*USE, "SIGSTOP", *ASKED), limit=LIMIT, **PATH)
    assert _named(done.stderr) == [LOST_IN_USE], done.stderr
    assert done.returncode != 0
    assert "every group was proved" not in done.stdout


def test_a_rank_that_is_killed(run):
    """4 ranks of Open MPI, one of which is killed: mpirun names it, and ends the others, who name nobody else."""
    needs("Open MPI", "mpirun.openmpi")
    done = run(*OPENMPI, "4", *python(*USE, "SIGKILL", *ASKED), limit=LIMIT, **PATH)
    assert re.search(r"process rank 2 .*on signal 9", done.stdout + done.stderr, re.DOTALL), done
    assert set(_named(done.stderr)) <= {LOST_IN_USE}, done.stderr
    assert done.returncode != 0
    assert "every group was proved" not in done.stdout


@pytest.mark.nightly
def test_a_rank_that_dies(run):
    """4 ranks of MPICH, each in a shell: one is killed, its shell ends with a status, and the others name it alone."""
    needs("MPICH", "mpiexec.hydra")
    done = run(*HYDRA, "4", "sh", "-c", '"$@" || exit', "sh", *python(*USE, "SIGKILL", *ASKED), limit=LIMIT, **PATH)
    assert _named(done.stderr) == [LOST_IN_USE], done.stderr
    assert done.returncode != 0
    assert "every group was proved" not in done.stdout


def test_a_job_survives_the_loss_of_a_rank(run):
    """4 ranks of Open MPI, one of them a spare, one killed: with recovery mpirun leaves the others alone."""
    needs("Open MPI", "mpirun.openmpi")
    done = run(OPENMPI[0], "--enable-recovery", *OPENMPI[1:], "4", sys.executable, SURVIVES)
    assert survived(done) == SURVIVED, done


@pytest.mark.nightly
def test_a_job_survives_in_shells(run):
    """4 ranks of MPICH, each in a shell that ends well whatever becomes of it: one is killed, and the others go on."""
    needs("MPICH", "mpiexec.hydra")
    done = run(*HYDRA, "4", "sh", "-c", '"$@" || true', "sh", sys.executable, SURVIVES)
    assert survived(done) == SURVIVED, done
