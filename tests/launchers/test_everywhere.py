"""What holds under every launcher: where, check, measure, cluster, the four lines, and the messages of two failures."""

import json
import re
from functools import partial

import pytest
from tests.launchers.conftest import needs, reported_by_rank
from tests.launchers.starts import (
    HYDRA,
    LIMIT,
    LOST_IN_USE,
    OPENMPI,
    PATH,
    STARTS,
    chained,
    on_two_hosts,
    python,
    torchrun_under_slurm,
    under_slurm,
)
from tests.multihost.conftest import two_hosts

SPEC = "tp=2,dp=*"
COMMANDS = {
    "where": ("where", "--json"),
    "check": ("check", SPEC, "--timeout", "30", "--json"),
    "measure": ("measure", SPEC, "--sizes", "4KiB", "--timeout", "30", "--json"),
    "cluster": ("cluster", "--timeout", "30", "--json"),
    "wrong": ("check", "tp=16", "--timeout", "30"),
}


@pytest.fixture(scope="module")
def start(request, run):
    """How a launcher starts Python on its ranks; skipped where it is not there."""

    def mpi(what, *command):
        needs(what, command[0])
        return lambda *arguments: [run(*command, "4", *python(*arguments), limit=LIMIT, **PATH)]

    def slurm(how):
        return partial(how, request.getfixturevalue("slurm"))

    def torchrun(backend):
        needs("two hosts", "ip", "unshare")
        return partial(on_two_hosts, request.getfixturevalue("both_hosts"), backend)

    return {
        "slurm": lambda: slurm(under_slurm),
        "torchrun in slurm": lambda: slurm(torchrun_under_slurm),
        "openmpi": lambda: mpi("Open MPI", *OPENMPI),
        "mpich": lambda: mpi("MPICH", *HYDRA),
        "c10d": lambda: torchrun("c10d"),
        "static": lambda: torchrun("static"),
    }


@pytest.fixture(scope="module")
def both_hosts():
    """Two hosts for all of these tests."""
    with two_hosts() as hosts:
        yield hosts


# The others start ranks as one of these does.
FEW = ("slurm", "openmpi", "c10d")
EVERY = [pytest.param(name, marks=() if name in FEW else pytest.mark.nightly) for name in STARTS]


@pytest.fixture(scope="module", params=EVERY)
def ran(request, start, script, tmp_path_factory):
    """A launcher's ranks, and what came of each command and of the four lines on them."""
    folder = tmp_path_factory.mktemp("chain")
    return STARTS[request.param], chained(start[request.param](), folder, {**COMMANDS, "script": (str(script), SPEC)})


def _responds(ranks):
    """The data of the one rank that speaks; all ended well."""
    assert [rank["status"] for rank in ranks] == [0] * len(ranks), ranks
    (text,) = (rank["out"] for rank in ranks if rank["out"])
    return json.loads(text)


def test_where_each_rank_is(ran):
    """Each rank: its launcher, its numbers, its host, the place where all of them meet, and the evidence for it."""
    start, found = ran
    output = [json.loads(rank["out"]) for rank in found["where"]]
    for rank, one in enumerate(output):
        assert (one["launcher"], one["rank"], one["world_size"]) == (start.launcher, rank, start.size)
        assert (one["local_rank"], one["local_world_size"]) == (rank % start.each, start.each)
        assert one["evidence"]
        assert one["missing"] is None
    assert len({one["meeting"] for one in output}) == 1
    assert output[0]["meeting"].startswith(start.place)
    hosts = [one["host"] for one in output]
    assert hosts == [hosts[rank - rank % start.each] for rank in range(start.size)]
    assert sorted(set(hosts)) == sorted(start.hosts)
    assert hosts[:: start.each] == list(start.hosts) or not start.ordered


def test_a_check(ran):
    """Every group is proved by one job of all ranks, of which one speaks."""
    start, found = ran
    result = _responds(found["check"])
    assert (result["ok"], result["world_size"], result["failures"]) == (True, start.size, [])


def test_a_measurement(ran):
    """Each kind of group is timed on the ranks of the job, one of which speaks."""
    start, found = ran
    result = _responds(found["measure"])
    assert {kind["name"] for kind in result["kinds"]} == {"tp", "dp"}
    assert all(kind["seconds"] > 0 for kind in result["kinds"])
    assert {host for kind in result["kinds"] for host in kind["slowest"]["hosts"]} <= set(start.hosts)


def test_the_cluster(ran):
    """The ranks find out which hosts they are on, how many on each, and under Slurm behind which switches."""
    start, found = ran
    result = _responds(found["cluster"])
    assert [(host["name"], host["devices"]) for host in result["hosts"]] == [(host, start.each) for host in start.hosts]
    assert [level["name"] for level in result["levels"]] == ["host", *start.levels]


def test_four_lines(ran):
    """The script of the README: each rank knows its place, and each sum has its ranks."""
    start, found = ran
    assert [rank["status"] for rank in found["script"]] == [0] * start.size, found["script"]
    output = reported_by_rank("".join(rank["out"] for rank in found["script"]))
    assert [output[rank][:4] for rank in range(start.size)] == [
        (start.launcher, start.size, rank % start.each, start.each) for rank in range(start.size)
    ]
    assert {line[6] for line in output.values()} == {start.size // 2}


def test_a_wrong_size(ran):
    """A plan for another number of ranks is refused by each of them, with both numbers, status 3, and no traceback."""
    start, found = ran
    for rank in found["wrong"]:
        assert f"the plan is for 16 ranks, but the job has {start.size};" in rank["err"]
        assert (rank["status"], "Traceback" in rank["err"]) == (3, False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torchrun in slurm", "c10d", "static"])
def test_a_rank_that_is_killed(name, start):
    """A check in which rank 2 is killed ends torchrun in failure, and whoever speaks before names that rank alone."""
    ends = start[name]()("-m", "tests.check.phases", "use", "2", "SIGKILL", SPEC, "--timeout", "5")
    output = "".join(end.stderr for end in ends)
    assert set(re.findall(r"error: lost (.*?);", output)) == {LOST_IN_USE}, output
    assert all(end.returncode for end in ends)
    assert "every group was proved" not in "".join(end.stdout for end in ends)
