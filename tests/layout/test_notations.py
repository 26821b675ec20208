"""Shardings as others write them: round trips, and what they cannot say."""

import numpy as np
import pytest
from hypothesis import given, settings
from tests.transfer import strategies

import rankmesh as rm
from rankmesh.errors import LayoutError


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
