"""rankmesh under real MPI launchers: Open MPI's mpirun and MPICH's Hydra, on this machine and, told so, on two."""

import sys

import pytest
from tests.launchers.conftest import needs, told
from tests.launchers.starts import HYDRA, OPENMPI, PATH

LAUNCHERS = pytest.mark.parametrize(("name", "start"), [("openmpi", OPENMPI), ("mpich", HYDRA)])


def test_ranks_that_mpi4py_brings_together(run, script):
    """2 ranks of Open MPI that take themselves for ranks of two hosts: mpi4py tells them where rank 0 is."""
    needs("Open MPI", "mpirun.openmpi", modules=("mpi4py",))
    two_hosts = "OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"
    done = run(*OPENMPI, "2", "sh", "-c", f"export {two_hosts}; exec {sys.executable} {script} 'dp=*'")
    found = told(done)
    assert [found[rank][1:4] for rank in range(2)] == [(2, 0, 1)] * 2
    assert len({line[5] for line in found.values()}) == 1


def test_a_place_that_nobody_tells(run, script):
    """2 ranks of MPICH on two hosts, with an mpi4py of another MPI or none: the error says what to set."""
    needs("MPICH", "mpiexec.hydra")
    two_hosts = "export MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0"
    done = run(*HYDRA, "2", "sh", "-c", f"{two_hosts}; exec {sys.executable} -c 'import rankmesh as rm; rm.init()'")
    assert done.returncode != 0
    assert "MASTER_ADDR" in done.stderr
    assert "mpi4py" in done.stderr


@LAUNCHERS
def test_a_rank_that_dies(run, name, start):
    """4 ranks that are checked, of which one is killed: the job ends, and nothing counts as proved."""
    needs(name, start[0])
    phases = (sys.executable, "-m", "tests.check.phases", "use", "2", "SIGKILL", "tp=2,dp=2", "--timeout", "10")
    done = run(*start, "4", *phases, **PATH)
    assert done.returncode != 0
    assert "every group was proved" not in done.stdout
