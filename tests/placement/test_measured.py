from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.placement.dumb import cost

import rankmesh as rm
from rankmesh.core.clusters.cluster import Cluster, Level
from rankmesh.core.measured import HOP, GroupTime, Measured, Measurement, measurement
from rankmesh.placement import Message
from rankmesh.placement.calibrated import calibrated

PLAN = rm.Plan(rm.Mesh(tp=2, dp=2, pp=2), [rm.GroupSpec(name) for name in ("tp", "dp", "pp")])
CLUSTER = Cluster.parse("host=2,leaf=2,spine=2", hosts="node[1-4]")
HOSTS = tuple(CLUSTER.host_of(rank).name for rank in range(8))


def _perfect(cluster, backend="gloo", sizes=(4096, 2**20)):
    """A measurement that is the model's own prediction, all groups at once and each alone."""
    rows = []
    for name, collective in (("tp", "all-reduce"), ("dp", "all-reduce"), ("dp", "all-gather"), ("pp", "send/recv")):
        groups = PLAN.groups(name).tolist()
        for size in sizes:
            message = [Message(collective, size)]
            together = cost(groups, message, cluster, backend)
            times = tuple(
                GroupTime(tuple(group), together, cost([group], message, cluster, backend)) for group in groups
            )
            rows.append(Measured(name, collective, size, times))
    return Measurement(HOSTS, backend, tuple(rows))


@given(st.lists(st.floats(1e-6, 1e-5), min_size=3, max_size=3), st.lists(st.floats(1e7, 1e9), min_size=3, max_size=3))
def test_calibration_finds_the_levels(latencies, bandwidths):
    """Levels that made the times are found again: latency and bandwidth of each, within what small messages hide."""
    bandwidths = sorted(bandwidths, reverse=True)
    levels = [Level(level.name, *pair) for level, *pair in zip(CLUSTER.levels, latencies, bandwidths, strict=True)]
    cluster = CLUSTER.with_levels(levels)
    found = calibrated(CLUSTER, PLAN, _perfect(cluster, sizes=(4, 2**22)))
    for level, made in zip(found.levels, levels, strict=True):
        assert level.bandwidth == pytest.approx(made.bandwidth, rel=0.05)
        assert level.uplink is None


def test_calibration_finds_shared_uplinks():
    """A port that all devices of a host share, a trunk that all of a rack share."""
    levels = [
        Level("host", 1e-5, 1e9),
        Level("leaf", 1e-4, 2.5e7, uplink=2.5e7),
        Level("spine", 1e-4, 1.25e7, uplink=1.25e7),
    ]
    cluster = CLUSTER.with_levels(levels)
    found = calibrated(CLUSTER, PLAN, _perfect(cluster))
    uplinks = [level.uplink for level in found.levels]
    assert uplinks == [None, pytest.approx(2.5e7, rel=0.1), pytest.approx(1.25e7, rel=0.1)]
    for name in ("tp", "dp", "pp"):
        message = [Message("all-reduce", 2**20)]
        groups = PLAN.groups(name).tolist()
        assert cost(groups, message, found, "gloo") == pytest.approx(cost(groups, message, cluster, "gloo"), rel=0.1)


@pytest.mark.parametrize("slow", ["node1", "node2", "node3", "node4"])
def test_a_slow_host_is_named(slow):
    """Groups and hops that touch one host take twice as long: that host, and no other."""
    times = {}
    for rank in range(8):
        rows = []
        for name in PLAN.kinds:
            group = PLAN.groups(name).of(rank)
            hit = any(HOSTS[member] == slow for member in group) and len({HOSTS[member] for member in group}) > 1
            rows.append([name, "all-reduce", 2**20, 2.0 if hit else 1.0, 2.0 if hit else 1.0])
            rows.append([name, HOP, 2**20, 2.0 if hit else 1.0, None])
        times[rank] = rows
    assert measurement(PLAN, HOSTS, "gloo", times).slow_hosts == (slow,)


def test_hops_distinguish_hosts_that_groups_do_not():
    """One ring over all hosts is slow as a whole; the hops in and out of the slow host are."""
    plan = rm.Plan(rm.Mesh(dp=8), [rm.GroupSpec("dp")])
    times = {
        rank: [
            ["dp", "all-reduce", 2**20, 2.0, 2.0],
            ["dp", HOP, 2**20, 2.0 if "node3" in (HOSTS[rank], HOSTS[rank - 1]) and rank % 2 == 0 else 1.0, None],
        ]
        for rank in range(8)
    }
    assert measurement(plan, HOSTS, "gloo", times).slow_hosts == ("node3",)


def test_a_slow_trunk_is_no_slow_host():
    """Groups across racks take longer than those inside: no host is to blame."""
    perfect = _perfect(CLUSTER.with_levels([Level("host", 0, 1e9), Level("leaf", 0, 1e8), Level("spine", 0, 1e7)]))
    assert perfect.slow_hosts == ()


def test_bandwidths_are_those_of_nccl_tests():
    """1 MiB over 4 ranks in 1 ms: algorithm and bus bandwidth of each collective, by nccl-tests' factors."""
    times = (GroupTime((0, 1, 2, 3), 1e-3, 1e-3),)
    expected = {
        "all-reduce": (2**20 * 1e3, 1.5), "all-gather": (2**22 * 1e3, 0.75), "reduce-scatter": (2**20 * 1e3, 0.75),
        "all-to-all": (2**20 * 1e3, 0.75), "send/recv": (2**20 * 1e3, 1.0),
    }  # fmt: skip
    for collective, (algbw, factor) in expected.items():
        row = Measured("x", collective, 2**20, times)
        assert (row.algbw, row.busbw) == (pytest.approx(algbw), pytest.approx(algbw * factor))


def test_the_slowest_group():
    """A row is as slow as its slowest group, all at once; that group and its hosts are told."""
    times = (GroupTime((0, 1), 1.0, 0.5), GroupTime((2, 3), 3.0, 0.7))
    found = Measurement(HOSTS, "gloo", (Measured("tp", "all-reduce", 8, times),))
    (kind,) = found.to_dict()["kinds"]
    assert (kind["seconds"], kind["alone"]) == (3.0, 0.7)
    assert kind["slowest"] == {"ranks": [2, 3], "hosts": ["node2"]}
    keys = {"name", "collective", "bytes", "seconds", "alone", "latency", "algbw", "busbw", "slowest", "groups"}
    assert set(kind) == keys
    assert kind["groups"] == [1.0, 3.0]
    assert replace(found, backend="nccl").to_dict()["backend"] == "nccl"
