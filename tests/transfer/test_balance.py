"""Balance: the busiest sender against a linear program over single elements."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer import brute
from tests.transfer.strategies import layouts, shardings
from tests.transfer.test_laws import having, losses

from rankmesh.core import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.transfer import Transfer


@st.composite
def busy(draw):
    """Pairs of one dtype, on which ranks hold copies in several ways: what makes balance hard."""
    source, target = draw(layouts(max_offset=2)), draw(layouts())
    left, right = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(4, 12), min_size=1, max_size=2)))
        left[f"w{number}"] = draw(shardings(source, shape))
        right[f"w{number}"] = draw(shardings(target, shape))
    return left, right, set(), {}


@given(st.one_of(busy(), losses()))
def test_busiest_sender_is_within_a_tenth_of_the_linear_program(drawn):
    """Or an element of each tensor above it, since they are sent whole; the bound is the program's."""
    *sides, lost, copies = drawn
    source, target = ({name: replace(one, dtype="float32") for name, one in side.items()} for side in sides)
    moves = Transfer(source, target, lost=lost, copies=copies, partial=True)
    had = having(source, copies, moves.world_size)
    sets = defaultdict(int)
    for name, theirs in target.items():
        for rank in range(moves.world_size):
            for element in brute.kept(theirs, rank) - had[name, rank]:
                sets[frozenset(o for o in range(moves.world_size) if element in had[name, o]) - lost] += theirs.itemsize
    least = brute.least_busiest({members: count for members, count in sets.items() if members})
    busiest = max(moves.outgoing, default=0)
    assert least - 1e-6 <= busiest <= max(1.1 * least, least + 4 * len(source) + 1e-6)
    assert least * 0.99 - 1 <= moves.sender_bound <= least + 1


def test_copies_that_lie_across_each_other():
    """A dense weight with copies over dp and an expert with copies over etp: loads level where neither alone would."""
    mesh = Mesh(tp=2, dp=4).with_view("expert", etp=2, ep=2, edp=2)
    target = Mesh(tp=1, dp=8, offset=8)
    source, wanted = {}, {}
    for number in range(4):
        source[f"dense{number}"] = Sharding(mesh, ("tp", None), (64, 8), at={"dp": (0, 1)})
        wanted[f"dense{number}"] = Sharding(target, (None, None), (64, 8))
        source[f"expert{number}"] = Sharding(mesh, (None, None), (64, 8), at={"ep": number % 2}, view="expert")
        wanted[f"expert{number}"] = Sharding(target, (None, None), (64, 8))
    moves = Transfer(source, wanted)
    sets, _ = brute.requested(source, wanted, 16)
    assert moves.outgoing.max() <= 1.001 * brute.least_busiest(sets)


@pytest.mark.parametrize("copies", [1, 2, 3, 8])
def test_one_set_of_copies_shares_evenly(copies):
    """Each of n copies sends 1/n of what another mesh asks for, to one element."""
    source = {"w": Sharding(Mesh(dp=copies), (None, None), (7, 11))}
    target = {"w": Sharding(Mesh(dp=3, offset=8), (None, None), (7, 11))}
    sent = Transfer(source, target).outgoing[:copies]
    assert sent.sum() == 3 * 77 * 4
    assert sent.max() - sent.min() <= 4
