"""Shardings as others write them: round trips, and what they cannot say."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer import strategies

import rankmesh as rm
from rankmesh.errors import LayoutError, UnknownAxis


@settings(max_examples=200)
@given(strategies.one())
def test_shardy_text_gives_the_same_shards(sharding):
    """There and back: each rank has the same boxes, or the obstacle is named."""
    try:
        back = rm.Sharding.from_shardy(sharding.to_shardy(), sharding.shape, sharding.dtype)
    except LayoutError as error:
        uneven = any(length % ways for length, ways in zip(sharding.shape, sharding.shard_map.shards, strict=True))
        assert sharding.at or sharding.parts or sharding.padded or uneven or sharding.mesh.offset, error  # noqa: PT017
        return
    ranks = sharding.mesh.rank_range.ascending.tolist()
    assert [back.of(rank) for rank in ranks] == [sharding.of(rank) for rank in ranks]


@settings(max_examples=200)
@given(strategies.one())
def test_m2n_gives_the_same_boxes(sharding):
    """The rows and columns that M2N's mesh and placement mean are those of each rank."""
    try:
        dims, start, placements = sharding.to_m2n()
    except LayoutError:
        return
    grid = np.arange(np.prod(dims)).reshape(dims) + start
    for rank in sharding.mesh.rank_range.ascending.tolist():
        if rank not in grid:
            assert not sharding.of(rank).size
            continue
        box = [(0, length) for length in sharding.shape]
        for place, size, dim in zip(np.argwhere(grid == rank)[0].tolist(), dims, placements, strict=True):
            if dim is not None:
                each = sharding.shape[dim] // size
                box[dim] = (place * each, (place + 1) * each)
        assert sharding.of(rank).boxes == ((tuple(box),) if 0 not in sharding.shape else ())


@settings(max_examples=300)
@given(strategies.one())
def test_m2n_and_partition_specs_are_read_back(sharding):
    """There and back: each rank has the same shard, and the second writing is the first."""
    ranks = sharding.mesh.rank_range.ascending.tolist()
    with suppress(LayoutError):
        written = sharding.to_m2n()
        back = rm.Sharding.from_m2n(written, sharding.shape, sharding.dtype)
        assert [back.of(rank) for rank in ranks] == [sharding.of(rank) for rank in ranks]
        assert back.to_m2n() == written
        assert back.dtype == sharding.dtype
    with suppress(LayoutError):
        spec = sharding.to_partition_spec()
        back = rm.Sharding.from_partition_spec(sharding.mesh, spec, sharding.shape, sharding.dtype, sharding.view)
        assert [back.of(rank) for rank in ranks] == [sharding.of(rank) for rank in ranks]
        assert back.to_partition_spec() == spec


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2), start=st.integers(0, 9), data=st.data())
def test_every_m2n_has_a_sharding(sizes, start, data):
    """All meshes of one or two axes: the grid of M2N's ranks has the rows that its placements mean."""
    placements = [None] * len(sizes)
    if data.draw(st.booleans()):
        placements[data.draw(st.integers(0, len(sizes) - 1))] = data.draw(st.integers(0, 1))
    one = rm.Sharding.from_m2n((tuple(sizes), start, tuple(placements)), (12, 24))
    for place in np.ndindex(*sizes):
        box = [(0, 12), (0, 24)]
        for at, size, dim in zip(place, sizes, placements, strict=True):
            if dim is not None:
                each = box[dim][1] // size
                box[dim] = (at * each, (at + 1) * each)
        assert one.of(start + int(np.ravel_multi_index(place, sizes))).boxes == (tuple(box),)
    assert one.mesh.size == np.prod(sizes)


