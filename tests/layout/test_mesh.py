import copy
import pickle
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout import brute
from tests.layout.strategies import meshes, sizes

from rankmesh import Job, Mesh


@given(meshes())
def test_coordinates_equal_brute_force(mesh):
    """Each coordinate is the one that enumeration gives; a stride is the product of the sizes before."""
    assert list(mesh.strides.values()) == [prod(list(mesh.axes.values())[:before]) for before in range(len(mesh.axes))]
    for coordinate, rank in brute.places(mesh.axes, mesh.offset, mesh.rank_map):
        assert mesh.coordinate(rank) == coordinate
        assert mesh.rank(**coordinate) == rank


def test_axes_of_size_one_may_be_left_out_of_a_coordinate():
    """A rank is found without the axes that leave no choice."""
    assert Mesh(tp=2, cp=1, dp=2).rank(tp=1, dp=1) == 3


@given(sizes(), st.data())
def test_parse_reads_what_str_writes(axes, data):
    """The axis string of a mesh makes an equal mesh, and * stands for what is left."""
    mesh = Mesh(**axes)
    assert Mesh.parse(str(mesh)) == mesh
    name = data.draw(st.sampled_from(list(axes)))
    text = ",".join(f"{axis}={'*' if axis == name else size}" for axis, size in axes.items())
    assert Mesh.parse(text, world_size=mesh.size) == mesh


def test_parse_with_an_offset_fills_what_is_left_behind_it():
    """A star counts the ranks from the offset to the end of the world."""
    assert Mesh.parse("tp=2,dp=*", world_size=12, offset=4) == Mesh(tp=2, dp=4, offset=4)


@given(meshes(), st.data())
def test_reorder_permutes_strides_never_sizes(mesh, data):
    """Another order keeps names and sizes; the strides are those of the new order."""
    order = data.draw(st.permutations(list(mesh.axes)))
    other = mesh.reorder("-".join(order))
    assert other.axes == mesh.axes
    assert list(other.axes) == order
    assert other.rank_range == mesh.rank_range
    assert other == Mesh(offset=mesh.offset, rank_map=mesh.rank_map, **{name: mesh.axes[name] for name in order})


def test_reorder_takes_a_split_axis_for_its_sub_axes():
    """A split axis may be named in an order too: its sub-axes move together, the first adjacent."""
    mesh = Mesh(tp=2, cp=8).split("cp", inner=2, outer=4)
    assert mesh.reorder("cp-tp") == mesh.reorder("inner-outer-tp")
    assert mesh.reorder("cp-tp").strides == {"inner": 1, "outer": 2, "tp": 8}


def test_an_axis_may_be_called_self():
    """No axis name collides with what Python passes by itself."""
    mesh = Mesh.parse("self=2,cls=3")
    assert mesh.rank(**mesh.coordinate(5)) == 5
    assert list(Job(world_size=6, self=mesh)) == ["self"]


@given(meshes())
def test_value_semantics(mesh):
    """A mesh survives to_dict, pickle and copy, and is made of a mapping: equal, with an equal hash."""
    mapped = Mesh.of(mesh.axes, offset=mesh.offset, rank_map=mesh.rank_map)
    pickled = pickle.loads(pickle.dumps(mesh))  # noqa: S301
    for other in (Mesh.from_dict(mesh.to_dict()), pickled, copy.deepcopy(mesh), mapped):
        assert other == mesh
        assert hash(other) == hash(mesh)


@given(meshes(), meshes())
def test_equality_is_what_the_mesh_says(one, other):
    """Meshes are equal when axes in order, offset and rank order are, and different from anything else."""
    same = (list(one.axes.items()), one.offset, one.rank_map) == (
        list(other.axes.items()),
        other.offset,
        other.rank_map,
    )
    assert (one == other) is same
    assert one != str(one)


def test_identity_map_is_no_map():
    """A rank map that lists the ranks in order is the same mesh as none."""
    assert Mesh(tp=2, dp=2, offset=4, rank_map=[4, 5, 6, 7]) == Mesh(tp=2, dp=2, offset=4)


def test_frozen():
    """A mesh cannot be changed, nor can what it hands out change it."""
    mesh = Mesh(tp=2, dp=2)
    with pytest.raises(AttributeError, match="offset"):
        mesh.offset = 3
    mesh.axes["tp"] = 7
    mesh.views["x"] = mesh
    assert mesh == Mesh(tp=2, dp=2)


def test_repr_says_what_is_not_the_default():
    """The repr names offset, rank map and views only where there are some."""
    assert repr(Mesh(tp=2)) == "Mesh(tp=2)"
    mesh = Mesh(tp=2, dp=2, offset=1, rank_map=[4, 3, 2, 1]).with_view("expert", ep=4)
    assert repr(mesh) == "Mesh(tp=2, dp=2, offset=1, rank_map=<4 ranks>).with_view('expert', ep=4)"
