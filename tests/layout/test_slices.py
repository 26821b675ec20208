import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.layout import brute
from tests.layout.strategies import axes_of, meshes

from rankmesh import GroupSpec, Job, LayoutError, Mesh, Plan, UnknownAxis


@st.composite
def slices(draw):
    """A slice of a mesh with the ranks that it has, in order, by brute force; at times a slice of a slice."""
    mesh = draw(meshes())
    ranks = [rank for _, rank in brute.places(mesh.axes, mesh.offset, mesh.rank_map)]
    part = mesh
    for _ in range(draw(st.integers(1, 2))):
        axes = draw(axes_of(part).filter(bool))
        rank = draw(st.sampled_from(ranks))
        fixed = {name: place for name, place in part.coordinate(rank).items() if name not in axes}
        ranks = [other for other in ranks if fixed.items() <= part.coordinate(other).items()]
        part = part.slice(axes, of=rank)
    return part, ranks


@given(slices(), st.data())
def test_a_slice_is_a_mesh(made, data):
    """Ranks, coordinates, membership and groups of a slice are those of its ranks in their order, wherever they are."""
    part, ranks = made
    assert part.size == len(ranks)
    assert [part.rank(**part.coordinate(rank)) for rank in ranks] == ranks
    assert list(part.rank_range.members) == sorted(ranks)
    assert part.offset == min(ranks)
    assert part.rank_range.stop == max(ranks) + 1
    assert [rank for rank in range(max(ranks) + 3) if rank in part] == sorted(ranks)
    axes = data.draw(axes_of(part))
    expected = brute.groups(part.axes, axes, offset=part.offset, rank_map=ranks)
    groups = part.groups(axes)
    assert groups.tolist() == expected
    for group in expected:
        for position, rank in enumerate(group):
            assert groups.of(rank) == tuple(group)
            assert groups.locate(rank)[1] == position
            assert groups[groups.index_of(rank)] == tuple(group)
    for rank in set(range(max(ranks) + 3)).difference(ranks):
        assert not groups.has(rank)
        with pytest.raises(LayoutError, match=f"rank {rank} is outside this mesh"):
            part.coordinate(rank)


@given(slices())
def test_a_slice_is_saved_and_moved_as_any_mesh(made):
    """A slice comes back from its data, from JSON and from a plan with the same digest; it moves and takes a map."""
    part, ranks = made
    assert Mesh.from_dict(json.loads(json.dumps(part.to_dict()))) == part
    plan = Plan(part, [GroupSpec(axis) for axis in part.axes])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.world_size == max(ranks) + 1
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    assert [plan.of(rank)[axis].ranks for rank in ranks for axis in part.axes] == [
        tuple(part.groups(axis).of(rank)) for rank in ranks for axis in part.axes
    ]
    moved = part.replace(offset=part.offset + 3)
    assert [moved.rank(**part.coordinate(rank)) for rank in ranks] == [rank + 3 for rank in ranks]
    turned = part.replace(rank_map=ranks[::-1])
    assert [turned.rank(**part.coordinate(rank)) for rank in ranks] == ranks[::-1]
    assert list(turned.replace(rank_map=None).rank_range.members) == sorted(ranks)
    with pytest.raises(LayoutError, match="exactly once"):
        part.replace(rank_map=[*ranks[1:], max(ranks) + 1])


@given(meshes(), st.data())
def test_slices_through_all_ranks_are_a_job(mesh, data):
    """The slices of some axes through all ranks are disjoint, and make a job that covers the ranks of the mesh."""
    axes = data.draw(axes_of(mesh).filter(bool))
    parts = {f"part{number}": mesh.slice(axes, of=group[0]) for number, group in enumerate(mesh.groups(axes))}
    world = mesh.rank_range.stop
    job = Job(world_size=world, partial=mesh.offset > 0, **parts)
    for rank in range(world):
        assert job.of(rank) == tuple(name for name, part in parts.items() if rank in part)
    plans = Plan.of_job(job, {name: [GroupSpec("all", part.axes)] for name, part in parts.items()})
    assert [plan.groups("all")[0].ranks for plan in plans.values()] == [group.ranks for group in mesh.groups(axes)]


