import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.strategies import kinds, meshes

from rankmesh import LayoutError, Mesh
from rankmesh.core.clusters.cluster import Cluster, Host, Level
from rankmesh.placement import Crossings, crossings


@given(st.data(), st.integers(1, 9))
def test_crossings_equal_counting(data, gpus_per_node):
    """Groups that cross, nodes touched and hops of the ring are those found by looking at each group."""
    kind = data.draw(kinds(data.draw(meshes())))
    nodes = [[rank // gpus_per_node for rank in group] for group in kind.expected]
    hops = [sum(group[i] != group[i - 1] for i in range(len(group))) for group in nodes]
    assert crossings(kind.groups, gpus_per_node) == Crossings(
        groups=len(nodes),
        crossing=sum(len(set(group)) > 1 for group in nodes),
        nodes=max(len(set(group)) for group in nodes),
        hops=max(hops),
    )


@pytest.mark.parametrize("gpus_per_node", [0, -8, 8.0, "8"])
def test_nodes_have_gpus(gpus_per_node):
    """The number of GPUs in a node is an integer of at least 1."""
    with pytest.raises(LayoutError, match=f"gpus_per_node is {gpus_per_node!r}; "):
        crossings(Mesh(dp=4).groups("dp"), gpus_per_node)


def test_crossings_of_a_level():
    """Ranks in text order put each tensor group on two boards of one host: boards are crossed, hosts are not."""
    cluster = Cluster.parse("board=8,host=2,leaf=2")
    mesh = Mesh(tp=8, dp=4, rank_map=[0, 1, *range(10, 16), *range(2, 10), *range(16, 32)])
    groups = mesh.groups("tp")
    assert crossings(groups, cluster).crossing == crossings(groups, cluster, "host").crossing == 0
    assert crossings(groups, cluster, "board").crossing == 2
    assert crossings(mesh.groups("dp"), cluster, "board").nodes == 4


def test_expert_groups_across_blocks():
    """Groups of 8 hosts in blocks of 18: those that begin near the end of a block are in two."""
    hosts = [Host(f"node{number}", 4, (f"block{number // 18}",)) for number in range(64)]
    cluster = Cluster(Level.all_unmeasured(("host", "nvlink")), tuple(hosts))
    groups = Mesh(ep=32, dp=8).groups("ep")
    assert [crossings(groups, cluster, level).crossing for level in ("host", "block", "network")] == [8, 3, 0]
