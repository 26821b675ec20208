import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.layout import brute
from tests.layout.strategies import axes_of, meshes

from rankmesh import LayoutError, Mesh, UnknownAxis


@given(meshes(), st.data())
def test_a_slice_is_the_group_of_its_rank(mesh, data):
    """A sub-mesh lists the ranks of the group through its rank, in their order; where they are apart it is refused."""
    axes = data.draw(axes_of(mesh).filter(bool))
    rank = data.draw(st.sampled_from(mesh.rank_range.ranks(np.arange(mesh.size)).tolist()))
    members = next(
        group for group in brute.groups(mesh.axes, axes, offset=mesh.offset, rank_map=mesh.rank_map) if rank in group
    )
    if max(members) - min(members) >= len(members):
        with pytest.raises(LayoutError, match="contiguous ranks"):
            mesh.slice(axes, of=rank)
        return
    part = mesh.slice(axes, of=rank)
    assert list(part.groups(list(part.axes))[0]) == members
    assert part.axes == {name: size for name, size in mesh.axes.items() if name in axes}


@given(meshes(), st.data())
def test_brackets_when_all_ranks_agree(mesh, data):
    """mesh[axes] is the sub-mesh where there is one; where each position has its own, the error says how to get it."""
    axes = tuple(data.draw(axes_of(mesh).filter(bool)))
    if len(mesh.groups(axes)) == 1:
        assert mesh[axes] == mesh.slice(axes, of=mesh.offset)
        return
    with pytest.raises(LayoutError, match=r"say whose: mesh\.slice\('"):
        mesh[axes]


@given(meshes(), st.data())
def test_membership_in_a_kind_is_of_groups(mesh, data):
    """A list, a tuple, a group or a row of the array is in a kind if it is one of its groups; a rank is refused."""
    groups = mesh.groups(data.draw(axes_of(mesh)))
    index = data.draw(st.integers(0, len(groups) - 1))
    members = groups.tolist()[index]
    assert all(form in groups for form in (members, tuple(members), groups[index], groups.array[index]))
    assert members[::-1] not in groups or len(members) == 1
    assert "tp" not in groups
    assert [] not in groups
    for rank in (members[0], np.int64(members[0])):
        with pytest.raises(LayoutError, match=r"ask for a rank with groups\.has"):
            rank in groups  # noqa: B015  - refused


@given(meshes())
def test_a_mesh_of_a_mapping(mesh):
    """A mesh made of a mapping is the mesh of its keywords."""
    assert Mesh.of(mesh.axes, offset=mesh.offset, rank_map=mesh.rank_map) == mesh


@given(meshes(), st.data())
def test_joined_otherwise(mesh, data):
    """Axes joined by something else than hyphens, or written in capitals, are recognised."""
    axes = data.draw(axes_of(mesh).filter(bool))
    assume(not any(other != name and other.startswith(name) for name in mesh.axes for other in mesh.axes))
    if len(axes) > 1:
        with pytest.raises(UnknownAxis, match=f"axes are joined by hyphens: '{'-'.join(axes)}'"):
            mesh.groups(data.draw(st.sampled_from([",", "_", "*", ", ", ""])).join(axes))
    with pytest.raises(UnknownAxis, match=f"did you mean '{axes[0]}'"):
        mesh.groups(axes[0].upper())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh.parse(5), "received 5 as an axis string"),
        (lambda: Mesh.of("tp=2"), "give a mapping"),
        (lambda: Mesh.of({3: 2}), "received axis name 3"),
        (lambda: Mesh.of({}), "received no axes"),
        (lambda: Mesh(tp=2, rank_map=5), "received 5 as rank_map"),
        (lambda: Mesh.from_dict({}), "received data that is no mesh"),
        (lambda: Mesh.from_dict(5), "received data that is no mesh"),
        (lambda: Mesh.from_dict({"axes": 3, "offset": 0}), "received data that is no mesh"),
        (lambda: Mesh.from_dict({"axes": [["tp", 2]], "offset": 0, "views": 3}), "received data that is no mesh"),
        (lambda: Mesh(tp=2)["tp", "dp"], "received axis 'dp'"),
    ],
)
def test_what_is_no_mesh(make, words):
    """Whatever is given instead of sizes, a text, a map or saved data is refused in words."""
    with pytest.raises((LayoutError, UnknownAxis), match=words):
        make()
