"""``rankmesh where``: what started this process, and the evidence; what is missing, or contradicts itself."""

import json
import time
from datetime import datetime

import pytest
import torch

from rankmesh.backend.releases import missing
from rankmesh.cli.run.where import where
from rankmesh.errors import ConnectError
from rankmesh.launch.table import LAUNCHERS, srun_variables

SRUN = {**srun_variables(5, local_rank=1, node=1, tasks=(4, 4), hosts="127.0.0.1,127.0.0.2"), "SLURM_JOB_ID": "7"}
KEYS = ["launcher", "rank", "world_size", "local_rank", "local_world_size", "host", "meeting"]


@pytest.fixture(autouse=True)
def _nobody(monkeypatch):
    """No launcher's variables but those of the test."""
    for row in LAUNCHERS:
        for name in (*row.marks, row.rank, row.size, "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)


def test_a_task_of_srun(rankmesh, monkeypatch):
    """Every fact beside the variable and the value that say so; as JSON the keys are stable."""
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    shown = {line.split("  ")[0]: line for line in rankmesh("where").out.splitlines()}
    assert "slurm" in shown["launcher"]
    assert "5 of 8" in shown["rank"]
    assert "SLURM_PROCID=5" in rankmesh("where").out
    data = json.loads(rankmesh("where", "--json").out)
    assert list(data)[:7] == KEYS
    assert (data["launcher"], data["rank"], data["meeting"]) == ("slurm", 5, "127.0.0.1:29507")
    assert data["evidence"]["SLURM_STEP_NODELIST"] == "127.0.0.1,127.0.0.2"
    assert data["missing"] is None


def test_the_machine(rankmesh, monkeypatch):
    """Started by nobody, a world of one; and what a report of a fault needs: versions, interfaces, limits; no key."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("RANKMESH_JOB_KEY", "secret")
    data = json.loads(rankmesh("where", "--json").out)
    assert (data["launcher"], data["rank"], data["world_size"], data["evidence"]) == ("none", 0, 1, {})
    found = data["machine"]
    assert (found["torch"], found["groups"]) == (torch.__version__, "by their members")
    assert found["interfaces"]["lo"] == "127.0.0.1"
    assert found["limits"]["open files"] is None or found["limits"]["open files"] > 0
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "RANKMESH_JOB_KEY" not in found["variables"]
    assert abs(datetime.fromisoformat(found["clock"]).timestamp() - time.time()) < 60
    monkeypatch.setenv("RANKMESH_TEST_PUBLIC", "1")
    missing.cache_clear()
    try:
        assert "groups      through torch's public API: RANKMESH_TEST_PUBLIC is set" in rankmesh("where").out
    finally:
        missing.cache_clear()


def test_what_is_missing(rankmesh, monkeypatch):
    """A meeting place that nobody tells, or that does not resolve: said on stderr, in the data, and by status 6."""
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    for installed, message in ((None, "the rendezvous address: MASTER_ADDR is not set, and mpi4py"), (True, "")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, installed=installed: installed)
        assert where(mpich).missing[:56] == message[:56]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    done = rankmesh("where", "--json")
    assert "MASTER_ADDR=no-such-host.invalid on rank 0 does not resolve" in done.err
    assert "does not resolve" in json.loads(done.out)["missing"]
    assert done.code == 6


def test_what_contradicts_itself(rankmesh, monkeypatch):
    """Two variables that cannot both be true: what was read, one error with both values, and status 6."""
    for name, value in {**SRUN, "RANK": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    done = rankmesh("where")
    assert done.code == 6
    assert "RANK=4 of WORLD_SIZE=8 contradicts slurm's SLURM_PROCID=5 of 8" in done.err
    assert "SLURM_PROCID" in done.out
    assert json.loads(rankmesh("where", "--json").out)["evidence"]["RANK"] == "4"
    assert "contradicts" in json.loads(rankmesh("where", "--json").out)["missing"]
    assert rankmesh("check", "tp=*").code == rankmesh("cluster").code == 6
    with pytest.raises(ConnectError):
        where({"RANK": "9", "WORLD_SIZE": "8"})
