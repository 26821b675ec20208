from math import prod

from hypothesis import Phase, find, given, settings

from rankmesh import Mesh, Plan
from rankmesh.testing.strategies import meshes, plans, views


@given(meshes(max_size=24, max_axes=3, max_offset=5, shuffled=True))
def test_meshes_keep_their_limits(mesh):
    """Every mesh is valid, within the limits, and each rank's coordinate leads back to it."""
    assert mesh.size == prod(mesh.axes.values()) <= 24
    assert 1 <= len(mesh.axes) <= 3
    assert 0 <= mesh.offset <= 5
    ranks = range(mesh.offset, mesh.offset + mesh.size)
    assert [mesh.rank(**mesh.coordinate(rank)) for rank in ranks] == list(ranks)


@given(views(max_size=24))
def test_views_cover_the_same_ranks(mesh):
    """The view's axes factorise the ranks of the mesh."""
    assert mesh.view("expert").size == mesh.size


@given(plans(max_size=16))
def test_plans_are_plans(plan):
    """A plan survives its JSON, and the groups of each kind are disjoint."""
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    for groups in plan.kinds.values():
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members))


def test_everything_is_reached():
    """Views, picks, levels, options, shuffled ranks and groups of several axes do occur."""
    quick = settings(phases=[Phase.generate], database=None)
    for wanted in (
        lambda spec: spec.view,
        lambda spec: spec.pick,
        lambda spec: spec.levels and max(spec.levels) > 1,
        lambda spec: spec.options.timeout,
        lambda spec: len(spec.axes) > 1,
    ):
        assert find(plans(), lambda plan, wanted=wanted: any(map(wanted, plan.specs)), settings=quick)
    assert find(meshes(shuffled=True), lambda mesh: mesh.rank_map is not None, settings=quick)
    assert find(meshes(), lambda mesh: True) == Mesh(tp=1)
