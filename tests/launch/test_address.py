"""Names that no resolver knows: Slurm is asked, within a limit, and what it says is checked."""

import time
from dataclasses import replace

import pytest
from tests import limits

from rankmesh.errors import ConnectError
from rankmesh.launch.address import resolved
from rankmesh.launch.started import started_by
from rankmesh.launch.table import srun_variables

SRUN = {
    **srun_variables(1, local_rank=0, node=1, tasks=(1, 1), hosts="gpu-a.invalid,gpu-b.invalid"),
    "SLURM_JOB_ID": "7",
}
GETADDRS = 'case "$1" in getaddrs) echo "$2: %s";; *) echo "invalid keyword: $1" >&2; exit 1;; esac'
SHOW_NODE = (
    'case "$1" in show) printf "NodeName=$3 \\n   NodeAddr=%s NodeHostName=vm\\n";; *) echo no >&2; exit 1;; esac'
)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a stand-in for scontrol on the PATH, which runs these lines of sh."""

    def stand_in(lines):
        path = tmp_path / "scontrol"
        path.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n{lines}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return stand_in


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        (GETADDRS % "127.0.0.9:6818", "127.0.0.9"),
        (GETADDRS % "[::1]:6818", "::1"),
        (SHOW_NODE % "127.0.0.8", "127.0.0.8"),
        (SHOW_NODE % "localhost", "localhost"),
    ],
)
def test_slurm_knows_the_address_of_a_node(scontrol, lines, address):
    """A node whose name does not resolve is met at the address that scontrol has of it, at the same port."""
    scontrol(lines)
    launch = started_by(SRUN)
    found = resolved(launch, environment=SRUN)
    assert (found.address, found.port, found.rank) == (address, launch.port, 1)
    assert replace(found, address=launch.address) == launch


@pytest.mark.parametrize(
    ("lines", "output"),
    [
        ("exec sleep 6", "scontrol did not answer within 0.5 s"),
        ("sleep 6 & sleep 6", "scontrol did not answer within 0.5 s"),
        (SHOW_NODE % "gpu-a.invalid", "scontrol show node gpu-a.invalid names no address that resolves"),
        (GETADDRS % "0.0.0.0:0", "scontrol show node gpu-a.invalid names no address that resolves"),
        ("exit 1", "scontrol show node gpu-a.invalid names no address that resolves"),
    ],
)
def test_slurm_does_not_know_it(scontrol, lines, output):
    """Slurm that hangs, fails or knows no better: refused in time, with the host and what Slurm said."""
    scontrol(lines)
    began = time.monotonic()
    with pytest.raises(ConnectError, match=r"^host gpu-a\.invalid on rank 1 does not resolve \(") as refused:
        resolved(started_by(SRUN), 0.5, SRUN)
    assert time.monotonic() - began < limits.AT_ONCE
    assert output in str(refused.value)
    assert str(refused.value).endswith("by which every rank reaches the host of rank 0")


def test_slurm_is_asked_only_where_it_may_know(scontrol):
    """A name that resolves, a rank outside of a Slurm job, and what is not the name of a node: Slurm is not asked."""
    requested = scontrol(GETADDRS % "127.0.0.9:6818")
    here = {**SRUN, "MASTER_ADDR": "127.0.0.1"}
    assert resolved(started_by(here), environment=here).address == "127.0.0.1"
    outside = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu-a.invalid"}
    with pytest.raises(ConnectError, match=r"^MASTER_ADDR=gpu-a\.invalid on rank 0 does not resolve"):
        resolved(started_by(outside), environment=outside)
    odd = {**SRUN, "MASTER_ADDR": "--all.invalid"}
    with pytest.raises(ConnectError, match=r"'--all\.invalid' is not the name of a node"):
        resolved(started_by(odd), environment=odd)
    assert not requested.exists()


def test_a_host_without_scontrol(monkeypatch, tmp_path):
    """In a container without Slurm's commands the message says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectError, match="Slurm does not know its address \\(scontrol is not on the PATH\\)"):
        resolved(started_by(SRUN), environment=SRUN)
