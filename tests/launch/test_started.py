"""What launchers put into the environment, as one value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import ConnectError
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import LAUNCHERS, srun_variables, torchrun_variables

HAND = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
RENDEZVOUS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURMD_NODENAME": "node4",
    "SLURM_JOB_ID": "123456",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.7",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}

# Eight ranks on two hosts, this is rank 5, the second of the second host.
RECORDED = {
    "torchrun": {**HAND, **RENDEZVOUS, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"},
    "ray": {**HAND, **RENDEZVOUS, "NODE_RANK": "1", "RAY_JOB_ID": "01000000"},
    "jsrun": {
        "JSM_NAMESPACE_RANK": "5",
        "JSM_NAMESPACE_SIZE": "8",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "4",
        "LSB_MCPU_HOSTS": "batch5 1 h41n03 42 h41n04 42",
        **OPENMPI,
    },
    "openmpi": OPENMPI,
    "intelmpi": {**HYDRA, "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_TOPOLIB": "hwloc"},
    "mpich": HYDRA,
    "pals": {"PALS_RANKID": "5", "PMI_SIZE": "8", "PMI_RANK": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"},
    "flux": {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"},
    "slurm": SLURM,
    "pmix": {"PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-1", "WORLD_SIZE": "8"},
    "environment": {**HAND, **RENDEZVOUS},
}


@pytest.mark.parametrize("name", RECORDED)
def test_every_launcher_gives_the_same_rank(name):
    """Rank 5 of 8, the second of a host: under each launcher, with the variables that say so and no others' values."""
    result = started_by(RECORDED[name])
    assert (result.launcher, result.rank, result.world_size) == (name, 5, 8)
    assert result.local_rank == (None if name == "pmix" else 1)
    assert result.local_world_size == (None if name in ("pmix", "flux") else 4)
    assert result.evidence.items() <= RECORDED[name].items()
    assert {variable for names in result.facts.values() for variable in names} == set(result.evidence)


def test_every_row_of_the_table_is_tried():
    """Each launcher of the table has a recorded environment here."""
    assert {row.name for row in LAUNCHERS} - {"kubernetes"} == set(RECORDED)


@pytest.mark.parametrize(
    ("name", "rendezvous"),
    [
        ("torchrun", "node0:29400"),
        ("ray", "node0:29400"),
        ("jsrun", "h41n03:29500"),
        ("openmpi", None),
        ("flux", None),
        ("slurm", "node3:29956"),
        ("environment", "node0:29400"),
    ],
)
def test_where_the_ranks_meet(name, rendezvous):
    """The first host of the step under Slurm, that computes under jsrun, unknown under MPI; MASTER_ADDR wins."""
    assert started_by(RECORDED[name]).meeting == rendezvous
    assert started_by({**RECORDED[name], "MASTER_ADDR": "fe80::1", "MASTER_PORT": "1"}).meeting == "[fe80::1]:1"


# -- precedence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("slurm", "torchrun"), "torchrun"),
        (("slurm", "openmpi", "torchrun"), "torchrun"),
        (("slurm", "openmpi"), "openmpi"),
        (("slurm", "mpich"), "mpich"),
        (("slurm", "flux"), "flux"),
        (("flux", "openmpi"), "openmpi"),
        (("openmpi", "jsrun"), "jsrun"),
        (("mpich", "intelmpi"), "intelmpi"),
        (("slurm", "ray"), "ray"),
        (("slurm", "environment"), "slurm"),
        (("openmpi", "environment"), "openmpi"),
        (("pmi", "slurm"), "slurm"),  # srun --mpi=pmi2
        (("pmix", "slurm"), "slurm"),
    ],
)
def test_the_innermost_launcher_counts(names, expected):
    """Several launchers, one inside the other: the innermost, whatever the order of the variables."""
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "11"}
    together = [pmi if name == "pmi" else RECORDED[name] for name in names]
    for order in (together, together[::-1]):
        assert started_by({key: value for part in order for key, value in part.items()}).launcher == expected