def test_saved_ranks_that_are_apart():
    """Saved ranks that are apart are different numbers, as many as the mesh has positions."""
    data = Mesh(tp=2, dp=2).slice("dp", of=1).to_dict()
    assert data["rank_map"] == [1, 3]
    for ranks in ([1], [1, 1], [1, -3], [1, 2.5], [1, 3, 5]):
        with pytest.raises(LayoutError):
            Mesh.from_dict({**data, "rank_map": ranks})


@given(meshes(), st.data())
def test_brackets_fix_axes(mesh, data):
    """mesh[axis, position, ...] has the ranks at these positions, in their order, by brute force."""
    fixed = {axis: data.draw(st.integers(0, mesh.axes[axis] - 1)) for axis in data.draw(axes_of(mesh))}
    assume(len(fixed) < len(mesh.axes))
    part = mesh[tuple(item for pair in fixed.items() for item in pair)]
    places = brute.places(mesh.axes, mesh.offset, mesh.rank_map)
    expected = [rank for coordinate, rank in places if fixed.items() <= coordinate.items()]
    assert [rank for _, rank in brute.places(part.axes, part.offset, part.rank_map)] == expected
    assert part.axes == {axis: size for axis, size in mesh.axes.items() if axis not in fixed}


@given(meshes(), st.data())
def test_flattened_axes_are_one(mesh, data):
    """The joined axis has the groups of its axes, and each other axis has its own, wherever the axes lie."""
    axes = data.draw(axes_of(mesh).filter(bool))
    flat = mesh.flatten(*axes, name="joined")
    assert sorted(flat.groups("joined").tolist()) == sorted(mesh.groups(axes).tolist())
    for axis in mesh.axes.keys() - set(axes):
        assert sorted(flat.groups(axis).tolist()) == sorted(mesh.groups(axis).tolist())
    first = min(map(list(mesh.axes).index, axes))
    assert list(flat.axes)[first] == "joined"
    assert Mesh.from_dict(flat.to_dict()) == flat


@given(meshes(), st.data())
def test_renamed_axes_are_the_same(mesh, data):
    """Another name has the ranks of the old one, in views too, and may be the old name of another axis."""
    names = list(mesh.axes)
    moved = dict(zip(names, data.draw(st.permutations(names)), strict=True))
    viewed = mesh.with_view("same", **mesh.axes)
    other = viewed.rename(**moved)
    assert list(other.axes) == list(moved.values())
    for old, new in moved.items():
        assert other.groups(new).tolist() == other.groups(new, view="same").tolist() == mesh.groups(old).tolist()
    split = Mesh(cp=8).split("cp", inner=2, outer=4).rename(inner="near")
    assert split.groups("cp") == Mesh(cp=8).groups("cp")


@pytest.mark.parametrize(
    "select",
    [
        lambda mesh: mesh["tp"],
        lambda mesh: mesh["tp", 2],
        lambda mesh: mesh["tp", -1],
        lambda mesh: mesh["tp", 0, "dp", 0],
        lambda mesh: mesh["tp", 0, "tp", 1],
        lambda mesh: mesh["tp", "dp"],
        lambda mesh: mesh[0, "tp"],
        lambda mesh: mesh.flatten("tp", "tp"),
        lambda mesh: mesh.flatten("tp", name="dp"),
        lambda mesh: mesh.rename(tp="dp"),
        lambda mesh: mesh.rename(tp="2d"),
    ],
)
def test_selections_that_are_no_mesh(select):
    """Positions that do not exist, axes that are named twice, and nothing that is left are refused."""
    with pytest.raises(LayoutError):
        select(Mesh(tp=2, dp=2))


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
