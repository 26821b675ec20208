"""Emulated clusters: what is computed about them always, and themselves with RANKMESH_CLUSTER: `make test-cluster`."""

import os

import pytest
from tests.placement.dumb import cost

import rankmesh as rm
from bench import cluster
from bench.emulated import emulated, problem
from rankmesh.placement import place
from rankmesh.placement.calibrated import calibrated

PROBLEM = problem() if "RANKMESH_CLUSTER" in os.environ else "emulated clusters are `make test-cluster`'s"
emulates = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
HOSTS = ("node1", "node2", "node10", "node11")


def test_every_order_is_another_placement():
    """Six orders and torchrun's: each permutes the ranks, and puts the first axis inside the hosts."""
    found = cluster.placements(HOSTS, 2)
    assert len(found) == 7
    assert len(set(found.values())) == 7
    machine = rm.Cluster.parse("host=2,leaf=4")
    for name, rank_map in found.items():
        plan = cluster.planned(rank_map)
        inner = name.split("-")[0] if name != "torchrun" else "tp"
        assert {int(machine.level_of(*group)) for group in plan.groups(inner).tolist()} == {0}
        assert sorted(rank_map) == list(range(8))


def test_kendall():
    """Ties count on both sides; an order that is turned round is -1."""
    assert cluster.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert cluster.kendall([1, 1, 2], [1, 1.01, 2]) == 1.0


def _dumb(order, machine):
    plan = cluster.planned(order)
    return sum(cost(plan.groups(kind).tolist(), cluster.TRAFFIC[kind], machine, "gloo") for kind in cluster.MESH)


@pytest.mark.nightly
@emulates
def test_a_placement_is_predicted_and_measured():
    """8 ranks on 4 emulated hosts in 2 racks: predicted and measured agree on the best and the worst of three."""
    with emulated(cluster.RACKS, link=200, trunk=100) as there:
        seen = there.on_ranks(cluster.measured_levels, (4096, 64 * 2**10))[0]
        machine = calibrated(there.cluster, cluster.planned(), seen)
        cases = {name: cluster.placements(HOSTS, 2)[name] for name in ("tp-dp-pp", "dp-tp-pp", "pp-dp-tp")}
        measured = cluster.fastest(there.on_ranks(cluster._steps, cases, 2))
    predicted = {name: _dumb(order, machine) for name, order in cases.items()}
    assert sorted(cases, key=predicted.get) == sorted(cases, key=measured.get)
    placed = place(cluster.planned(cases["pp-dp-tp"]), machine, traffic=cluster.TRAFFIC, backend="gloo")
    assert placed.cost <= min(predicted.values()) * 1.001


@pytest.mark.nightly
@emulates
def test_a_slow_host_is_named():
    """8 ranks on 4 emulated hosts: the one with a third of a link is named most times, no other is each time.

    The hosts share the cores of this machine: what else runs on them may slow the others as much, one time.
    """
    with emulated([HOSTS], link=200) as there:
        named = [set(cluster.slow_host(there, "node10", 60)["named"]) for _ in range(3)]
    assert sum("node10" in found for found in named) >= 2, named
    assert set.intersection(*named) <= {"node10"}, named
