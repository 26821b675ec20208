import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks

from rankmesh.backend.registries import registries
from rankmesh.dialects.process_groups import ProcessGroups
from rankmesh.errors import AgreementError, NotInitialized, SizesError

SIZES = st.integers(1, 4)

# The table of the class that this stands for: 8 ranks, TP=2, PP=2, DP=2.
TABLE = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
}


def enumerated(tp, pp, dp):
    """Every group, by loops over coordinates."""

    def rank(t, p, d):
        return d * pp * tp + p * tp + t

    return {
        "tp": [[rank(t, p, d) for t in range(tp)] for d, p in itertools.product(range(dp), range(pp))],
        "pp": [[rank(t, p, d) for p in range(pp)] for d, t in itertools.product(range(dp), range(tp))],
        "dp": [[rank(t, p, d) for d in range(dp)] for p, t in itertools.product(range(pp), range(tp))],
    }


def _seen(groups):
    kinds = {"tp": groups.tp_group, "pp": groups.pp_group, "dp": groups.dp_group}
    return {
        "members": {name: dry.members(pg) for name, pg in kinds.items()},
        "places": [groups.tp_rank, groups.pp_rank, groups.dp_rank],
        "sizes": [groups.tp_size, groups.pp_size, groups.dp_size],
        "stages": [groups.is_first_stage, groups.is_last_stage],
    }


def _live(me):
    before = registries()
    with ProcessGroups(tp=2, pp=2, dp=2) as groups:
        seen = _seen(groups)
        sums = {}
        for name in TABLE:
            total = torch.tensor([me.rank])
            dist.all_reduce(total, group=getattr(groups, f"{name}_group"))
            sums[name] = total.item()
        second = ProcessGroups(tp=2, pp=2, dp=2)
        other = second.tp_group is not groups.tp_group
        second.close()
    return {
        "seen": seen,
        "sums": sums,
        "other": other,
        "closed": me.error(NotInitialized, lambda: groups.groups)["message"],
        "back": registries() == before,
        "left": leaks.left_by(me, _cycle),
    }


def _cycle():
    with ProcessGroups(tp=2, pp=2, dp=2) as groups:
        for pg in (groups.tp_group, groups.pp_group, groups.dp_group):
            dist.all_reduce(torch.ones(1), group=pg)


def test_eight_ranks(ranks):
    """8 ranks: the written table, sums over each group, two states side by side, and nothing left of either."""
    for rank, live in enumerate(ranks(8, _live)):
        for name, groups in TABLE.items():
            row = dry.row_of(rank, groups)
            assert live["seen"]["members"][name] == row
            assert live["sums"][name] == sum(row)
        assert live["seen"]["places"] == [rank % 2, rank // 2 % 2, rank // 4]
        assert live["seen"]["stages"] == [rank // 2 % 2 == 0, rank // 2 % 2 == 1]
        assert live["other"] is True
        assert "call ProcessGroups() first" in live["closed"]
        assert (live["back"], live["left"]) == (True, {})


def _properties(me):
    @dry.PROPERTIES
    @given(st.tuples(SIZES, SIZES, SIZES), st.data())
    def check(sizes, data):
        tp, pp, dp = sizes
        rank = data.draw(st.integers(0, tp * pp * dp - 1))
        expected = {name: dry.row_of(rank, groups) for name, groups in enumerated(tp, pp, dp).items()}
        with dry.world(rank, tp * pp * dp), ProcessGroups(tp, pp, dp) as groups:
            seen = _seen(groups)
        assert seen["members"] == expected
        assert seen["places"] == [expected[name].index(rank) for name in ("tp", "pp", "dp")]
        assert seen["sizes"] == list(sizes)
        place = expected["pp"].index(rank)
        assert seen["stages"] == [place == 0, place == pp - 1]

    check()


def test_any_rank_of_any_world(ranks):
    """Dry worlds of up to 64 ranks: members and places as loops over coordinates give them."""
    ranks(1, _properties, world=None)


def _refused(me):
    sizes = me.error(SizesError, ProcessGroups, 2, 2, 2)
    zero = me.error(AssertionError, ProcessGroups, 0, 2, 2)
    diverged = me.error(AgreementError, ProcessGroups, *((4, 1, 1) if me.rank else (2, 1, 2)))
    dist.destroy_process_group()
    absent = me.error(AssertionError, ProcessGroups, 1, 1, 1)
    return [sizes["message"], zero["message"], diverged["kind"], absent["message"]]


def test_refusals(ranks):
    """4 ranks: sizes that do not give the world, ranks that disagree, and no world; the first and last assert."""
    for sizes, zero, diverged, absent in ranks(4, _refused):
        assert "world_size is 4, but dp 2 x tp 2 x pp 2 = 8" in sizes
        assert "size of axis 'tp' is 0" in zero
        assert diverged == "AgreementError"
        assert "init_process_group" in absent


def test_the_enumeration_is_the_written_table():
    """The loops that the tests compare with give the table that the class was published with."""
    assert enumerated(2, 2, 2) == TABLE


@pytest.mark.parametrize(("rank", "printed"), [(0, "TP=2 PP=1 DP=1"), (1, "")])
def test_log_prints_on_rank_0_only(capsys, rank, printed):
    """``log`` prints the sizes where it is given rank 0."""
    groups = object.__new__(ProcessGroups)
    groups.tp_size, groups.pp_size, groups.dp_size = 2, 1, 1
    groups.log(rank)
    out = capsys.readouterr().out
    assert printed in out
    assert bool(out) == (rank == 0)
