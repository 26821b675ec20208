"""Discovery of replicas: against the plain definition, for any values on any ranks."""

import json
from itertools import pairwise
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.ranges import ranks_in
from rankmesh.guard.discover import (
    BEFORE,
    combined,
    differing,
    discovered,
    entry,
    items,
    merged,
    of_rank,
    parted,
    windows,
)

VALUES = st.integers(0, 2)


def given_by(ranks):
    """The merged entries of ranks, from what each gives by item."""
    return merged(of_rank(rank, one) for rank, one in enumerate(ranks))


@given(st.lists(st.lists(VALUES, min_size=4, max_size=4), min_size=1, max_size=8))
def test_replicas_are_equal_and_change(histories):
    """Two ranks are in one kind if and only if a tensor was equal on both at each check, and changed in between."""
    described = items({"w": "[4]"}, 8)
    entries = [entry([{"w": one} for one in each[1:]], described, {}, {"w": each[0]})[0] for each in histories]
    kinds = discovered(given_by(entries))
    together = {frozenset((a, b)) for at, _ in kinds for a in ranks_in(at) for b in ranks_in(at) if a != b}
    moving = [all(a != b for a, b in pairwise(each[1:])) for each in histories]
    assert together == {
        frozenset((a, b))
        for a, one in enumerate(histories)
        for b, other in enumerate(histories)
        if a != b and one[1:] == other[1:] and moving[a]
    }


def test_a_parameter_that_only_decays_is_not_compared():
    """Its optimizer state stays: experts that began alike, and get no token in a window."""
    window = [{"w": step, "w.exp_avg": 0, "v": step, "v.exp_avg": step} for step in range(3)]
    described = items(dict.fromkeys(window[0], ""), 8)
    _, names = entry(window, described, {"w.exp_avg": "w", "v.exp_avg": "v"}, {})
    assert sorted(name for same in names.values() for name in same) == ["v", "v.exp_avg"]


def test_tensors_that_are_not_there_at_each_check():
    """An optimizer that is made again within a window."""
    assert entry([{"w": 1, "a": 1}, {"w": 2}, {"w": 3}], items({"a": ""}, 8), {}, {}) == ({}, {})


@pytest.mark.parametrize("every", [1, 7, 100, 5000])
def test_windows(every):
    """Each has three checks, in order, whose steps have no common divisor; no more than seven in 100 intervals."""
    found = {}
    for step in range(100 * every):
        for window, place in windows(step, every):
            found.setdefault(window, []).append(step)
            assert place == len(found[window]) - 1
    assert found[0] == [2, 3, 5]
    assert all(gcd(*steps) == 1 for steps in found.values() if len(steps) == 3)
    assert len(found) <= 7


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy")), max_size=6))
def test_kinds_that_differ(entries):
    """With what each of their ranks has, and no others."""
    found = differing(given_by(entries))
    for item in "abc":
        here = {rank: one[item] for rank, one in enumerate(entries) if item in one}
        assert found.get(item) == (here if len(set(here.values())) > 1 else None)


def test_ranks_that_part_with_the_first_step():
    """Equal before it, each another one since; two of three that stay equal have not."""
    both = [{"i": str(rank), f"i{BEFORE}": "0"} for rank in range(3)]
    assert parted(given_by(both)) == ((0, 1, 2), 1)
    assert parted(given_by([*both, {"i": "0", f"i{BEFORE}": "0"}])) == ((), 0)
    assert discovered(given_by(both)) == []


def test_items_of_many_ranks():
    """Layers of one shape are one item; its id does not depend on how many a rank has, its value does."""
    few = {f"layers.{number}.w": "[4]" for number in range(2)}
    more = few | {"layers.2.w": "[4]", "layers.3.w": "[8]"}
    assert len(items(more, 8)) == 4
    (item,) = items(few, 1024)
    assert sorted(map(len, items(more, 1024).values())) == [1, 3]
    assert item in items(more, 1024)
    assert combined(["a"], [1]) != combined(["a"], [2])


def test_what_learning_costs_at_16384_ranks():
    """Tensor- and data-parallel: 130 kinds; each rank gives less than 3 KB, and the result has less than 64 KB."""
    names = {f"layers.{n}.{part}{state}": "" for n in range(8) for part in "abcdef" for state in ("", ".m", ".v")}
    described = items(names, 2**14)
    assert len(described) == 18
    window = [dict.fromkeys(names, step) for step in range(3)]
    given, _ = entry(window, described, {}, window[0])
    assert len(str(given)) < 3000
    whole = {
        item: {f"{cut}": [[cut, 2**14, 128]] for cut in range(128)} if number else {"0": [[0, 2**14, 1]]}
        for number, item in enumerate(described)
    }
    kinds = discovered(whole)
    assert len(kinds) == 129
    assert kinds[0][0] == [[0, 2**14, 1]]
    assert len(json.dumps(kinds)) < 2**16
