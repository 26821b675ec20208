from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.strategies import axes_of, kinds, meshes

from rankmesh import LayoutError, Mesh, NotAMember, ends, first, last


@given(st.data())
def test_array_equals_brute_force(data):
    """The array of any kind is the enumerated one: int64, of shape (groups, size), read-only."""
    kind = data.draw(kinds(data.draw(meshes())))
    array = kind.groups.array
    assert kind.groups.tolist() == array.tolist() == kind.expected
    assert array.dtype == np.int64
    assert array.shape == (len(kind.groups), kind.groups.size)
    assert not array.flags.writeable


@given(st.data())
def test_one_rank_equals_brute_force(data):
    """The group, index, position and piece of every rank are found without listing, and are right."""
    mesh = data.draw(meshes())
    kind = data.draw(kinds(mesh))
    for index, (whole, expected) in enumerate(zip(kind.whole, kind.expected, strict=True)):
        for rank in whole:
            assert kind.groups.index_of(rank) == index
            assert kind.groups.has(rank) is (rank in expected)
        for position, rank in enumerate(expected):
            for given_rank in (rank, np.int64(rank)):
                assert kind.groups.of(given_rank).ranks == tuple(expected)
                assert kind.groups.locate(given_rank)[1] == position


@given(st.data())
def test_indexing_and_iteration_equal_brute_force(data):
    """Groups are a sequence: length, indices from both ends, slices, iteration."""
    kind = data.draw(kinds(data.draw(meshes())))
    count = len(kind.expected)
    assert isinstance(kind.groups, Sequence)
    assert len(kind.groups) == count
    assert [list(group) for group in kind.groups] == kind.expected
    assert [list(kind.groups[i]) for i in range(-count, count)] == kind.expected * 2
    assert [list(group) for group in kind.groups[1::2]] == kind.expected[1::2]
    for index in (count, -count - 1):
        with pytest.raises(IndexError, match=str(index)):
            kind.groups[index]


@given(st.data())
def test_members_agree_on_the_coordinate_left_out(data):
    """The coordinate of a group is what each of its members has along the axes left out, in any order of the others."""
    mesh = data.draw(meshes())
    axes = data.draw(axes_of(mesh))
    groups = mesh.groups(axes)
    assert groups == mesh.groups(tuple(reversed(axes)))
    for rank in range(mesh.offset, mesh.offset + mesh.size):
        left = {axis: place for axis, place in mesh.coordinate(rank).items() if axis not in axes}
        assert groups.coordinate_of(rank) == left
        assert all(groups.coordinate_of(other) == left for other in groups.of(rank))


@given(meshes(most=3).flatmap(lambda mesh: st.lists(kinds(mesh), min_size=5, max_size=5)))
def test_equal_kinds_are_equal_groups(drawn):
    """Equal kinds have equal arrays and hash alike; equal partitions are the same groups, each in the same order."""
    for one, other in combinations(drawn, 2):
        if one.groups == other.groups:
            assert hash(one.groups) == hash(other.groups)
            assert one.expected == other.expected
        if one.groups.partition == other.groups.partition:
            assert sorted(one.expected) == sorted(other.expected)


@given(st.data())
def test_group_is_a_sequence_of_its_ranks(data):
    """A group behaves as the tuple of its ranks, and equals it."""
    kind = data.draw(kinds(data.draw(meshes())))
    index = data.draw(st.integers(0, len(kind.expected) - 1))
    group, ranks = kind.groups[index], tuple(kind.expected[index])
    assert isinstance(group, Sequence)
    assert (len(group), group.size, tuple(group), group.ranks) == (len(ranks), len(ranks), ranks, ranks)
    assert group in {ranks}
    assert group != range(ranks[0], ranks[-1] + 1)
    assert group == ranks
    assert group == list(ranks)
    assert hash(group) == hash(ranks)
    assert group == kind.groups.of(ranks[0])
    assert [group[i] for i in range(-len(ranks), len(ranks))] == list(ranks * 2)
    assert group[::-1] == ranks[::-1]
    assert [group.index(rank) for rank in ranks] == list(range(len(ranks)))
    assert np.asarray(group).tolist() == list(ranks)
    assert group != (*ranks, -1)
    assert -1 not in group
    with pytest.raises(IndexError):
        group[len(ranks)]
    with pytest.raises(ValueError, match="not in"):
        group.index(-1)


def test_reprs():
    """A long group shows its first ranks and its size."""
    groups = Mesh(tp=2, dp=16).groups("dp")
    assert repr(groups[1]) == "Group(1, 3, 5, 7, 9, 11, 13, 15, ... 16 ranks)"
    assert repr(groups).startswith("Groups(axes='dp', 2 groups of 16: Group(0, 2")


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (ends, [[0, 6], [1, 7]]),
        (first, [[0], [1]]),
        (last, [[6], [7]]),
        ([1, -1, 1], [[2, 6], [3, 7]]),
        (lambda ranks: (ranks[-1], ranks[0]), [[6, 0], [7, 1]]),
    ],
)
def test_picks(pick, expected):
    """Picks keep positions in the order of choice, each once; of one position, both ends are that one."""
    assert Mesh(tp=2, pp=4).groups("pp").pick(pick).tolist() == expected
    assert Mesh(tp=2, pp=1).groups("pp").pick(ends).tolist() == [[0], [1]]


def test_groups_are_narrowed_in_order_and_once():
    """Groups that are picked or cut into levels cannot be cut, picked groups not be picked again."""
    groups = Mesh(pp=4).groups("pp")
    for narrow in (
        lambda: groups.pick(ends).level_of((2, 2), 1),
        lambda: groups.level_of((2, 2), 0).level_of((2, 2), 1),
        lambda: groups.pick(ends).pick(first),
    ):
        with pytest.raises(LayoutError):
            narrow()


def test_a_rank_that_the_pick_leaves_out_is_an_error():
    """Asking for the group of a rank that was not picked raises NotAMember with the position and the pick."""
    groups = Mesh(tp=2, pp=4).groups("pp").pick(ends)
    for query in (groups.of, groups.locate):
        with pytest.raises(NotAMember, match="rank 2 is at position 1 of its group along pp") as caught:
            query(2)
        assert (caught.value.rank, caught.value.position, caught.value.picked) == (2, 1, (0, 3))
        assert isinstance(caught.value, LookupError)


def test_reversed_enumeration():
    """HyperCommGrid's enumeration of ["a", "b"] on 2 x 2 x 2 groups by b first: ordered groups of "b-a"."""
    mesh = Mesh(a=2, b=2, c=2)
    assert mesh.groups("b-a", ordered=True).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert mesh.groups("a-b", ordered=True).tolist() == mesh.groups("b-a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
