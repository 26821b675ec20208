from hypothesis import given
from tests.plan.strategies import cases

from rankmesh import GroupSpec, Mesh, Plan


@given(cases())
def test_kinds_with_the_same_groups_share(case):
    """A kind uses the first kind's groups that has the same, with equal options; of picked ones only equal picks do."""
    plan = case.plan
    for place, spec in enumerate(plan.specs):
        same = [
            other.name
            for other in plan.specs[:place]
            if sorted(plan.groups(other.name).tolist()) == sorted(plan.groups(spec.name).tolist())
            and plan.groups(other.name).picked == plan.groups(spec.name).picked
            and other.options == spec.options
            and spec.options.share is not False
        ]
        assert plan.canonical[spec.name] == (same[0] if same else spec.name)
        assert plan.of(plan.groups(spec.name)[0][0])[spec.name].canonical == plan.canonical[spec.name]
    classes = {spec.name: tuple(n for n in case.expected if plan.canonical[n] == spec.name) for spec in plan.specs}
    assert sorted(plan.sharing) == sorted(names for names in classes.values() if names)


@given(cases())
def test_all_members_agree(case):
    """Two ranks in one group compute the same members, leader, options and label for it; no two groups one label."""
    for name, expected in case.expected.items():
        assert len({str(case.plan.of(ranks[0])[name]) for ranks in expected.groups}) == len(expected.groups)
        for ranks in expected.groups:
            seen = [case.plan.of(rank)[name] for rank in ranks]
            for mine in seen:
                assert list(mine.ranks) == ranks
                assert (mine.canonical, mine.options, str(mine)) == (seen[0].canonical, seen[0].options, str(seen[0]))


def test_groups_of_one_rank_need_no_communicator():
    """Only leaders of more than one rank count as communicators."""
    plan = Plan(Mesh(tp=1, dp=2, pp=1), [GroupSpec(name) for name in ("tp", "dp", "pp")])
    assert [group.name for group in plan.of(0).communicators] == ["dp"]


def test_equal_ends_are_not_equal_members():
    """Groups of one size with the same first and last rank but another between do not share."""
    plan = Plan(Mesh(pp=4), [GroupSpec("a", "pp", pick=[0, 1, 3]), GroupSpec("b", "pp", pick=[0, 2, 3])])
    assert {name: group.canonical for name, group in plan.of(0).items()} == {"a": "a", "b": "b"}


def test_options_that_are_the_default_change_nothing():
    """A group that says a default is the same group, so it shares and has the same digest."""
    output = Plan(Mesh(dp=4), [GroupSpec("dp"), GroupSpec("too", "dp", share=True, lazy=False, high_priority=False)])
    unsaid = Plan(Mesh(dp=4), [GroupSpec("dp"), GroupSpec("too", "dp")])
    assert output == unsaid
    assert output.of(0)["too"].canonical == "dp"
