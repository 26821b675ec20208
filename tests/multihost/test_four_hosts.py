"""Ranks on four hosts: a host is lost, or the network is cut into parts: one job goes on, or none."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.multihost.four_hosts import LIMIT, STEPS, TIMEOUT
from tests.sweeping import ALL, every

from bench.emulated import problem

pytestmark = [
    pytest.mark.skipif(not os.environ.get("RANKMESH_CLUSTER"), reason="hosts are emulated: make test-cluster"),
    pytest.mark.timeout(LIMIT + 90),
]
HOSTS, RANKS = frozenset(range(4)), 4


@pytest.fixture
def hosts(tmp_path):
    """Run the job with its losses: what each rank of each host reported, None for one that was killed."""
    if reason := problem():
        pytest.skip(reason)

    def run(*losses, ranks=RANKS, tp=4):
        command = [sys.executable, "-m", "tests.multihost.four_hosts", str(tmp_path), str(ranks), str(tp), *losses]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=LIMIT + 60, env=environment, cwd=Path(__file__).parents[2])
        ended = json.loads((tmp_path / "ended.json").read_text())
        assert ended["ranks"] == list(range(4 * ranks)), "a rank did not end by itself"
        paths = [tmp_path / f"rank-{rank}.json" for rank in range(4 * ranks)]
        reports = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        for report in filter(None, reports):
            report["ended"] -= ended["lost"][-1]
        return [reports[ranks * host : ranks * (host + 1)] for host in HOSTS]

    return run


def _went_on(reports, hosts, sizes):
    """The ranks of these hosts ended in one job; ``sizes`` are those of dp in its epochs, one after the other."""
    found = [value for host in hosts for value in reports[host]]
    assert all(value and "error" not in value for value in found), found
    assert {value["dp"] for value in found} == {sizes[-1]}
    assert {value["epoch"] for value in found} == {len(sizes) - 1}
    counts = {count for value in found for count in value["count"]}
    assert len(counts) == 1
    steps = [4 * size for size in sizes]  # ranks that a step counts
    assert STEPS * steps[-1] < counts.pop() < STEPS * steps[0]


def _ended(reports, hosts):
    """The ranks of these hosts ended with an error, and did nothing more."""
    found = [value for host in hosts for value in reports[host]]
    assert all(value and value["error"].startswith("ConnectError: ") for value in found), found


@pytest.mark.parametrize("loss", every(4, ["kill 0", "kill 2", "off 0", "off 3"]))
def test_a_host_dies(hosts, loss):
    """Its four processes are killed, also those of rank 0, which served the store; in some its link is gone, too."""
    lost = int(loss[-1])
    reports = hosts(loss)
    assert reports[lost] == [None] * 4
    _went_on(reports, HOSTS - {lost}, [4, 3])


@pytest.mark.nightly
@pytest.mark.parametrize("lost", every(2, [0, 2]))
def test_a_host_is_cut_off(hosts, lost):
    """Its processes live on: they end with an error, and the twelve others go on."""
    reports = hosts(f"cut {lost}")
    _ended(reports, {lost})
    _went_on(reports, HOSTS - {lost}, [4, 3])


def test_a_network_in_two_halves(hosts):
    """Eight ranks here and eight there: those with rank 0 go on, and the others do not."""
    reports = hosts("halves")
    _ended(reports, {2, 3})
    _went_on(reports, {0, 1}, [4, 2])


@pytest.mark.skipif(not ALL, reason="make test-sweeps SWEEP=all runs it")
def test_two_halves_after_a_loss(hosts):
    """Once the first host is lost, four ranks here and eight there: the eight go on."""
    reports = hosts("kill 0", "halves")
    assert reports[0] == [None] * 4
    _ended(reports, {1})
    _went_on(reports, {2, 3}, [4, 3, 2])


@pytest.mark.parametrize(
    ("parts", "going_on"),
    every(
        2,
        [
            ("reject 0|123", {1, 2, 3}),  # rank 0 alone
            ("reject 01|23", {0, 1}),
            ("one-way 01|23", {0, 1}),
            ("drop 0|1|23", set()),
            ("reject 012|3", {0, 1, 2}),
            ("one-way 123|0", {1, 2, 3}),
            ("reject 0|1|23", set()),
            ("drop 0|123", {1, 2, 3}),
            ("drop 01|23", {0, 1}),
            ("reject 0|1|2|3", set()),
        ],
    ),
)
def test_a_network_in_parts(hosts, parts, going_on):
    """One rank on each host: one part goes on, or none; the ranks of the others end soon, and say why."""
    if shutil.which("iptables") is None:
        pytest.skip("hosts refuse connections by iptables")
    reports = hosts(parts, ranks=1, tp=1)
    found = [reports[host][0] for host in HOSTS]
    on = [value for host, value in enumerate(found) if host in going_on]
    assert {(value.get("epoch"), value.get("dp")) for value in on} <= {(1, len(going_on))}, found
    for host in HOSTS - going_on:
        assert found[host].get("error", "").startswith("ConnectError: "), found
        assert "the others" in found[host]["error"], found
        assert found[host]["ended"] < 8 * TIMEOUT, found  # five of them in a call of gloo
