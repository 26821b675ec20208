from hypothesis import given
from tests.plan.strategies import cases

from rankmesh import GroupSpec, Mesh, Plan, ends
from rankmesh.core import recipes


@given(cases())
def test_describe_equals_the_plan(case):
    """What a rank is told is what the plan says: coordinate, members, place, neighbours, options."""
    plan = case.plan
    for rank in range(plan.world_size):
        data, local = plan.describe(rank), plan.of(rank)
        inside = rank in plan.mesh
        assert data["coordinate"] == (plan.mesh.coordinate(rank) if inside else None)
        assert data["not_in"] == [name for name in plan.kinds if name not in local]
        assert [group["name"] for group in data["groups"]] == list(local)
        for group in data["groups"]:
            ranks, place = group["ranks"], group["ranks"].index(rank)
            single = len(ranks) == 1
            assert (group["rank"], group["size"]) == (place, len(ranks))
            assert group["next"] == (None if single else ranks[(place + 1) % len(ranks)])
            assert group["prev"] == (None if single else ranks[place - 1])
            assert group["communicator"] == (None if single else local[group["name"]].canonical)
            assert group["options"] == local[group["name"]].options.to_dict()


def test_text_of_one_rank():
    """Coordinate, formula, view, groups with reasons, and what the rank is not in."""
    mesh = Mesh(tp=2, dp=2, pp=3).with_view("expert", ep=4, pp=3)
    specs = [
        GroupSpec("tp"),
        GroupSpec("ep", view="expert"),
        GroupSpec("mp", "tp-dp"),
        GroupSpec("half", "tp-dp", levels=(2, 2), level=1),
        GroupSpec("embd", "pp", pick=ends),
    ]
    assert Plan(mesh, specs).explain(5).splitlines() == [
        "rank 5 of 12: tp=1, dp=0, pp=1",
        "  5 = 0 + tp 1·1 + dp 0·2 + pp 1·4",
        "  view expert: ep=1, pp=1",
        "  tp    [4, 5]        position 1 of 2, prev 4, next 4   varies tp by 1; fixed dp=0, pp=1",
        "  ep    [4, 5, 6, 7]  position 1 of 4, prev 4, next 6   varies ep by 1; fixed pp=1; view expert",
        (
            "  mp    [4, 5, 6, 7]  position 1 of 4, prev 4, next 6   varies tp by 1, dp by 2; fixed pp=1"
            "; uses the communicator of ep"
        ),
        ("  half  [5, 7]        position 0 of 2, prev 7, next 7   varies tp by 1, dp by 2; fixed pp=1; level 1 of 2x2"),
        "  not in: embd",
    ]


def test_text_of_a_rank_map_and_of_idle_ranks():
    """A mapped rank is looked up, a single one needs no communicator, an idle one is outside."""
    plan = Plan(Mesh(tp=1, dp=2, rank_map=[1, 0]), [GroupSpec("tp")], world_size=3)
    assert plan.explain(0).splitlines()[1:] == [
        "  0 = rank_map[tp 0·1 + dp 1·1]",
        "  tp  [0]  the only rank, needs no communicator   varies tp by 1; fixed dp=1",
    ]
    assert plan.explain(2) == "rank 2 of 3: outside the mesh, which covers ranks 0 to 1"


def test_labels():
    """A group's label is its kind and coordinate, and the piece of a hierarchy."""
    plan = recipes.megatron(16, tp=2, cp=4, pp=2, hierarchical_cp=(2, 2))
    local = plan.of(13)
    assert [str(local[name]) for name in ("tp", "cp", "hcp_0", "hcp_1", "embd")] == [
        "tp@pp1,dp0,cp2",
        "cp@pp1,dp0,tp1",
        "hcp_0@pp1,dp0,tp1#1",
        "hcp_1@pp1,dp0,tp1#0",
        "embd@dp0,cp2,tp1",
    ]
