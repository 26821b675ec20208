"""Large transfers: what one rank needs follows from the planned ranks alone, and is its part of what all ranks do."""

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core import Mesh
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.sharding import Sharding
from rankmesh.transfer import Transfer
from rankmesh.transfer.planning import flows
from rankmesh.transfer.planning.repeats import ByteRange, Repeated, Repeats

COLUMNS = ("tensor_class", "shard", "source", "target", "low", "high", "level")


@st.composite
def digits(draw):
    """Digits of a rank with gaps between them, and how many ranks there are."""
    found, stride = [], draw(st.integers(1, 3))
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(2, 3))
        found.append((size, stride))
        stride *= size * draw(st.integers(1, 3))
    return Repeats(tuple(found)), stride


@given(digits(), st.data())
def test_stretches_stand_where_they_stand_when_they_are_listed(drawn, data):
    """The start of each rank's stretch and the owner of each byte are those of the list of all ranks."""
    repeats, world = drawn
    planned = world // prod(size for size, _ in repeats.digits)
    assert sorted(set(repeats.planned(np.arange(world)).tolist())) == list(range(planned))
    chosen = sorted(data.draw(st.sets(st.integers(0, planned - 1), min_size=1)))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    row, place = Repeated(chosen, lengths, repeats), 0
    for rank in range(world):
        one, values = repeats.planned(rank), repeats.values(rank)
        assert repeats.rank(one, values) == rank
        if one in chosen:
            length = lengths[chosen.index(one)]
            found = ByteRange(one, values, place, place + length)
            assert row.byte_range(one, values) == found
            assert [row.at(byte) for byte in range(place, place + length)] == [found] * length
            place += length


def sides(draw, mesh, shapes, places):
    """Shardings on a mesh: each axis cuts a dimension, holds copies, or has the tensor at one position."""
    found = {}
    for name, shape in shapes.items():
        cut, at = [[] for _ in shape], {}
        for axis in mesh.axes:
            use = draw(st.sampled_from(["cut", "copies", "copies", "at"] if places else ["cut", "copies"]))
            if use == "cut":
                cut[draw(st.integers(0, len(shape) - 1))].append(axis)
            elif use == "at":
                at[axis] = draw(st.integers(0, mesh.axes[axis] - 1))
        found[name] = Sharding(mesh, tuple("-".join(axes) or None for axes in cut), shape, at=at or None)
    return found


@st.composite
def transfers(draw):
    """Two meshes of small factors, at places of their own, in a world with or without a cluster of equal units."""
    shapes = {
        f"w{number}": (draw(st.integers(1, 13)), draw(st.integers(1, 7))) for number in range(draw(st.integers(1, 3)))
    }
    meshes = []
    for _ in range(2):
        sizes = draw(st.lists(st.sampled_from([2, 2, 3, 4]), min_size=1, max_size=4))
        if prod(sizes) > 48:
            sizes = sizes[:2]
        mesh = Mesh(**dict(zip("abcd", sizes, strict=False)))
        meshes.append(mesh.replace(offset=draw(st.sampled_from([0, 0, mesh.size, 4, 8, 1]))))
    source, target = (sides(draw, mesh, shapes, places) for mesh, places in zip(meshes, (True, True), strict=True))
    world = max(mesh.rank_range.stop for mesh in meshes)
    levels = draw(
        st.sampled_from([None, None, "host=2,leaf=2,spine=*", "host=4,leaf=3,spine=*", "board=2,host=4,leaf=*"])
    )
    if levels is None:
        return source, target, None
    each = prod(int(part.partition("=")[2]) for part in levels.split(",")[:-1])
    return source, target, Cluster.parse(levels, world_size=-(-world // each) * each)


def rows(of, rank):
    """The flows of one rank, as rows."""
    columns = np.stack([getattr(of, name) for name in COLUMNS])
    return columns[:, (of.source == rank) | (of.target == rank)].T.tolist()


@given(transfers())
def test_one_rank_has_its_part_of_the_flows_of_all(drawn):
    """The flows of each rank are those of all, in their order; each element that it lacks is sent to it once."""
    source, target, cluster = drawn
    moves = Transfer(source, target, cluster)
    shares = flows.Shares(moves.classes, cluster, ())
    for rank in range(moves.world_size + 1):
        assert rows(shares.of(rank), rank) == rows(shares.all, rank)
        local = moves.of(rank)
        written = Counter()
        for move in (*local.receives, *local.copies):
            for row in range(*move.box[0]):
                written.update((move.name, row, column) for column in range(*move.box[1]))
        wanted = [
            (name, row, column)
            for name, sharding in target.items()
            for box in sharding.of(rank).boxes
            for row in range(*box[0])
            for column in range(*box[1])
        ]
        assert written == Counter(wanted)
    assert moves.bytes == moves.lower_bound


@given(transfers())
def test_shares_of_planned_ranks_are_as_good_as_those_of_all_ranks(drawn):
    """Planned one by one, ranks send from as near, and the busiest sends as much, to an element of each tensor."""
    source, target, cluster = drawn
    moves = Transfer(source, target, cluster)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Repeats, "of", lambda *_: Repeats())
        each = Transfer(source, target, cluster)
        assert each.levels == moves.levels
        slack = 4 * len(source) + 0.002 * each.sender_bound
        assert abs(int(each.outgoing.max()) - int(moves.outgoing.max())) <= slack
        assert np.array_equal(each.incoming, moves.incoming)


def test_a_million_ranks_are_planned_as_a_few():
    """Of tp=8, pp=16 to tp=16, pp=8 in a million ranks 256 are planned, and what one rank moves is what it lacks."""
    world = 2**20
    before, after = Mesh(tp=8, dp=world // 128, pp=16), Mesh(tp=16, dp=world // 128, pp=8)
    source = {f"{n}": Sharding(before, ("tp", None), (64, 64), at={"pp": n}) for n in range(16)}
    target = {f"{n}": Sharding(after, ("tp", None), (64, 64), at={"pp": n // 2}) for n in range(16)}
    moves = Transfer(source, target)
    assert Repeats.of(where for one in moves.classes for where in (one.holders, one.receivers)).digits == ((4096, 16),)
    local = moves.of(world - 3)
    assert local.bytes_in + local.bytes_copied == 2 * 4 * 64 * 4
