"""Collectives of NCCL beside published measurements, and what more ports, switches and placements change."""

import json
from dataclasses import replace

import pytest

import rankmesh as rm
from bench.published import FIGURES, collectives
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES
from rankmesh.core.clusters.levels import in_words
from rankmesh.placement import Message
from rankmesh.placement.predict import Links


def test_published_collectives_are_near():
    """Nine of ten measurements of 1 MiB and more within 30 %, of less within a factor of 2; the page shows these."""
    rows = collectives()
    recorded = json.loads(FIGURES.read_text(encoding="utf-8"))["collectives"]
    assert [row["predicted"] for row in rows] == pytest.approx([row["predicted"] for row in recorded], rel=1e-6)
    assert all(row["source"].startswith("https://") for row in rows)
    large, small = ([row["predicted"] / row["seconds"] for row in rows if (row["bytes"] >= 2**20) == big]
                    for big in (True, False))  # fmt: skip
    assert len(large) >= 100
    assert sum(abs(ratio - 1) <= 0.3 for ratio in large) >= 0.9 * len(large)
    assert len(small) >= 35
    assert sum(0.5 <= ratio <= 2 for ratio in small) >= 0.9 * len(small)
    assert {row["collective"] for row in rows} == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring"}


@pytest.mark.parametrize(("members", "near"), [(1, 0.05), (8, 0.1)])
def test_groups_share_the_ports_of_a_host(members, near):
    """With four ports for eight devices, groups of one member, and one group of all eight, take twice as long."""
    plan = rm.Plan(rm.Mesh(a=members, b=8 // members, c=2), [rm.GroupSpec("group", axes="a-c")])
    eight, gather = Cluster.parse("host=8,leaf=2"), [Message("all-gather", 2**27 / members)]
    host, leaf = eight.levels
    four = eight.with_levels([host, replace(leaf, bandwidth=48e9, uplink=4 * 48e9, assumed=False)])
    seconds = [Links(plan, each, device=DEVICES["h100"]).seconds("group", gather) for each in (eight, four)]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=near)


def test_switches_that_reduce_are_quicker():
    """NVLink SHARP inside a host, SHARP between hosts: an all-reduce of 1 GiB takes less; without, it is a ring."""

    def reduce(spec, device, sharp=False):
        cluster = Cluster.parse(spec)
        cluster = cluster.with_levels(replace(level, sharp=sharp and level.name == "leaf") for level in cluster.levels)
        plan = rm.Plan(rm.Mesh(dp=cluster.size), [rm.GroupSpec("dp")])
        return Links(plan, cluster, device=DEVICES[device]).seconds("dp", [Message("all-reduce", 2**30)])

    assert reduce("host=8", "h100") < 0.8 * reduce("host=8", "gh200")
    assert reduce("host=8,leaf=8", "h100", sharp=True) < 0.8 * reduce("host=8,leaf=8", "h100")


def test_what_is_assumed_in_words():
    """NVLS, ports, given rates, shared ports and SHARP are named in one line; a cluster file keeps SHARP."""
    cluster = Cluster.from_dict({
        "levels": [{"name": "host"}, {"name": "leaf", "bandwidth": 25e9, "uplink": 100e9, "sharp": True}],
        "hosts": [{"name": "node[1-2]", "devices": 8, "leaf": "a"}],
    })  # fmt: skip
    assert in_words(cluster.levels, 8, DEVICES["a100"]) == "a100: NVLink of 300 GB/s, 4 ports of 25 GB/s, SHARP"
    assert Cluster.from_dict(cluster.to_dict() | {"links": "as printed"}) == cluster
    assert "with NVLS" in in_words(Cluster.parse("host=8,leaf=2").levels, 8, DEVICES["b200"])