def test_notations_that_no_sharding_has_are_refused_with_a_fix():
    """Of M2N: axes, cuts, dimensions, lengths. Of PartitionSpec: too long, unconstrained, unreduced, unknown axes."""
    for m2n, named in (
        (((2, 2, 2), 0, (None, None, 0)), "two axes, of which one cuts the tensor, and 3 axes"),
        (((2, 2), 0, (0, 1)), r"placements \(0, 1\) are given; write such a sharding with its axes"),
        (((2, 2), 0, (0,)), "2 axes has 1 placements and 2 names; give one for each"),
        (((2,), 0, (2,)), "cut a tensor of 2 dimensions; give a dimension from 0"),
        (((3,), 0, (0,)), "M2N cuts evenly, and 3 does not divide dimension 0 of length 8; give the padded shape"),
    ):
        with pytest.raises(LayoutError, match=named):
            rm.Sharding.from_m2n(m2n, (8, 4))
    with pytest.raises(LayoutError, match="2 axes has 2 placements and 1 names"):
        rm.Sharding.from_m2n(((2, 2), 0, (None, 0)), (8, 4), names=("tp",))
    mesh = rm.Mesh(tp=2, dp=4)
    unreduced = type("P", (tuple,), {"unreduced": frozenset({"tp"})})((None,))
    for spec, named in (
        (("tp", None, None), "3 entries is given for a tensor of 2 dimensions; give one for each"),
        (("tp", object()), "names no axes: the compiler chooses; give an axis"),
        ("tp", "'tp' is no PartitionSpec; give axes or None"),
        (unreduced, "unreduced along tp.*reduce the array first"),
        ((None, "dp"), "JAX cuts evenly, and 4 does not divide dimension 1 of length 6"),
    ):
        with pytest.raises(LayoutError, match=named):
            rm.Sharding.from_partition_spec(mesh, spec, (8, 6))
    with pytest.raises(UnknownAxis, match="'ep'"):
        rm.Sharding.from_partition_spec(mesh, ("ep",), (8, 6))


def test_m2n_of_a_position_along_a_split_axis():
    """A tensor at one position of an axis that is split begins at the rank of that position."""
    mesh = rm.Mesh(dp=2, tp=4).split("tp", inner=2, outer=2)
    at = [rm.Sharding(mesh, ("dp",), (8,), at={"tp": place}).to_m2n() for place in range(4)]
    assert at == [((2,), 2 * place, (0,)) for place in range(4)]


def test_what_a_notation_cannot_say_is_named():
    """Positions, parts, padding, uneven cuts, foreign texts."""
    mesh = rm.Mesh(tp=2, pp=2)
    for options, named in (
        ({"at": {"pp": 1}}, r"only some ranks have, at=\{'pp': \(1,\)\}"),
        ({"parts": (6, 2)}, "parts of a fused dimension"),
        ({"padded": {0: 10}}, "padding"),
    ):
        with pytest.raises(LayoutError, match=f"Shardy cannot say .*{named}"):
            rm.Sharding(mesh, ("tp", None), (8, 4), **options).to_shardy()
    with pytest.raises(LayoutError, match="2 does not divide dimension 0 of length 7"):
        rm.Sharding(mesh, ("tp", None), (7, 4)).to_partition_spec()
    with pytest.raises(LayoutError, match="begins at rank 4"):
        rm.Sharding(rm.Mesh(tp=2, offset=4), ("tp",), (8,)).to_shardy()
    with pytest.raises(LayoutError, match="two axes, of which one cuts"):
        rm.Sharding(mesh, ("tp", "pp"), (8, 4)).to_m2n()
    with pytest.raises(LayoutError, match="leaves gaps between them"):
        rm.Sharding(mesh, ("pp", None), (8, 4), at={"tp": 1}).to_m2n()
    with pytest.raises(LayoutError, match="M2N cuts in the order of the mesh"):
        rm.Sharding(mesh, ("tp-pp", None), (8, 4)).to_m2n()
    with pytest.raises(LayoutError, match="no list of whole axes"):
        rm.Sharding.from_shardy('sdy.mesh @m = <["a"=4]>\n#sdy.sharding<@m, [{"a":(1)2}]>', (8,))
    with pytest.raises(LayoutError, match=r"is no sdy.mesh"):
        rm.Sharding.from_shardy("sdy.mesh", (8,))
