from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.layout import brute
from tests.layout.strategies import factors, kinds, meshes

from rankmesh import LayoutError, Mesh, UnknownAxis


@st.composite
def viewed(draw):
    """A mesh and the sizes of a view of it: another factorisation, in which some axes keep their name."""
    mesh = draw(meshes())
    parts = draw(factors(mesh.size))
    names = draw(st.permutations([*mesh.axes, "a", "b", "c", "d"]))[: len(parts)]
    return mesh, dict(zip(names, parts, strict=True))


@given(viewed(), st.data())
def test_groups_of_a_view_equal_brute_force(pair, data):
    """A view with nothing shared is a mesh of its own over the same ranks in the same order."""
    mesh, sizes = pair
    both = mesh.with_view("other", shared=(), **sizes)
    single = Mesh(offset=mesh.offset, rank_map=mesh.rank_map, **sizes)
    assert both.view("other") == single
    kind = data.draw(kinds(single, ordered=st.just(False), levels=st.just(False), picks=st.just(False)))
    assert both.groups(kind.groups.axes, view="other").tolist() == kind.expected
    for coordinate, rank in brute.places(sizes, mesh.offset, mesh.rank_map):
        assert both.coordinate(rank, view="other") == coordinate
        assert both.rank(view="other", **coordinate) == rank


@given(viewed())
def test_shared_axes_are_the_same_groups_or_refused(pair):
    """A view is accepted if and only if each axis that both name gives the same groups in both."""
    mesh, sizes = pair
    given_map = {"offset": mesh.offset, "rank_map": mesh.rank_map}
    common = [name for name in sizes if name in mesh.axes]
    unequal = [
        axis
        for axis in common
        if brute.groups(mesh.axes, [axis], **given_map) != brute.groups(sizes, [axis], **given_map)
    ]
    if unequal:
        with pytest.raises(LayoutError, match="its groups differ") as caught:
            mesh.with_view("other", **sizes)
        assert caught.value.axis in unequal
        assert caught.value.view == "other"
        return
    both = mesh.with_view("other", **sizes)
    for axis in common:
        assert both.groups(axis) == both.groups(axis, view="other")


@given(meshes(), st.data())
def test_split_keeps_the_ranks_of_the_axis(mesh, data):
    """Sub-axes cut an axis adjacent first; the parent's name stands for all of them."""
    axis = data.draw(st.sampled_from(list(mesh.axes)))
    parts = data.draw(factors(mesh.axes[axis]))
    names = ["one", "two", "three", "four"][: len(parts)]
    split = mesh.split(axis, **dict(zip(names, parts, strict=True)))
    assert split.parts == {axis: tuple(names)}
    assert split.groups(axis).tolist() == mesh.groups(axis).tolist()
    assert split.size == mesh.size
    for level, name in enumerate(names):
        pieces = [tuple(piece) for group in mesh.groups(axis) for piece in brute.level(group.ranks, parts, level)]
        assert sorted(map(tuple, split.groups(name).tolist())) == sorted(pieces)
    other = Mesh.from_dict(split.to_dict())
    assert (other, hash(other)) == (split, hash(split))


def test_split_fills_what_is_left_and_nests():
    """One sub-axis may be ``...``; sub-axes can be split again, and are read back whichever split is listed first."""
    mesh = Mesh(tp=2, cp=8).split("cp", inner=2, outer=...).split("outer", near=2, far=2)
    assert mesh.axes == {"tp": 2, "inner": 2, "near": 2, "far": 2}
    assert mesh.groups("cp") == Mesh(tp=2, cp=8).groups("cp")
    assert mesh.groups("outer").of(0) == (0, 4, 8, 12)
    assert mesh.groups("tp-outer").size == 8
    data = mesh.to_dict()
    for parts in (data["parts"], dict(reversed(data["parts"].items()))):
        assert Mesh.from_dict({**data, "parts": parts}) == mesh


def test_split_of_a_view():
    """An axis of a view can be split, which leaves the mesh as it is."""
    mesh = Mesh(tp=2, dp=4).with_view("expert", ep=8).split("ep", view="expert", near=4, far=...)
    assert mesh.axes == {"tp": 2, "dp": 4}
    assert mesh.groups("far", view="expert").of(1) == (1, 5)
    assert mesh.groups("ep", view="expert").size == 8
    assert Mesh.from_dict(mesh.to_dict()) == mesh


@pytest.mark.parametrize("shared", [("pp",), None])
def test_expert_view_of_the_design(shared):
    """Experts refactor the ranks of one pipeline stage; the pipeline groups stay."""
    mesh = Mesh(tp=2, cp=2, dp=4, pp=2).with_view("expert", etp=1, ep=8, edp=2, pp=2, shared=shared)
    assert mesh.groups("ep", view="expert").of(13) == tuple(range(8, 16))
    assert mesh.groups("pp", view="expert").of(13) == mesh.groups("pp").of(13) == (13, 29)


@pytest.mark.parametrize("parts", [{"a": ["a"]}, {"a": ["b"], "b": ["a"]}, {"a": ["tp", "b"], "b": ["c"], "c": ["b"]}])
def test_parts_that_form_a_cycle_are_refused(parts):
    """Saved sub-axes end at axes of the mesh or of the view; a circle is refused with its names."""
    data = Mesh(tp=2, dp=4).with_view("expert", ep=8).to_dict()
    with pytest.raises(LayoutError, match="are each other's") as caught:
        Mesh.from_dict({**data, "parts": parts})
    assert set(caught.value.axes) <= set(parts)
    with pytest.raises(LayoutError, match="are each other's"):
        Mesh.from_dict({**data, "views": {"expert": {"axes": [["tp", 8]], "parts": parts}}})


def test_a_saved_view_has_the_rank_range_of_its_mesh():
    """A view lies on the ranks of its mesh, whatever else its data says."""
    mesh = Mesh(tp=2, dp=4, offset=8).with_view("expert", ep=8)
    data = mesh.to_dict()
    data["views"]["expert"] |= {"offset": 0, "rank_map": list(range(7, -1, -1)), "views": {"x": {"axes": [["y", 8]]}}}
    assert Mesh.from_dict(data) == mesh


@given(viewed())
def test_a_view_of_another_size_is_refused(pair):
    """A view must cover exactly the ranks of the mesh."""
    mesh, sizes = pair
    wrong = {**sizes, next(iter(sizes)): next(iter(sizes.values())) + 1}
    assume(prod(wrong.values()) != mesh.size)
    with pytest.raises(LayoutError, match="another factorisation of the same ranks") as caught:
        mesh.with_view("other", **wrong)
    assert (caught.value.product, caught.value.size) == (prod(wrong.values()), mesh.size)


def test_unknown_views_and_shared_axes_are_named():
    """A view or a shared axis that does not exist is refused with the names that do."""
    mesh = Mesh(tp=2, dp=4).with_view("expert", ep=8)
    with pytest.raises(UnknownAxis, match=r"unknown view 'experts'.*did you mean 'expert'") as caught:
        mesh.groups("ep", view="experts")
    assert (caught.value.name, caught.value.known) == ("experts", ("expert",))
    with pytest.raises(UnknownAxis, match="unknown axis 'pp'"):
        mesh.with_view("other", x=8, shared=("pp",))
    with pytest.raises(LayoutError, match="the mesh has a view 'expert' already"):
        mesh.with_view("expert", ep=8)
