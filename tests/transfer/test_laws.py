"""The law of transfers, element by element: none, some or all ranks lost, with and without copies beside the shards."""

import pickle
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer import brute, live
from tests.transfer.strategies import pairs, world_of

from rankmesh.core import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LostState, PlanError
from rankmesh.transfer import Transfer


@st.composite
def losses(draw, **limits):
    """Source and target, ranks without a target that are lost, and copies that any ranks keep of any shards."""
    source, target = draw(pairs(least=0, max_names=3, max_size=8, max_offset=4, **limits))
    world = world_of(source, target)
    free = [rank for rank in range(world) if not any(sharding.holds(rank) for sharding in target.values())]
    lost = draw(st.sets(st.sampled_from(free))) if free else set()
    ranks = st.integers(0, world - 1)
    copies = draw(st.dictionaries(st.sampled_from(sorted(source)), st.dictionaries(ranks, st.sets(ranks, max_size=3))))
    return source, target, lost, copies


def numbers(sharding, box):
    """The elements in a box."""
    whole = np.arange(int(np.prod(sharding.shape))).reshape(sharding.shape)
    return whole[tuple(slice(a, b) for a, b in box)].reshape(-1).tolist()


def having(source, copies, world):
    """The elements of each tensor that each rank has, by (name, rank)."""
    had = {(name, rank): brute.kept(sharding, rank) for name, sharding in source.items() for rank in range(world)}
    more = defaultdict(set)
    for name, of in copies.items():
        for owner, keepers in of.items():
            for keeper in keepers:
                more[name, keeper] |= had[name, owner]
    return {where: elements | more[where] for where, elements in had.items()}


@given(losses())
def test_what_is_left_comes_from_the_living_and_the_rest_is_missing(drawn):
    """No lost rank sends, each element has one sender that has it, bytes are the least, nothing else is missing."""
    source, target, lost, copies = drawn
    world = world_of(source, target)
    had = having(source, copies, world + 1)
    wanted = {(name, rank): brute.kept(target[name], rank) for name in target for rank in range(world + 1)}
    holders = defaultdict(set)
    for (name, rank), elements in had.items():
        for element in elements:
            holders[name, element].add(rank)
    missing = {
        (name, element, tuple(sorted(holders[name, element])))
        for (name, _), elements in wanted.items()
        for element in elements
        if holders[name, element] <= lost
    }
    moves = Transfer(source, target, lost=lost, copies=copies, partial=True)
    nobody = {(name, element) for name, element, _ in missing}
    least = 0
    for rank in range(world + 1):
        local = moves.of(rank)
        assert (moves.bytes_out(rank), moves.bytes_in(rank)) == (local.bytes_out, local.bytes_in)
        written = Counter()
        for move in (*local.receives, *local.copies):
            elements = set(numbers(target[move.name], move.box))
            assert move.target == rank
            assert move.bytes == len(elements) * target[move.name].itemsize
            assert move.source not in lost
            assert elements <= had[move.name, move.source]
            if move.source != rank:
                assert not elements & had[move.name, rank], "it has this itself"
            written.update((move.name, element) for element in elements)
        mine = {(name, element) for name in target for element in wanted[name, rank]}
        assert written == Counter(mine - nobody)
        absent = Counter((name, element) for name, box in local.missing for element in numbers(target[name], box))
        assert absent == Counter(mine & nobody)
        least += sum(target[n].itemsize for n, e in mine - nobody if e not in had[n, rank])
        for peer in range(world + 1):
            ours = [move for move in local.sends if move.target == peer]
            assert ours == [move for move in moves.of(peer).receives if move.source == rank]
    assert moves.bytes == sum(moves.levels.values()) == least
    listed = Counter((name, e, ranks) for name, box, ranks in moves.missing for e in numbers(target[name], box))
    assert listed == Counter(missing)


@given(losses())
def test_it_is_an_error_exactly_where_something_is_missing(drawn):
    """``LostState`` says what ``missing`` does; a transfer that misses nothing is the same as the partial one."""
    source, target, lost, copies = drawn
    whole = Transfer(source, target, lost=lost, copies=copies)
    part = Transfer(source, target, lost=lost, copies=copies, partial=True)
    assert whole.missing == part.missing
    assert whole.digest != part.digest
    if part.missing:
        with pytest.raises(LostState) as caught:
            whole.of(0)
        assert caught.value.missing == part.missing
        assert caught.value.lost == tuple(sorted(lost))
    else:
        assert whole.bytes == part.bytes == whole.lower_bound
        assert [whole.of(rank) for rank in range(6)] == [part.of(rank) for rank in range(6)]


def test_copies_in_a_ring_share_what_is_asked_of_all():
    """Each shard is at two ranks, a lost one's at one: three ranks send four shards, each a third of it all."""
    source = {"w": Sharding(Mesh(dp=4), ("dp",), (4 * 300,))}
    target = {"w": Sharding(Mesh(dp=1, offset=8), (None,), (4 * 300,))}
    moves = Transfer(source, target, lost=[0], copies={"w": {rank: [(rank + 1) % 4] for rank in range(4)}})
    assert moves.outgoing.sum() == 4800
    assert moves.outgoing.max() <= 1600 + 4
    assert moves.sender_bound == 1600


