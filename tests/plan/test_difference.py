from __future__ import annotations

import pytest

from rankmesh.core import GroupSpec, Mesh, Plan, ends
from rankmesh.core.difference import difference
from rankmesh.readers.source import read

PAIRS = [
    ("tp=2,dp=4", "dp=4,tp=2"),
    ("tp=2,dp=4,pp=2", "tp=2,pp=4,dp=2"),
    ("tp=2,dp=4", "tp=2,dp=8"),
    ("megatron:world=32,tp=2,pp=4", "megatron:world=32,tp=2,pp=4,order=tp-pp-dp"),
    ("megatron:world=32,tp=2,pp=2", "ezpz:world=16,tp=2,pp=2"),
    ("megatron:world=64,tp=2,cp=2,pp=2,ep=4,etp=1", "megatron:world=64,tp=2,cp=2,pp=2,ep=8,etp=1"),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_ranks_that_differ_equal_brute_force(left: str, right: str) -> None:
    """For each common kind the ranks that see other members, compared one by one."""
    one, other = read(left).plan, read(right).plan
    found = {kind.name: kind.ranks for kind in difference(one, other).groups}
    for name in set(one.kinds) & set(other.kinds):
        differing = sum(
            _members(one, name, rank) != _members(other, name, rank)
            for rank in range(max(one.world_size, other.world_size))
        )
        assert found.get(name, 0) == differing


def _members(plan: Plan, name: str, rank: int) -> tuple[int, ...] | None:
    groups = plan.groups(name)
    return groups.of(rank).ranks if groups.has(rank) else None


def test_order_inside_a_group_counts() -> None:
    """The same members in another order are another group: ranks inside it differ."""
    left = Plan(Mesh(dp=4), [GroupSpec("dp")])
    right = Plan(Mesh(dp=4, rank_map=(1, 0, 2, 3)), [GroupSpec("dp")])
    found = difference(left, right)
    assert [(kind.name, kind.ranks) for kind in found.groups] == [("dp", 4)]
    assert found.groups[0].examples[0].right == (1, 0, 2, 3)


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
