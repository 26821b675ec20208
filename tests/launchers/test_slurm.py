"""rankmesh under a real Slurm of four nodes: sbatch, salloc, a heterogeneous job, a rank that is killed."""

import re
import sys

import pytest
from tests.launchers.conftest import BIN, reported
from tests.launchers.starts import FIRST_NODES, LOST_IN_USE, PATH, SURVIVED, SURVIVES, survived

import rankmesh as rm


def test_four_lines_under_sbatch(slurm, script):
    """2 ranks on two nodes, from the script of a batch job, which is no rank itself."""
    batch = slurm.folder / "job.sh"
    where = f"{BIN}/rankmesh where --json | grep launcher"
    batch.write_text(f"#!/bin/bash\n{where}\nsrun {sys.executable} {script} dp=*\n", encoding="utf-8")
    done = slurm.batch(slurm.folder / "out", "-N2", "-n2", *FIRST_NODES, batch)
    assert done.returncode == 0, done
    assert '"launcher": "none"' in done.stdout
    found = reported(done)
    assert [(*line[:2], line[4], line[6]) for _, line in sorted(found.items())] == [
        ("slurm", 2, "node1", 2),
        ("slurm", 2, "node2", 2),
    ]


@pytest.mark.nightly
def test_salloc_from_another_node(slurm, script):
    """2 ranks on two nodes of an allocation, whose shell is on this host, which is none of them."""
    done = slurm.run("salloc", "-N2", "-n2", *FIRST_NODES, "srun", sys.executable, script, "dp=*")
    found = reported(done)
    assert sorted(found) == [0, 1]
    assert {line[5].partition(":")[0] for line in found.values()} == {"node1"}


@pytest.mark.nightly
def test_nodes_whose_names_do_not_resolve(slurm, script):
    """2 ranks on two nodes whose names no resolver knows: they meet at the address that Slurm has of the first."""
    unknown = f'mount --bind {slurm.folder}/no-hosts /etc/hosts && ! getent hosts node1 >&2 && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", unknown, "sh", sys.executable, script, "dp=*")
    done = slurm.run("srun", "-N2", "-n2", *FIRST_NODES, *inside)
    found = reported(done)
    assert sorted(found) == [0, 1]
    assert {line[5].partition(":")[0] for line in found.values()} == {"127.0.0.11"}


def test_a_heterogeneous_job(slurm, script):
    """3 ranks, two of one component and one of another: one world, numbered through."""
    srun = ("srun", "-N1", "-n2", sys.executable, script, "dp=*", ":", "-N1", "-n1", sys.executable, script, "dp=*")
    found = reported(slurm.run(*srun))
    assert [found[rank][1:4] for rank in range(3)] == [(3, 0, 2), (3, 1, 2), (3, 0, 1)]
    assert {line[6] for line in found.values()} == {3}


def test_what_scontrol_shows_of_the_network(slurm):
    """The network that Slurm itself prints is the one of its file."""
    shown = slurm.folder / "shown"
    shown.write_text(slurm.run("scontrol", "show", "topology").stdout, encoding="utf-8")
    assert rm.Cluster.read(shown) == rm.Cluster.read(slurm.folder / "topology.conf")
    assert [host.places for host in rm.Cluster.read(shown).hosts] == [("leaf1", "spine")] * 2 + [("leaf2", "spine")] * 2


def test_a_rank_that_is_killed(slurm):
    """4 ranks, one is killed, and Slurm leaves the others alone: they name it, and it alone, each with status 5."""
    phases = (sys.executable, "-m", "tests.check.phases", "use", "2", "SIGKILL")
    srun = ("srun", "-N4", "-n4", "--kill-on-bad-exit=0", "--chdir", "/", "--export=ALL")
    done = slurm.run(*srun, *phases, "tp=2,dp=2", "--timeout", "10", **PATH)
    assert re.findall("error: lost (.*?);", done.stderr) == [LOST_IN_USE], done.stderr
    assert "every group was proved" not in done.stdout
    ended = dict(re.findall(r"srun: error: node(\d): task \d: (.*)", done.stderr))
    assert ended == {**dict.fromkeys("124", "Exited with exit code 5"), "3": "Killed"}, done.stderr


def test_a_job_survives_the_loss_of_a_rank(slurm):
    """4 ranks on four nodes, one of them a spare, one killed: srun leaves the others alone, and they go on."""
    done = slurm.run("srun", "--no-kill", "--kill-on-bad-exit=0", "-N4", "-n4", sys.executable, SURVIVES)
    assert survived(done) == SURVIVED, done
