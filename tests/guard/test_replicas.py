"""Which ranks hold the same, beside the elements that each of them holds."""

from collections import defaultdict
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.brute import local
from tests.transfer.strategies import layouts, shardings

from rankmesh.guard.replicas import replica_kinds


@st.composite
def jobs(draw):
    """Some tensors on one mesh."""
    mesh = draw(layouts())
    shapes = draw(st.lists(st.lists(st.integers(1, 6), max_size=2), min_size=1, max_size=4))
    return {f"w{number}": draw(shardings(mesh, tuple(shape))) for number, shape in enumerate(shapes)}


@given(jobs())
def test_ranks_of_a_slot_hold_the_same(tensors):
    """And no others do, of tensors whose shards differ."""
    world = next(iter(tensors.values())).mesh.rank_range.stop
    kinds = replica_kinds(tensors)
    slots = [slot for kind in kinds for slot in kind.slots]
    assert slots == [*range(len(slots))]
    compared = [name for kind in kinds for name in kind.names]
    assert len(compared) == len(set(compared))
    for kind in kinds:
        by_slot = defaultdict(list)
        for rank in range(world):
            if (slot := kind.slot(rank)) is not None:
                by_slot[slot].append(rank)
        assert {slot: tuple(ranks) for slot, ranks in by_slot.items()} == {
            slot: kind.ranks(slot) for slot in kind.slots
        }
        for name in kind.names:
            local_of = {rank: local(tensors[name], rank) for rank in range(world)}
            assert [rank for rank in local_of if local_of[rank] is not None] == sorted(chain(*by_slot.values()))
            for ranks in by_slot.values():
                assert all((local_of[rank] == local_of[ranks[0]]).all() for rank in ranks)


@given(jobs())
def test_what_is_not_compared_is_on_one_rank(tensors):
    """A rank that differs from no other in such a tensor holds a part that no other holds."""
    compared = {name for kind in replica_kinds(tensors) for name in kind.names}
    world = next(iter(tensors.values())).mesh.rank_range.stop
    for name in set(tensors) - compared:
        local_of = [local(tensors[name], rank) for rank in range(world)]
        kept = [one.reshape(-1) for one in local_of if one is not None]
        parts = [tuple(one.tolist()) for one in kept if (one >= 0).any()]
        assert len(set(parts)) == len(parts)
