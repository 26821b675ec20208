import pytest

from rankmesh import GroupSpec, Mesh, Plan, ends, read
from rankmesh.core.difference import difference

DP = Plan(Mesh(dp=4), [GroupSpec("dp")])
PAIRS = [
    ("tp=2,dp=4", "dp=4,tp=2"),
    ("tp=2,dp=4,pp=2", "tp=2,pp=4,dp=2"),
    ("tp=2,dp=4", "tp=2,dp=8"),
    ("megatron:world=32,tp=2,pp=4", "megatron:world=32,tp=2,pp=4,order=tp-pp-dp"),
    ("megatron:world=32,tp=2,pp=2", "ezpz:world=16,tp=2,pp=2"),
    ("megatron:world=64,tp=2,cp=2,pp=2,ep=4,etp=1", "megatron:world=64,tp=2,cp=2,pp=2,ep=8,etp=1"),
    (DP, DP.replace(rank_map=(1, 0, 2, 3))),  # the order inside a group counts
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_ranks_that_differ_equal_brute_force(left: str | Plan, right: str | Plan) -> None:
    """For each common kind the ranks that see other members, compared one by one, and the first of them."""
    one, other = read(left), read(right)
    found = {kind.name: kind for kind in difference(one, other, members=99).groups}
    for name in set(one.kinds) & set(other.kinds):
        ranks = range(max(one.world_size, other.world_size))
        seen = [(rank, _members(one, name, rank), _members(other, name, rank)) for rank in ranks]
        differing = [each for each in seen if each[1] != each[2]]
        assert (found[name].ranks if name in found else 0) == len(differing)
        if name in found:
            first = found[name].examples[0]
            assert (first.rank, first.left, first.right) == differing[0]


def _members(plan: Plan, name: str, rank: int) -> tuple[int, ...] | None:
    groups = plan.groups(name)
    return groups.of(rank).ranks if groups.has(rank) else None


def test_other_words_for_the_same_groups_are_no_difference() -> None:
    """A pick of every position gives the same groups; only the digests tell the spellings apart."""
    left = Plan(Mesh(pp=2), [GroupSpec("pp")])
    right = Plan(Mesh(pp=2), [GroupSpec("pp", pick=ends)])
    found = difference(left, right)
    assert not found.different
    assert found.digests[0] != found.digests[1]


def test_rank_ranges_and_worlds_count() -> None:
    """A mesh that starts at another rank differs, even where its axes are equal."""
    found = difference(Plan(Mesh(dp=2), [GroupSpec("dp")]), Plan(Mesh(dp=2, offset=2), [GroupSpec("dp")]))
    assert found.spans == ((0, 2), (2, 2))
    assert found.groups[0].ranks == 4
    assert found.different
