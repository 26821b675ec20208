"""Shardings: what each rank holds, against tensors that were cut by hand."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from tests.transfer import brute
from tests.transfer.strategies import one

from rankmesh.core import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError, UnknownAxis


def filled(sharding, rank):
    """The local tensor that the boxes of a shard make, -1 where no box is."""
    shard = sharding.of(rank)
    numbers = np.arange(int(np.prod(sharding.shape))).reshape(sharding.shape)
    mine = np.full(shard.shape, -1)
    for box, place in zip(shard.boxes, shard.places, strict=True):
        here = tuple(slice(p, p + b - a) for p, (a, b) in zip(place, box, strict=True))
        assert (mine[here] == -1).all(), "two boxes at one place"
        mine[here] = numbers[tuple(slice(a, b) for a, b in box)]
    return mine


@given(one())
def test_every_shard_is_that_of_a_tensor_cut_by_hand(sharding):
    """Views, offsets, splits, rank maps, parts, padding and uneven cuts: boxes, places and shape of every rank."""
    for rank in range(sharding.mesh.rank_range.stop + 1):
        expected = brute.local(sharding, rank)
        assert sharding.holds(rank) == (expected is not None)
        if expected is None:
            assert sharding.of(rank).boxes == ()
        else:
            assert sharding.of(rank).shape == expected.shape
            assert np.array_equal(filled(sharding, rank), expected)


@given(one())
def test_a_sharding_is_a_value(sharding):
    """Pickled and back it is equal, with an equal hash and equal shards."""
    other = pickle.loads(pickle.dumps(sharding))  # noqa: S301  - our own bytes
    assert other == sharding
    assert hash(other) == hash(sharding)
    assert other.of(sharding.mesh.offset) == sharding.of(sharding.mesh.offset)


def test_uneven_cuts_are_those_of_torch():
    """10 rows over 4: 3, 3, 3, 1; 5 rows over 4: 2, 2, 1, 0; as ``torch.chunk`` has them."""
    for rows in (5, 9, 10, 12):
        chunks = [len(chunk) for chunk in torch.arange(rows).chunk(4)]
        kept = [Sharding(Mesh(dp=4), ("dp",), (rows,)).of(rank).shape[0] for rank in range(4)]
        assert kept == chunks + [0] * (4 - len(chunks))


def test_names_of_dtypes():
    """A torch dtype, its name, and its name with torch before it are one; a name that torch lacks is refused."""
    mesh = Mesh(dp=2)
    assert Sharding(mesh, (None,), (4,), torch.bfloat16) == Sharding(mesh, (None,), (4,), "bfloat16")
    assert Sharding(mesh, (None,), (4,), "bfloat16").itemsize == 2
    with pytest.raises(LayoutError, match="unknown dtype 'bf16'; write 'bfloat16'"):
        Sharding(Mesh(tp=2), (None,), shape=(4,), dtype="bf16")
    with pytest.raises(LayoutError, match="unknown dtype 'float7'"):
        Sharding(mesh, (None,), (4,), "float7")


def test_several_positions_hold_copies():
    """A tied embedding at the first and the last stage is on both, and nowhere between."""
    tied = Sharding(Mesh(tp=2, pp=4), ("tp", None), (8, 4), "float32", {"pp": (0, -1)})
    assert [rank for rank in range(8) if tied.holds(rank)] == [0, 1, 6, 7]
    assert tied.of(1) == tied.of(7)


REFUSED = {
    "an axis twice": ({"cut": ("tp", "tp")}, "one sharding names axis 'tp' twice"),
    "cut and fixed": ({"cut": ("tp", None), "at": {"tp": 0}}, "one sharding names axis 'tp' twice"),
    "too few dimensions": ({"cut": ("tp",)}, "for a tensor of 2 dimensions"),
    "a bare string": ({"cut": "tp"}, "give axes or None for each dimension"),
    "a position outside": ({"at": {"tp": 2}}, r"axis 'tp' has positions 0 to 1, not 2"),
    "no position": ({"at": {"tp": 0.5}}, r"the position of 'tp' in at is 0\.5"),
    "parts that do not add up": ({"cut": ("tp", None), "parts": (3, 4)}, r"of dimension 0 make 7, not its length 8"),
    "parts of what": ({"cut": ("tp", "dp"), "parts": (4, 4)}, r"could be of any of the 2 dimensions"),
    "padding below": ({"padded": {0: 4}}, "padded length of dimension 0 is 4"),
    "parts and padding": ({"padded": {0: 9}, "parts": {0: (4, 4)}}, "dimension 0 has parts and padding"),
    "a dimension outside": ({"padded": {2: 9}}, "dimension 2 of a tensor of 2 dimensions does not exist"),
    "a negative length": ({"shape": (-1, 4)}, "length of a dimension is -1"),
    "a shape that is a number": ({"shape": 8}, "does not describe a sharding"),
    "padding of no dimension": ({"padded": {"tp": 9}}, "does not describe a sharding"),
    "padding without dimensions": ({"padded": [9]}, "does not describe a sharding"),
    "parts of no dimension": ({"parts": {"tp": (4, 4)}}, "does not describe a sharding"),
    "positions without axes": ({"at": [0]}, "does not describe a sharding"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """What does not fit together is refused with the values and one fix."""
    given, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        Sharding(Mesh(tp=2, dp=2), **({"shape": (8, 4)} | given))


def test_unknown_axes_and_views():
    """An axis or a view that the mesh does not have is named, with those that it has."""
    with pytest.raises(UnknownAxis, match=r"'tpp'.*did you mean 'tp'"):
        Sharding(Mesh(tp=2), ("tpp",), (4,))
    with pytest.raises(UnknownAxis, match="view 'expert'"):
        Sharding(Mesh(tp=2), ("tp",), (4,), view="expert")
    with pytest.raises(LayoutError, match="give a Mesh"):
        Sharding("tp=2", ("tp",), (4,))
