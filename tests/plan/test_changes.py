import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.strategies import cases

from rankmesh import GroupSpec, Mesh, Options, Plan, UnknownGroup, recipes
from rankmesh.errors import LayoutError, PlanError


@given(cases(), st.randoms(use_true_random=False))
def test_a_rank_map_permutes_every_group(case, random):
    """Replacing the rank map puts every member of every group, of views too, where the map says."""
    plan = case.plan
    covered = plan.mesh.rank_range
    ranks = list(range(covered.offset, covered.stop))
    random.shuffle(ranks)
    before, placed = plan.replace(rank_map=None), plan.replace(rank_map=ranks)
    for name, groups in before.kinds.items():
        expected = [[ranks[rank - covered.offset] for rank in group] for group in groups]
        assert placed.groups(name).tolist() == expected
    assert placed.replace(rank_map=None) == before
    assert (placed.specs, placed.name, placed.fixed_world) == (plan.specs, plan.name, plan.fixed_world)


@given(cases())
def test_nothing_replaced_is_the_same_plan(case):
    """A plan with nothing changed is equal, and so is one whose groups were put in another order and back."""
    plan = case.plan
    assert plan.replace() == plan
    assert plan.replace(specs=plan.specs[::-1]).replace(specs=plan.specs) == plan
    kept, (*_, last) = plan.specs[:-1], plan.specs
    assert plan.without(last.name) == plan.replace(specs=kept)


def test_groups_that_are_added_inherit():
    """A group added to a plan, a loaded one too, has the options that it would have had from the start."""
    mesh = Mesh(dp=4, cp=2).with_view("expert", ep=8)
    specs = [GroupSpec("dp_cp", "dp-cp"), GroupSpec("ep", view="expert"), GroupSpec("own", "dp", share=True)]
    more = [GroupSpec("zero", "dp-cp"), GroupSpec("all", "ep", view="expert"), GroupSpec("dp")]
    values = {"options": Options(timeout=60, share=False), "view_options": {"expert": Options(share=True)}}
    plan = Plan(mesh, specs, world_size=16, name="llm", **values)
    whole = Plan(mesh, [*specs, *more], world_size=16, name="llm", **values)
    assert plan.with_groups(*more) == whole
    assert Plan.from_json(plan.to_json()).with_groups(*more) == whole
    assert whole.without("zero", "all", "dp") == plan


def test_options_of_some_kinds_or_of_all():
    """Options go over those of the kinds that are named; without names over all, and over groups to come."""
    plan = Plan(Mesh(tp=2, dp=2), [GroupSpec("tp", timeout=5), GroupSpec("dp")])
    some = plan.with_options(Options(backend="gloo"), "tp")
    assert [spec.options.to_dict() for spec in some.specs] == [{"backend": "gloo", "timeout": 5.0}, {}]
    every = plan.with_options(Options(timeout=9)).with_groups(GroupSpec("mp", "tp-dp"))
    assert [spec.options.timeout for spec in every.specs] == [9.0, 9.0, 9.0]


def test_a_mesh_moves_with_its_map():
    """A mesh at another offset has the same shape, and its map moves along."""
    mesh = Mesh(tp=2, dp=2, rank_map=(0, 2, 1, 3)).with_view("expert", ep=4)
    moved = mesh.replace(offset=8)
    assert moved.groups("ep", view="expert").tolist() == [[8, 10, 9, 11]]
    assert moved.replace(offset=0) == mesh


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda plan: plan.replace(rank_map=(0, 0, 1, 2)), LayoutError, "exactly once"),
        (lambda plan: plan.replace(mesh=Mesh(tp=4)), KeyError, "unknown axis 'dp': this mesh has the axes tp"),
        (lambda plan: plan.with_groups(GroupSpec("tp")), PlanError, "two groups of the plan are named 'tp'"),
        (lambda plan: plan.without("dpp"), UnknownGroup, "did you mean 'dp'"),
        (lambda plan: plan.with_options(Options(timeout=5), "dpp"), UnknownGroup, "did you mean 'dp'"),
        (lambda plan: plan.with_options("tp"), PlanError, "give Options"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    """What a plan would refuse from the start it refuses as a change."""
    plan = recipes.axes(Mesh(tp=2, dp=2))
    with pytest.raises(error, match=message):
        change(plan)


@pytest.mark.parametrize("make", [Options, lambda **fields: GroupSpec("tp", **fields)])
def test_a_misspelt_field_is_a_type_error(make):
    """A field that does not exist is a TypeError, as type checkers say."""
    with pytest.raises(TypeError, match="timeot"):
        make(timeot=5)


def test_a_kind_says_that_it_is_a_pipeline():
    """Whole groups along pp are pipelines, others where they say so; the plan holds what is not the default."""
    assert [GroupSpec("pp").pipeline, GroupSpec("embd", "pp", pick=(0, -1)).pipeline, GroupSpec("tp").pipeline] == [
        True,
        False,
        False,
    ]
    assert Plan(Mesh(pp=2), [GroupSpec("pp", pipeline=True)]).to_json() == Plan(Mesh(pp=2), [GroupSpec("pp")]).to_json()
    plan = Plan(Mesh(stage=4), [GroupSpec("stage", pipeline=True)])
    assert Plan.from_json(plan.to_json()).spec("stage").pipeline
    assert plan.digest != Plan(Mesh(stage=4), [GroupSpec("stage")]).digest
    assert repr(plan.specs[0]) == "GroupSpec('stage', pipeline=True)"
    with pytest.raises(PlanError, match="pipeline is 1; give True or False"):
        GroupSpec("stage", pipeline=1)
