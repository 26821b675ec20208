"""Transfers on a cluster: each element comes from the nearest that has it, and slow levels carry no more than that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer import brute, live
from tests.transfer.strategies import pairs, world_of

import rankmesh as rm
from rankmesh.errors import PlanError
from rankmesh.placement.transfer_cost import links, seconds


@st.composite
def clusters(draw, world):
    """Hosts of a few ranks, filled in any order, in leaves of a few hosts."""
    width, leaf = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    hosts = -(-world // (width * leaf)) * leaf
    names = draw(st.permutations([f"node{number}" for number in range(hosts)]))
    return rm.Cluster.parse(f"host={width},leaf={leaf},spine={hosts // leaf}", hosts=names)


@given(pairs(), st.data())
def test_every_level_carries_what_no_nearer_rank_could_send(both, data):
    """Bytes by level are those of nearest holders, element by element; and evenly sent as far as nearness allows."""
    source, target = both
    cluster = data.draw(clusters(world_of(source, target)))
    moves = rm.Transfer(source, target, cluster)
    sets, levels = brute.requested(source, target, moves.world_size, cluster)
    assert list(moves.levels.values()) == [levels[number] for number in range(len(cluster.levels))]
    least = brute.least_busiest(sets)
    busiest = int(moves.outgoing.max()) if moves.bytes else 0
    # Elements are sent whole: each tensor may leave one over, and one more where they are of several sizes.
    left = (1 + len(source)) * max(sharding.itemsize for sharding in source.values())
    assert busiest <= max(1.1 * least, least + left + 1e-6)
    for rank in range(moves.world_size):
        for move in moves.of(rank).receives:
            holders = [r for r in range(moves.world_size) if _element(target, move) in brute.kept(source[move.name], r)]
            near = min(brute.level(cluster, rank, holder) for holder in holders)
            assert brute.level(cluster, rank, move.source) == near


def _element(target, move):
    """The number of the first element of a move."""
    number = 0
    for (start, _), length in zip(move.box, target[move.name].shape, strict=True):
        number = number * length + start
    return number


def test_two_replicas_on_two_hosts_send_nothing_between_them():
    """Each host has a whole replica, so a new layout inside each host leaves the network alone."""
    source = live.model(rm.Mesh(tp=4, dp=2))
    target = live.model(rm.Mesh(tp=2, dp=4))
    moves = rm.Transfer(source, target, rm.Cluster.parse("host=4,leaf=2"))
    assert moves.levels["leaf"] == 0
    assert moves.levels["host"] == moves.bytes > 0
    assert links(moves.flows, moves.cluster) == []


def test_predicted_by_the_busiest_rank_and_the_shared_uplink():
    """Two ranks of a host send 4 MB each to another host: by their own ports 4 ms, by a shared uplink 16 ms."""
    levels = [{"name": "host", "latency": 0.0, "bandwidth": 1e12}, {"name": "leaf", "latency": 0.0, "bandwidth": 1e9}]
    hosts = [{"name": name, "devices": 2, "leaf": "leaf0"} for name in ("node0", "node1")]
    shared = [levels[0], levels[1] | {"uplink": 5e8}]
    source = {"w": rm.Sharding(rm.Mesh(tp=2), ("tp",), (2_000_000,))}
    target = {"w": rm.Sharding(rm.Mesh(tp=2, offset=2), ("tp",), (2_000_000,))}
    for given_levels, expected in ((levels, 4e-3), (shared, 16e-3)):
        cluster = rm.Cluster.from_dict({"levels": given_levels, "hosts": hosts})
        moves = rm.Transfer(source, target, cluster)
        assert seconds(moves.flows, cluster) == pytest.approx(expected)
        (link,) = links(moves.flows, cluster)
        assert (link.unit, link.level) in (("node0", "leaf"), ("node1", "leaf"))
        assert max(link.out, link.into) == 8_000_000


def test_a_cluster_that_is_too_small():
    """A rank that stands nowhere is told."""
    both = {"w": rm.Sharding(rm.Mesh(dp=4), (None,), (4,))}
    with pytest.raises(PlanError, match="the cluster has 2 devices"):
        rm.Transfer(both, both, rm.Cluster.parse("host=2"))
