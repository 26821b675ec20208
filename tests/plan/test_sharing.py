from itertools import combinations

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


@given(cases())
def test_all_members_agree(case):
    """Two ranks in one group compute the same members, leader, options and label for it."""
    for name, expected in case.expected.items():
        for ranks in expected.groups:
            seen = [case.plan.of(rank)[name] for rank in ranks]
            for mine in seen:
                assert list(mine.ranks) == ranks
                assert (mine.canonical, mine.options, str(mine)) == (
                    seen[0].canonical,
                    seen[0].options,
                    str(seen[0]),
                )


@given(cases())
def test_labels_distinguish_groups(case):
    """No two groups of a kind have one label."""
    for name, expected in case.expected.items():
        labels = {str(case.plan.of(ranks[0])[name]) for ranks in expected.groups}
        assert len(labels) == len(expected.groups)


@given(cases())
def test_classes_hold_on_every_rank(case):
    """The kinds of one sharing class lead one another on every rank; each kind is in exactly one class."""
    classes = case.plan.sharing
    assert sorted(name for names in classes for name in names) == sorted(case.expected)
    for rank in range(case.plan.mesh.offset, case.plan.mesh.rank_range.stop):
        local = case.plan.of(rank)
        for names in classes:
            assert len({local[name].canonical for name in names if name in local}) <= 1


@given(cases())
def test_classes_join_nothing_that_differs(case):
    """Two kinds of one class have equal groups and options, and neither wants its own communicator."""
    for names in case.plan.sharing:
        for one, other in combinations(names, 2):
            left, right = case.expected[one], case.expected[other]
            assert sorted(left.groups) == sorted(right.groups)
            assert left.options == right.options
            assert left.options.share is not False


def test_share_false_takes_its_own():
    """A group that does not share neither uses another's communicator nor lends its own."""
    plan = Plan(Mesh(dp=4), [GroupSpec("a", "dp", share=False), GroupSpec("b", "dp"), GroupSpec("c", "dp")])
    assert {name: group.canonical for name, group in plan.of(0).items()} == {"a": "a", "b": "b", "c": "b"}
    assert plan.sharing == [("a",), ("b", "c")]


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
