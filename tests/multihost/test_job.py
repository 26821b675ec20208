"""What launchers put into the environment, as a job: torchrun's, Slurm's, none, or an error that says which."""

import pytest

import rankmesh as rm
from rankmesh.check.in_job import check_in_job
from rankmesh.check.results import collect
from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.job import JobRank, job_rank

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_LAUNCH_NODE_IPADDR": "node7",
}


def test_torchrun():
    """One of 8 ranks of torchrun is what its variables say, inside a Slurm job too."""
    expected = JobRank(5, 8, 1, 4, "node0", 29400)
    assert job_rank(TORCHRUN) == job_rank({**SLURM, **TORCHRUN}) == expected


def test_slurm():
    """One of 8 ranks of srun meets at the launching node, at a port of its job."""
    assert job_rank(SLURM) == JobRank(5, 8, 1, 4, "node7", 29956)
    assert job_rank({**SLURM, "MASTER_ADDR": "node3", "MASTER_PORT": "30000"}) == JobRank(5, 8, 1, 4, "node3", 30000)


def test_started_alone():
    """No variables, or a Slurm allocation with a single task: no job."""
    assert job_rank({}) is None
    assert job_rank({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert job_rank({"SLURM_NTASKS": "8"}) is None
    assert job_rank({"RANK": "0"}) is None


@pytest.mark.parametrize(
    ("text", "here"),
    [("4", 4), ("4(x2)", 4), ("4(x2),2", 4), ("2,4(x2)", 4), (" 4(x1) , 3", 4), ("", 8)],
)
def test_slurms_tasks_per_node(text, here):
    """8 ranks: Slurm's lists of tasks per node give the fullest host, under either of the two names."""
    plain = {key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"}
    assert job_rank({**plain, "SLURM_NTASKS_PER_NODE": text}).local_world_size == here
    assert job_rank({**plain, "SLURM_TASKS_PER_NODE": text}).local_world_size == here


def test_what_is_not_set_has_a_default():
    """8 ranks without local variables or port: local rank 0 of 8, port 29500; empty is not set."""
    few = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "node0"}
    assert (
        job_rank(few) == job_rank({**few, "MASTER_PORT": "", "LOCAL_RANK": ""}) == JobRank(0, 8, 0, 8, "node0", 29500)
    )


@pytest.mark.parametrize(
    ("base", "name", "text"),
    [
        (TORCHRUN, "MASTER_PORT", "garbage"),
        (TORCHRUN, "MASTER_PORT", "0"),
        (TORCHRUN, "MASTER_PORT", "65536"),
        (TORCHRUN, "MASTER_PORT", "٢٩"),
        (TORCHRUN, "RANK", "8"),
        (TORCHRUN, "RANK", "-1"),
        (TORCHRUN, "RANK", ""),
        (TORCHRUN, "WORLD_SIZE", "0"),
        (TORCHRUN, "WORLD_SIZE", "9" * 5000),
        (TORCHRUN, "LOCAL_RANK", "1.5"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "four"),
        (SLURM, "SLURM_NTASKS", "eight"),
        (SLURM, "SLURM_PROCID", "x"),
        (SLURM, "SLURM_JOB_ID", "12_3"),
    ],
)
def test_what_is_no_number_is_refused(base, name, text):
    """One of 8 ranks: the variable, what it holds, the rule and the remedy, as text and as attributes."""
    with pytest.raises(ConnectError, match=r"it is a whole number from .* to .*; start the ranks with") as error:
        job_rank({**base, name: text})
    assert (error.value.variable, error.value.received) == (name, text)
    assert str(error.value).startswith(f"received {name}=")


@pytest.mark.parametrize("text", ["four", "4(x2", "4(2)", "4,,2", "4;2"])
def test_tasks_per_node_that_slurm_does_not_write(text):
    """One of 8 ranks: the list of tasks is refused as received."""
    with pytest.raises(ConnectError, match="Slurm writes 4 or") as error:
        job_rank({**SLURM, "SLURM_NTASKS_PER_NODE": text})
    assert error.value.received == text


def test_a_job_without_a_meeting_place():
    """8 ranks without MASTER_ADDR: the error says what to set."""
    with pytest.raises(ConnectError, match=r"without MASTER_ADDR; .* set MASTER_ADDR and MASTER_PORT"):
        job_rank({key: value for key, value in TORCHRUN.items() if key != "MASTER_ADDR"})


def test_a_plan_for_another_world_size():
    """A plan for 4 ranks in a job of 8 is refused, before a rank meets another."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp")])
    with pytest.raises(PlanError, match=r"a plan for 4 ranks in a job of 8; .* start 4 ranks"):
        check_in_job(plan, job_rank(TORCHRUN))


def test_the_rank_that_failed_first_is_the_cause():
    """4 ranks: one raises an error of its own, two see a closed connection, one ends well: the first is the cause."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp")])
    closed = [{"event": "failed", "kind": "RuntimeError", "message": "Connection closed by peer"}]
    wrong = [{"event": "failed", "kind": "TypeError", "message": "wrong"}]
    result = collect(plan, {0: closed, 1: closed, 2: [{"event": "done"}], 3: wrong}, 1.0)
    assert [failure.rank for failure in result.failures] == [3, 0, 1]
    assert [failure.rank for failure in result.causes] == [3]
