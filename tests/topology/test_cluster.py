import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.topology.strategies import clusters

from rankmesh.core.clusters.cluster import Cluster, Host, Level
from rankmesh.core.host_names import natural
from rankmesh.errors import ClusterError, LayoutError


def _place(cluster, rank):
    """The host of a rank and its units, the slow way: count devices."""
    device = (cluster.rank_map or tuple(range(cluster.size))).index(rank)
    for host in cluster.hosts:
        if device < host.devices:
            return (*((host.name, units[device]) for units in host.inside), host.name, *host.places)
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
    hosts = [_place(cluster, rank)[cluster.host_level] for rank in left]
    assert [cluster.host_of(rank).name for rank in left] == hosts
    names = [cluster.unit_names(level) for level in range(len(cluster.levels))]
    for rank in left:
        innermost, *rest = (names[level][cluster.units[level][rank]] for level in range(len(names)))
        inner, *outer = _place(cluster, rank)
        assert rest == outer
        assert innermost == (f"{inner[0]} board{inner[1]}" if cluster.host_level else inner)


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


@pytest.mark.parametrize(
    ("text", "words", "bandwidths"),
    [
        ("host=8,nvlink=9,leaf=4", "288 devices, 36 hosts of 8, levels host nvlink leaf", (450, 450, 50)),
        ("pix=2,numa=2,host=2", "8 devices, 1 host of 8, levels pix numa host", (64, 64, 22)),
        ("pix=2,numa=2,host=2,leaf=4", "32 devices, 4 hosts of 8, levels pix numa host leaf", (64, 64, 22, 50)),
        ("board=8,host=2,leaf=2", "32 devices, 2 hosts of 16, levels board host leaf", (450, 450, 50)),
        ("nvlink=4,node=2,rack=4", "32 devices, 4 hosts of 8, levels nvlink node rack", (450, 22, 50)),
        ("node=8,nvl72=9", "72 devices, 9 hosts of 8, levels node nvl72", (450, 450)),
        ("pix=2,socket=2", "4 devices, 1 host of 4, levels pix socket", (64, 64)),
        ("gpu=4,pool=2", "8 devices, 2 hosts of 4, levels gpu pool", (450, 50)),
        ("leaf=4", "4 devices, 1 host of 4, levels leaf", (50,)),
    ],
)
def test_a_level_is_what_its_name_says(text, words, bandwidths):
    """The level named host is the host, wherever it is in the string; bandwidths are those of links of the name."""
    cluster = Cluster.parse(text)
    assert str(cluster) == words
    assert tuple(level.bandwidth / 1e9 for level in cluster.levels) == bandwidths
    assert cluster.default_levels == tuple(level.name for level in cluster.levels)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [("450GB", 450e9), ("450GB/s", 450e9), ("400Gb", 50e9), ("400Gbps", 50e9), ("400Gbit/s", 50e9), ("1.8TB", 1.8e12),
     ("900MB", 9e8), ("64B", 64)],
)  # fmt: skip
def test_bandwidths_inline(text, bandwidth):
    """Bytes and bits a second after a size are the level's; one that is as large as the default is given, too."""
    cluster = Cluster.parse(f"host=2:{text},rack=*", world_size=8)
    assert (cluster.levels[0].bandwidth, cluster.default_levels) == (bandwidth, ("rack",))
    assert Cluster.from_dict(cluster.to_dict()).default_levels == ("rack",)
    with pytest.raises(ClusterError) as error:
        Cluster.parse(f"host=2:{text}x,rack=4")
    assert error.value.level == "host"


@pytest.mark.parametrize("text", ["450", "450gb", "450 gigabytes", "", "GB", "-1GB", "0GB", "1e3GB"])
def test_a_bandwidth_without_a_clear_unit_is_refused(text):
    """A number alone, gb, which may be bits or bytes, and no number at all."""
    with pytest.raises(ClusterError):
        Cluster.parse(f"host=2:{text},rack=4")


def test_hosts_are_named_where_levels_lie_inside_them():
    """A list of hosts names those of the level host, not the boards in them."""
    cluster = Cluster.parse("board=2,host=2,leaf=2", hosts="node10,node9")
    assert [(host.name, host.devices) for host in cluster.hosts] == [("node9", 4), ("node10", 4)]
    assert (cluster.host_of(3).name, cluster.filled) == ("node10", ("node10", "node9"))
    assert cluster.level_of(0, [1, 2, 4]).tolist() == [0, 1, 2]


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
        (lambda: Cluster(Level.all_unmeasured(("pix", "host")), (Host("a", 2, (), ((0,),)),)), r"'pix' of host 'a'"),
        (lambda: Cluster(Level.all_unmeasured(("pix", "numa", "host")), (Host("a", 2, (), ((0, 0), (0, 1))),)),
         "in two units"),
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
