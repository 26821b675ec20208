import pytest

from rankmesh import sim
from rankmesh.dialects.process_groups import ProcessGroups


def _stages():
    with ProcessGroups(tp=2, pp=2, dp=2) as groups:
        return [groups.is_first_stage, groups.is_last_stage, repr(groups)]


def test_stages():
    """8 simulated ranks: the ends of the pipeline, which is outside of tensors and inside of data."""
    shown = "ProcessGroups(tp=2, pp=2, dp=2)"
    assert sim.run(_stages, 8) == [[rank // 2 % 2 == 0, rank // 2 % 2 == 1, shown] for rank in range(8)]


@pytest.mark.parametrize(("rank", "printed"), [(0, "TP=2 PP=1 DP=1"), (1, "")])
def test_log_prints_on_rank_0_only(capsys, rank, printed):
    """``log`` prints the sizes where it is given rank 0."""
    groups = object.__new__(ProcessGroups)
    groups.tp_size, groups.pp_size, groups.dp_size = 2, 1, 1
    groups.log(rank)
    out = capsys.readouterr().out
    assert printed in out
    assert bool(out) == (rank == 0)
