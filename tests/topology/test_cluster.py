import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.topology.strategies import clusters

from rankmesh.errors import ClusterError, LayoutError
from rankmesh.placement import Cluster, Host, Level, natural


def _place(cluster, rank):
    """The host of a rank and its units, the slow way: count devices."""
    device = (cluster.rank_map or tuple(range(cluster.size))).index(rank)
    for host in cluster.hosts:
        if device < host.devices:
            return (host.name, *host.places)
        device -= host.devices
    raise AssertionError(rank)


@given(clusters(), st.data())
def test_levels_of_two_ranks(cluster, data):
    """The innermost level that two ranks share is the first at which their units have one name."""
    ranks = st.integers(0, cluster.size - 1)
    left, right = (data.draw(st.lists(ranks, min_size=5, max_size=5)) for _ in range(2))
    expected = [
        next(number for number, (a, b) in enumerate(zip(_place(cluster, x), _place(cluster, y), strict=True)) if a == b)
        for x, y in zip(left, right, strict=True)
    ]
    assert cluster.level_of(left, right).tolist() == expected
    assert cluster.level_of(np.array(left)[:, None], np.array(right)).shape == (5, 5)
    assert [cluster.host_of(rank).name for rank in left] == [_place(cluster, rank)[0] for rank in left]


@given(clusters())
def test_values(cluster):
    """Hosts are in natural order; a cluster survives its document and a pickle, equal and with one hash."""
    names = [host.name for host in cluster.hosts]
    assert names == sorted(names, key=natural)
    for other in (Cluster.from_dict(cluster.to_dict()), pickle.loads(pickle.dumps(cluster))):  # noqa: S301
        assert other == cluster
        assert hash(other) == hash(cluster)
    assert sorted(cluster.ranks.tolist()) == list(range(cluster.size))


def test_ranks_fill_hosts_as_they_are_listed():
    """A launcher that takes node10 first has rank 0 there, and the cluster is still in natural order."""
    cluster = Cluster.parse("host=2,leaf=2,spine=2", hosts="node10,node11,node8,node9")
    assert [host.name for host in cluster.hosts] == ["node8", "node9", "node10", "node11"]
    assert cluster.host_of(0).name == "node10"
    assert cluster.rank_map == (4, 5, 6, 7, 0, 1, 2, 3)
    assert [host.places for host in cluster.hosts] == [("leaf0", "spine0")] * 2 + [("leaf1", "spine0")] * 2
    assert cluster.level_of(0, [1, 2, 4]).tolist() == [0, 1, 2]


def test_the_string_of_the_design():
    """host=8,nvlink=9,leaf=4 is 288 devices: 36 hosts, 4 domains, one leaf."""
    cluster = Cluster.parse("host=8,nvlink=9,leaf=4")
    assert (cluster.size, len(cluster.hosts), len(set(cluster.units[1].tolist()))) == (288, 36, 4)
    assert cluster.level_of(0, [7, 8, 71, 72, 287]).tolist() == [0, 1, 1, 2, 2]
    assert Cluster.parse("host=8,nvlink=9,leaf=*", world_size=288) == cluster


def test_what_nothing_joins_is_joined_by_a_network():
    """Hosts, or racks, without a level around them are in one network, once."""
    cluster = Cluster(Level.all_unmeasured(["host", "leaf"]), (Host("a", 1, ("x",)), Host("b", 1, ("y",))))
    assert [level.name for level in cluster.levels] == ["host", "leaf", "network"]
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert [host.devices for host in Cluster.of_nodes(8, 12).hosts] == [8, 4]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Cluster.parse("host=0"), "size of axis 'host'"),
        (lambda: Cluster.parse("host=8,leaf=*"), "without world_size"),
        (lambda: Cluster.parse("host=8,leaf=2", hosts="a,b,c"), "'host=8,leaf=2' has 2 hosts, but 3 are named"),
        (lambda: Cluster.parse("host=2,leaf=2", hosts="a,a"), "host 'a' is named twice"),
        (lambda: Cluster((), ()), "the cluster has no hosts"),
        (lambda: Cluster((Level("host", 0, 1),), (Host("a", 1, ("x",)),)), r"host 'a' is in \['x'\]"),
        (lambda: Cluster((Level("host", 0, 1),), (Host("a", True),)), "devices of host 'a' is True"),
        (lambda: Cluster((Level("host", 0, 1),), (Host("a", 2),), (0, 0)), "each rank from 0 to 1 once"),
        (lambda: Level("host", -1.0, 1.0), "latency"),
        (lambda: Level("host", 0.0, 0.0), "above 0"),
        (lambda: Level("host", 0.0, float("nan")), "bandwidth"),
        (lambda: Level("devices", 0.0, 1.0), "'devices' cannot name a level"),
        (lambda: Cluster.parse("host=2").host_of(2), "rank 2 has no device: the cluster has 2 devices"),
        (lambda: Cluster.parse("host=2").level("leaf"), "this cluster has the levels host"),
        (lambda: Cluster.from_dict({"levels": [{"name": "host"}], "hosts": [{"name": "a"}]}), "how many devices"),
        (lambda: Cluster.from_dict({"levels": [{"name": "host"}], "hosts": []}), r"hosts is \[\]"),
        (lambda: Cluster.from_dict({"levels": [{"name": "host", "speed": 1}], "hosts": [{}]}), "the key .speed."),
        (lambda: Cluster.from_dict({"schema": 2}), "schema 2"),
    ],
)  # fmt: skip
def test_what_is_no_cluster(make, match):
    """Sizes, names, numbers and maps that do not fit are refused with their values."""
    with pytest.raises((ClusterError, LayoutError), match=match):
        make()


def test_a_large_cluster_is_quick():
    """131,072 devices are placed by array arithmetic."""
    cluster = Cluster.parse("host=8,nvlink=9,leaf=16,spine=*", world_size=9 * 16 * 8 * 114)
    ranks = np.arange(cluster.size)
    assert np.array_equal(cluster.hosts_of(ranks), ranks // 8)
    assert np.array_equal(cluster.units[2], ranks // (8 * 9 * 16))