def test_the_script_that_sbatch_runs_is_no_rank():
    """sbatch's script and salloc's shell have Slurm's variables, and are not among the tasks of a step."""
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4", "SLURM_NODEID": "0"}
    assert started_by(batch).launcher == started_by({"SLURM_NTASKS": "8"}).launcher == "none"


@pytest.mark.parametrize(("name", "value", "other"), [("RANK", "3", "WORLD_SIZE"), ("WORLD_SIZE", "4", "RANK")])
def test_half_of_the_variables(name, value, other):
    """One variable of two: refused, with the one that is missing; no rank takes itself for a world of one."""
    with pytest.raises(ConnectError) as error:
        started_by({name: value})
    assert (error.value.variable, error.value.evidence) == (other, {name: value})


def test_started_alone():
    """No variables, or those of the only rank: nobody started it, and it is a world of one."""
    assert started_by({}, host="here") == started_by({"RANK": "0"}, host="here")
    assert started_by({"WORLD_SIZE": "1"}, host="here") == started_by({}, host="here")
    assert started_by({}, host="here") == Launch("none", local_rank=0, local_world_size=1, host="here")


# -- Slurm -------------------------------------------------------------------------------------------------------------


def test_a_heterogeneous_job():
    """Three tasks, two on the first node and one on the second, as Slurm 22 tells them: one world."""
    result = started_by(
        {
            "SLURM_HET_SIZE": "2",
            "SLURM_PROCID": "2",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "2",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "2,1",
        }
    )
    assert (result.rank, result.world_size, result.local_rank, result.local_world_size) == (2, 3, 0, 1)
    assert result.meeting == "node1:29502"


@pytest.mark.parametrize(
    ("text", "node", "here"), [("4", "0", 4), ("4(x2)", "1", 4), ("4(x2),2", "2", 2), (" 4(x1) , 3", "1", 3)]
)
def test_slurms_tasks_on_this_node(text, node, here):
    """Slurm's list of tasks per node gives those of this node."""
    result = started_by({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node})
    assert result.local_world_size == here


def test_steps_of_one_job_meet_at_ports_of_their_own():
    """Two steps that run at once on the same first node do not meet each other, nor do two mpiruns on this host."""
    ports = {started_by({**SLURM, "SLURM_STEP_ID": str(step)}).port for step in range(4)}
    assert len(ports) == 4
    here = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    assert started_by(here).meeting == "127.0.0.1:29500"
    assert len({started_by({**here, "PMIX_NAMESPACE": f"193973452{job}"}).meeting for job in range(4)}) == 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_what_is_written_is_read(tasks, data):
    """The variables that the table writes for a rank are read back as that rank, for torchrun and for srun."""
    node = data.draw(st.integers(0, len(tasks) - 1))
    local = data.draw(st.integers(0, tasks[node] - 1))
    rank, size = sum(tasks[:node]) + local, sum(tasks)
    place = {"local_rank": local, "local_world_size": tasks[node], "node": node}
    for result in (
        started_by(torchrun_variables(rank, size, **place, address="node1")),
        started_by(srun_variables(rank, local_rank=local, node=node, tasks=tasks, hosts=f"node[1-{len(tasks)}]")),
    ):
        assert (result.rank, result.world_size, result.local_rank) == (rank, size, local)
        assert (result.local_world_size, result.meeting) == (tasks[node], "node1:29500")


# -- Kubernetes --------------------------------------------------------------------------------------------------------

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "master-0", "MASTER_PORT": "23456"}
INDEXED = {**POD, "JOB_COMPLETION_INDEX": "3"}
TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**POD, "RANK": "2", "WORLD_SIZE": "4", "PYTHONUNBUFFERED": "1"}, (2, 4, "master-0:23456")),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "1"}, (2, 4, "node-0-0.train:29400")),
        ({**INDEXED, "WORLD_SIZE": "4"}, (3, 4, "master-0:23456")),
        ({**INDEXED, "JOB_INDEX": "1", "PROCESSES_IN_JOB": "4", "WORLD_SIZE": "8"}, (7, 8, "master-0:23456")),
    ],
    ids=["PyTorchJob", "TrainJob", "indexed Job", "JobSet"],
)
def test_a_pod_is_a_rank(variables, expected):
    """The number of the operator, of the node, or of the completion, to which a JobSet adds the jobs before it."""
    result = started_by(variables)
    assert (result.rank, result.world_size, result.meeting) == expected
    assert (result.launcher, result.local_rank, result.local_world_size) == ("kubernetes", None, 1)


