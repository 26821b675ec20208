"""The rank tables that the systems print about themselves, written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import LayoutError, Mesh
from rankmesh.core import recipes

SMALL = st.integers(1, 3)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("pp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_three_axes_of_two(name, table):
    """The minimal three-axis class on 8 ranks: tp adjacent, then pp, then dp."""
    assert Mesh(tp=2, pp=2, dp=2).groups(name).tolist() == table
    assert recipes.three_d(tp=2, pp=2, dp=2).groups(name).tolist() == table
    assert recipes.megatron(8, tp=2, pp=2, order="tp-pp-dp").groups(name).tolist() == table


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("dp", [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        ("tp", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        ("pp", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_megatron_sixteen(name, table):
    """Megatron-Core's documented example: 16 ranks, tp 2, pp 4."""
    assert recipes.megatron(16, tp=2, pp=4).groups(name).tolist() == table


LEVELS = [
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_megatron_hierarchy(level):
    """A group of 16 in levels of 2, 2 and 4: as levels, as sub-axes and in the recipe."""
    assert Mesh(cp=16).groups("cp").level_of((2, 2, 4), level).tolist() == LEVELS[level]
    split = Mesh(cp=16).split("cp", one=2, two=2, three=4)
    assert split.groups(("one", "two", "three")[level]).tolist() == LEVELS[level]
    plan = recipes.megatron(16, cp=16, hierarchical_cp=(2, 2, 4))
    assert plan.groups(f"hcp_{level}").tolist() == LEVELS[level]


def test_megatron_masked_example():
    """tp 2, dp 3, pp 4: the data groups are three ranks two apart, in the order of tp then pp."""
    starts = [stage + tp for stage in (0, 6, 12, 18) for tp in (0, 1)]
    assert Mesh(tp=2, dp=3, pp=4).groups("dp").tolist() == [[start, start + 2, start + 4] for start in starts]


CODE = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "dp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
}


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "dp"])
def test_ezpz_follows_its_code(name):
    """16 ranks of (dp, pp, cp, tp) with tp adjacent: data groups 8 apart, pipelines 4 apart."""
    assert recipes.ezpz(16, tp=2, cp=2, pp=2).groups(name).tolist() == CODE[name]


def test_reversed_enumeration():
    """HyperCommGrid's enumeration of ["a", "b"] on 2 x 2 x 2 groups by b first: ordered groups of "b-a"."""
    mesh = Mesh(a=2, b=2, c=2)
    assert mesh.groups("b-a", ordered=True).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert mesh.groups("a-b", ordered=True).tolist() == mesh.groups("b-a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_grid_equivalence_of_a_hundred_and_twenty():
    """A grid of tp 2, cp 3, pp 4, dp 5: data groups 24 apart; Megatron's own check refuses this order."""
    grid = Mesh(tp=2, cp=3, pp=4, dp=5).groups("dp")
    assert grid.tolist() == [list(range(start, 120, 24)) for start in range(24)]
    with pytest.raises(LayoutError, match=r"the mesh has \[0, 6, 12, 18\], the view has \[0, 2, 4, 6\]"):
        recipes.megatron(120, tp=2, cp=3, pp=4, order="tp-cp-pp-dp")


TRANSPOSES = {
    "tp": (0, 1, 2, 3, 4),
    "cp": (4, 0, 1, 2, 3),
    "dp": (3, 4, 0, 1, 2),
    "pp": (2, 3, 4, 0, 1),
    "ep": (1, 2, 3, 4, 0),
}
AXES = ("ep", "pp", "dp", "cp", "tp")


def as_sets(listed):
    """Groups without the order of groups; a group keeps the order of its members."""
    return sorted(tuple(int(rank) for rank in group) for group in listed)


@given(st.fixed_dictionaries(dict.fromkeys(AXES, SMALL)))
def test_nanotron(sizes):
    """Every group of nanotron's reshapes and transposes, for random sizes."""
    ranks = np.arange(np.prod(list(sizes.values()))).reshape([sizes[name] for name in AXES])
    ep, pp, dp, cp, tp = (range(sizes[name]) for name in AXES)
    plan = recipes.nanotron(**sizes)
    for name, axes in TRANSPOSES.items():
        expected = ranks.transpose(axes).reshape(-1, sizes[name])
        assert as_sets(plan.groups(name)) == as_sets(expected)
    mp = [ranks[:, :, d, c, :].reshape(-1) for c in cp for d in dp]
    dp_cp = [ranks[e, p, :, :, t].reshape(-1) for t in tp for p in pp for e in ep]
    tp_ep = [ranks[:, p, d, c, :].reshape(-1) for c in cp for p in pp for d in dp]
    assert as_sets(plan.groups("mp")) == as_sets(mp)
    assert as_sets(plan.groups("dp_cp")) == as_sets(dp_cp)
    assert as_sets(plan.groups("tp_ep")) == as_sets(tp_ep)
    assert plan.groups("world").tolist() == [ranks.reshape(-1).tolist()]


def test_nanotron_local():
    """The ranks of one host are consecutive."""
    plan = recipes.nanotron(tp=2, dp=4, local_world_size=4)
    assert plan.groups("local").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
