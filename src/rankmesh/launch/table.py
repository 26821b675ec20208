"""Launchers, in one table: which of them started this process is read from the environment alone.

The first row whose marks are set is the launcher: the innermost comes first, so torchrun inside srun is torchrun.

```
launcher      rank                   of                      on this host                    rendezvous address
torchrun      RANK                   WORLD_SIZE              LOCAL_RANK                      MASTER_ADDR
ray           RANK                   WORLD_SIZE              LOCAL_RANK                      MASTER_ADDR
jsrun         JSM_NAMESPACE_RANK     JSM_NAMESPACE_SIZE      JSM_NAMESPACE_LOCAL_RANK        LSB_MCPU_HOSTS, 2nd
openmpi       OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK      mpi4py
intelmpi      PMI_RANK               PMI_SIZE                MPI_LOCALRANKID                 mpi4py
mpich         PMI_RANK               PMI_SIZE                MPI_LOCALRANKID                 mpi4py
pals          PALS_RANKID            PMI_SIZE                PALS_LOCAL_RANKID               mpi4py
flux          FLUX_TASK_RANK         FLUX_JOB_SIZE           FLUX_TASK_LOCAL_ID              mpi4py
slurm         SLURM_PROCID           SLURM_STEP_NUM_TASKS    SLURM_LOCALID                   SLURM_STEP_NODELIST, 1st
pmix          PMIX_RANK              WORLD_SIZE              -                               mpi4py
kubernetes    RANK, PET_NODE_RANK,   WORLD_SIZE, PET_NNODES  one rank a pod                  MASTER_ADDR
              JOB_COMPLETION_INDEX
environment   RANK                   WORLD_SIZE              LOCAL_RANK                      MASTER_ADDR
none          0                      1
```

``MASTER_ADDR`` and ``MASTER_PORT`` are the rendezvous address wherever they are set. Ranks that all are on one host
need neither. ``RANK`` and ``WORLD_SIZE`` that are set beside another launcher's variables must say the same, or number
the ranks that each of its tasks starts; what contradicts itself is refused, with both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ENVIRONMENT",
    "LAUNCHERS",
    "MPI",
    "NO_LAUNCHER",
    "PORT",
    "SBATCH",
    "Launcher",
    "srun_variables",
    "torchrun_variables",
]

NO_LAUNCHER = "none"
# The rendezvous by default, as torch has it.
PORT = 29500


@dataclass(frozen=True)
class Launcher:
    """A row of the table: the variables that a launcher sets; ``marks`` are those by which it is recognised, all."""

    name: str
    marks: tuple[str, ...]
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


def _row(name: str, marks: str, variables: str) -> Launcher:
    """Return a row; ``variables`` are the rank, the world size, and the rank and size on the host where there are."""
    return Launcher(name, tuple(marks.split()), *variables.split())


_USUAL = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
_HYDRA = "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
_OPEN_MPI = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
_JSRUN = "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE"
_POD = "KUBERNETES_SERVICE_HOST"

LAUNCHERS = (
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    _row("torchrun", "TORCHELASTIC_RUN_ID RANK WORLD_SIZE", _USUAL),
    # ray.train.torch.config of Ray 2.60
    _row("ray", "RAY_JOB_ID RANK WORLD_SIZE", _USUAL),
    # https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsm
    _row("jsrun", "JSM_NAMESPACE_RANK", _JSRUN),
    # https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    _row("openmpi", "OMPI_COMM_WORLD_RANK", _OPEN_MPI),
    # Intel MPI Library Developer Reference, Hydra environment variables; Hydra of MPICH 4.0
    _row("intelmpi", "PMI_RANK MPI_LOCALRANKID I_MPI_MPIRUN", _HYDRA),
    _row("mpich", "PMI_RANK MPI_LOCALRANKID", _HYDRA),
    # https://docs.alcf.anl.gov/aurora/running-jobs-aurora
    _row("pals", "PALS_RANKID", "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE"),
    # flux-core, src/shell/task.c and flux-environment(7)
    _row("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID"),
    # https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    _row("slurm", "SLURM_PROCID", "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID"),
    # PMIx standard, PMIx_Init
    _row("pmix", "PMIX_RANK", "PMIX_RANK WORLD_SIZE"),
    # PyTorchJob: kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go
    _row("kubernetes", f"{_POD} RANK WORLD_SIZE", _USUAL),
    # TrainJob: https://www.kubeflow.org/docs/components/trainer
    _row("kubernetes", f"{_POD} PET_NODE_RANK PET_NNODES", "PET_NODE_RANK PET_NNODES"),
    # Indexed jobs, JobSet: https://kubernetes.io/docs/concepts/workloads/controllers/job
    _row("kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX WORLD_SIZE"),
    _row("environment", "RANK WORLD_SIZE", _USUAL),
)
ENVIRONMENT = LAUNCHERS[-1]

# Whose ranks can be ranks of MPI: MPI broadcasts the address of rank 0 where nothing else has it.
MPI = ("openmpi", "mpich", "intelmpi", "pals", "flux", "jsrun", "pmix", "slurm")

# What sbatch makes of its options, for the script that it runs.
SBATCH: Mapping[str, tuple[str, ...]] = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
}


def torchrun_variables(
    rank: int,
    world_size: int,
    *,
    local_rank: int,
    local_world_size: int,
    node: int = 0,
    address: str = "127.0.0.1",
    port: int = PORT,
) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank.

    >>> torchrun_variables(5, 8, local_rank=1, local_world_size=4, node=1)["LOCAL_RANK"]
    '1'
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def srun_variables(rank: int, *, local_rank: int, node: int, tasks: Sequence[int], hosts: str) -> dict[str, str]:
    """Return the variables that srun sets for a task of a step with ``tasks`` on each of its ``hosts``.

    >>> srun_variables(5, local_rank=1, node=1, tasks=(4, 4), hosts="node[1-2]")["SLURM_STEP_NUM_TASKS"]
    '8'
    """
    values = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": node,
        "SLURM_NTASKS": sum(tasks),
        "SLURM_NNODES": len(tasks),
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": sum(tasks),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    return {name: str(value) for name, value in values.items()}