def test_pods_without_their_number():
    """Several processes of a node, which torchrun has to start; an index of a job of unknown size."""
    with pytest.raises(ConnectError) as error:
        started_by({**TRAINJOB, "PET_NPROC_PER_NODE": "8"})
    assert (error.value.variable, error.value.received) == ("PET_NPROC_PER_NODE", "8")
    with pytest.raises(ConnectError) as error:
        started_by(INDEXED)
    assert (error.value.variable, error.value.launcher) == ("WORLD_SIZE", "kubernetes")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "name", "text"),
    [
        ("torchrun", "MASTER_PORT", "garbage"),
        ("torchrun", "MASTER_PORT", "0"),
        ("torchrun", "MASTER_PORT", "65536"),
        ("torchrun", "MASTER_PORT", "٢٩"),
        ("torchrun", "RANK", "8"),
        ("torchrun", "RANK", "-1"),
        ("torchrun", "WORLD_SIZE", "0"),
        ("torchrun", "WORLD_SIZE", "9" * 5000),
        ("torchrun", "LOCAL_RANK", "1.5"),
        ("torchrun", "LOCAL_WORLD_SIZE", "four"),
        ("slurm", "SLURM_STEP_NUM_TASKS", "eight"),
        ("slurm", "SLURM_PROCID", "x"),
        ("slurm", "SLURM_JOB_ID", "12_3"),
        ("openmpi", "OMPI_COMM_WORLD_RANK", "8"),
        ("flux", "FLUX_JOB_SIZE", "2:4"),
        *(("slurm", "SLURM_STEP_TASKS_PER_NODE", text) for text in ("four", "4(x2", "4(2)", "4,,2", "4;2")),
    ],
)
def test_what_no_launcher_writes_is_refused(base, name, text):
    """The variable, what it holds, the rule and the remedy, as text and as attributes, and what was read before."""
    with pytest.raises(ConnectError) as error:
        started_by({**RECORDED[base], name: text})
    assert (error.value.variable, error.value.received) == (name, text)
    assert str(error.value).startswith(f"{name}=")
    assert error.value.evidence[name] == text


@pytest.mark.parametrize(
    ("variables", "both"),
    [
        ({**SLURM, "RANK": "4", "WORLD_SIZE": "8"}, ("RANK=4", "SLURM_PROCID=5 of 8")),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "16"}, ("WORLD_SIZE=16", "SLURM_PROCID=5 of 8")),
        ({**OPENMPI, "RANK": "0", "WORLD_SIZE": "2"}, ("RANK=0", "OMPI_COMM_WORLD_RANK=5 of 8")),
        ({**HAND, **RENDEZVOUS, "LOCAL_RANK": "4"}, ("LOCAL_RANK=4", "4 ranks on this host")),
        ({**HAND, **RENDEZVOUS, "RANK": "1", "LOCAL_RANK": "2"}, ("LOCAL_RANK=2", "RANK=1")),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_values(variables, both):
    """Two variables that cannot both be true: both are in the message."""
    with pytest.raises(ConnectError, match=r"contradicts") as error:
        started_by(variables)
    assert all(value in str(error.value) for value in both), str(error.value)


def test_tasks_that_start_several_ranks_each():
    """Each task of srun starts two ranks, as torchrun would, and numbers them: the numbers count."""
    result = started_by(
        {**SLURM, **RENDEZVOUS, "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    )
    assert (result.launcher, result.rank, result.world_size) == ("environment", 11, 16)


def test_a_list_of_hosts_that_is_none():
    """What is no list of hosts is refused with its text, unless MASTER_ADDR says where the ranks meet."""
    with pytest.raises(ConnectError) as error:
        started_by({**SLURM, "SLURM_STEP_NODELIST": "node[1-"})
    assert error.value.received == "node[1-"
    assert started_by({**SLURM, "SLURM_STEP_NODELIST": "node[1-", "MASTER_ADDR": "x"}).address == "x"
