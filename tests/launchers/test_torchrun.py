"""torchrun across two hosts, which are namespaces of this machine, with two of its rendezvous backends."""

import os
import re

import pytest
from tests.launchers.conftest import BIN, needs, told

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are network namespaces, which Linux has")


def _both(hosts, script, backend, *words):
    launcher = ("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", backend)
    ends = ("--rdzv-endpoint", f"{hosts[0].name}:29400", "--rdzv-id", "job")
    commands = [
        host.start(*launcher, *ends, *(("--node-rank", rank) if backend == "static" else ()), script, *words)
        for rank, host in enumerate(hosts)
    ]
    return [(command, *command.communicate(timeout=80)) for command in commands]


class Done:
    """The ends of both commands as one."""

    def __init__(self, both):
        self.returncode = max(abs(command.returncode) for command, _, _ in both)
        self.stdout = "".join(out for _, out, _ in both)
        self.stderr = "".join(err for _, _, err in both)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_four_lines_on_two_hosts(hosts, script, backend):
    """4 ranks, two on each host: each knows its host, and all of them meet, whoever serves torchrun's store."""
    needs("two hosts", "ip", "unshare")
    found = told(Done(_both(hosts, script, backend, "tp=2,dp=*")))
    assert [found[rank][:2] for rank in range(4)] == [("torchrun", 4)] * 4
    assert sorted(found[rank][4] for rank in range(4)) == ["hosta", "hosta", "hostb", "hostb"]


def test_a_wrong_size_on_two_hosts(hosts, script):
    """4 ranks for a plan of 8: refused on each host, with both sizes."""
    needs("two hosts", "ip", "unshare")
    done = Done(_both(hosts, BIN / "rankmesh", "c10d", "check", "tp=8"))
    assert done.returncode != 0
    assert len(re.findall("received a plan for 8 ranks in a job of 4", done.stderr)) >= 2
