"""Large worlds: one group of each kind is looked at where all lie in one way, and costs are those of all groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.recipes.megatron_core import megatron
from rankmesh.placement import place
from rankmesh.placement.cost import DeviceUnits, HopCounts, bitwise
from rankmesh.placement.predict import Links

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send/recv", "ring")


@st.composite
def placed(draw):
    """A plan of a few hundred ranks, a cluster of powers of two, and placements by orders of the bits of positions."""
    bits = draw(st.integers(3, 7))
    sizes, left = {}, bits
    for name in ("tp", "cp", "pp"):
        taken = draw(st.integers(0, min(2, left)))
        sizes[name], left = 2**taken, left - taken
    plan = megatron(2**bits, **sizes, ep=2 ** draw(st.integers(0, left)))
    host, leaf = 2 ** draw(st.integers(1, 3)), 2 ** draw(st.integers(0, 2))
    leaf = min(leaf, max(1, 2**bits // host))
    host = min(host, 2**bits // leaf)
    cluster = Cluster.parse(f"host={host},leaf={leaf},spine=*", world_size=2**bits)
    orders = draw(st.lists(st.permutations(range(bits)), min_size=1, max_size=3))
    numbers = np.arange(2**bits)
    devices = np.stack([sum(((numbers >> bit) & 1) << place for bit, place in enumerate(order)) for order in orders])
    return plan, cluster, devices


@given(placed())
def test_one_group_costs_what_all_groups_do(drawn):
    """For every kind and collective of both backends, under each placement, to the last bit."""
    plan, cluster, devices = drawn
    assert bitwise(devices)
    for backend in ("nccl", "gloo"):
        links = Links(plan, cluster, backend).under(devices)
        assert links._uniform
        for name, groups in plan.kinds.items():
            if groups.size > 1:
                every = HopCounts(links.positions(name), links.machine, devices, backend=backend)
                for collective in COLLECTIVES:
                    found = links.costs(name).one(collective, 2.0**20)
                    assert found.tolist() == every.one(collective, 2.0**20).tolist()


def test_other_worlds_are_counted_group_by_group():
    """Hosts of six, a device out of order, a shared uplink: no group stands for another."""
    plan = megatron(16, tp=2)
    for text in ("host=6,leaf=3", "host=8:450GB,leaf=2"):
        links = Links(plan, Cluster.parse(text))
        assert links._uniform == (text[5] == "8")
        swapped = np.array([[1, 0, *range(2, 16)]])
        assert not links.under(swapped)._uniform


def test_a_placement_is_the_same_when_all_groups_are_counted(monkeypatch):
    """Hosts as a range or one by one, one group or all: order, costs and step are equal."""
    plan = megatron(64, tp=4, pp=2, cp=2)
    found = place(plan, Cluster.parse("host=8,leaf=4,spine=*", world_size=64))
    named = Cluster.parse("host=8,leaf=4,spine=*", world_size=64, hosts=[f"node{number}" for number in range(8)])
    assert named == Cluster.parse("host=8,leaf=4,spine=*", world_size=64)
    monkeypatch.setattr(DeviceUnits, "binary", False)
    every = place(plan, named)
    assert (found.order, found.rank_map) == (every.order, every.rank_map)
    assert (found.cost, found.before, found.step) == (every.cost, every.before, every.step)


def test_a_million_ranks_are_placed():
    """A plan of a million ranks is placed with what one group of each kind costs."""
    world = 2**20
    found = place(megatron(world, tp=8, pp=16), Cluster.parse("host=8,leaf=32,spine=*", world_size=world), exact=False)
    assert found.order.startswith("tp-")
    assert pytest.approx(found.before) == found.cost or found.cost < found.before