def two_to_one():
    """A tensor cut over ranks 0 and 1, to be whole on rank 0."""
    return tuple({"w": Sharding(Mesh(tp=size), ("tp",), (8,))} for size in (2, 1))


def test_lost_ranks_and_copies_are_part_of_the_value():
    """They make another digest, and a pickled transfer, its repr and the transfer back have them."""
    source, target = two_to_one()
    plain = Transfer(source, target)
    lost = Transfer(source, target, lost=[1, 1], copies={"w": {1: [3, 2]}})
    assert lost.lost == (1,)
    assert len({plain.digest, lost.digest, Transfer(source, target, copies={"w": {1: [2, 3]}}).digest}) == 3
    assert lost == Transfer(source, target, lost=(1,), copies={"w": {1: (2, 3)}, "other": {0: [1]}})
    again = pickle.loads(pickle.dumps(lost))  # noqa: S301  - our own bytes
    assert (again, again.lost, again.copies, again.of(2)) == (lost, (1,), lost.copies, lost.of(2))
    assert (lost.world_size, plain.world_size) == (4, 2)
    assert repr(lost) == "Transfer(1 tensors of 1 classes, 16 bytes between ranks, lost rank 1)"
    assert repr(Transfer(source, target, lost=[1])).endswith("0 bytes between ranks, lost rank 1, 1 boxes missing)")
    assert Transfer(source, target, lost=[5]).reversed().lost == (5,)
    with pytest.raises(PlanError, match="rank 1 is lost, and the target gives it 'w'"):
        lost.reversed()


def test_the_error_says_what_is_lost_and_who_had_it():
    """The first box, the ranks that had it, how many there are; and what to do."""
    with pytest.raises(LostState, match=r"no rank is left that holds 'w'\[4:8\], which rank 1 had; keep") as caught:
        Transfer(*two_to_one(), lost=[1]).bytes  # noqa: B018  - a property that raises
    assert caught.value.missing == (("w", ((4, 8),), (1,)),)
    source, target = (dict.fromkeys("ab", Sharding(mesh, None, ())) for mesh in (Mesh(dp=3), Mesh(dp=1, offset=3)))
    with pytest.raises(LostState, match=r"holds 'a', which ranks 0, 1, 2 had \(the first of 2 boxes\); keep"):
        Transfer(source, target, lost=range(3)).of(3)


def moved(me, lost, copies, partial):
    """Move numbered elements from the ranks that are left; which tensors are wrong, and what was sent."""
    mesh, less = Mesh(tp=2, pp=2), Mesh(tp=1, dp=2)
    source = {
        "cut": Sharding(mesh, ("tp", None), (8, 6), at={"pp": 0}),
        "fused": Sharding(mesh, (None, "tp-pp"), (3, 16), "float64", parts=(8, 4, 4)),
        "whole": Sharding(mesh, (None,), (5,), "int64"),
    }
    target = {name: Sharding(less, None, one.shape, one.dtype) for name, one in source.items()}
    copies = {name: {int(owner): of for owner, of in each.items()} for name, each in copies.items()}
    moves = Transfer(source, target, lost=lost, copies=copies, partial=partial)
    kept = defaultdict(dict)
    for shift, name in enumerate(sorted(source)):
        for owner, keepers in copies.get(name, {}).items():
            if me.rank in keepers:
                kept[owner][name] = live.numbered(source[name], owner, shift)
    into = moves.allocate(me.rank)
    done = moves.run(live.shards(source, me.rank), into, kept=kept)
    boxes = moves.of(me.rank).missing
    for name, box in boxes:
        shift = sorted(target).index(name)
        part = tuple(slice(start, stop) for start, stop in box)
        into[name][part] = live.numbered(target[name], me.rank, shift)[part]
    return live.wrong(into, target, me.rank), done.bytes_in, moves.bytes_in(me.rank), len(boxes)


def test_copies_travel_between_real_ranks(ranks):
    """Ranks 2 and 3 are lost: what they had comes from the ranks that keep copies of it, and from those themselves."""
    copies = {"fused": {2: [0], 3: [1, 0]}}
    found = ranks(4, moved, [2, 3], copies, False)
    assert [bad for bad, *_ in found] == [[], [], [], []]
    assert [received for _, received, *_ in found] == [planned for _, _, planned, _ in found]
    # A quarter of "fused" is 96 bytes: rank 0 lacks rank 1's, and rank 1 those of ranks 0 and 2; each a half of "cut".
    assert [received for _, received, *_ in found] == [96 + 96, 192 + 96, 0, 0]


def test_the_rest_moves_where_some_of_it_is_missing(ranks):
    """A partial transfer leaves exactly the missing boxes to be written by somebody else."""
    found = ranks(4, moved, [2, 3], {"fused": {2: [1]}}, True)
    assert [bad for bad, *_ in found] == [[], [], [], []]
    assert [boxes for *_, boxes in found] == [3, 3, 0, 0]  # a piece of each part of rank 3's shard
