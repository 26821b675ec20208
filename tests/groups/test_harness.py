import os
import time

import pytest
import torch
import torch.distributed as dist


def _sum(me):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def _one_hangs_one_dies_one_raises(me):
    if me.rank == 1:
        time.sleep(60)
    if me.rank == 2:
        os.kill(os.getpid(), 9)
    if me.rank == 3:
        raise ValueError("on purpose")
    return "fine"


def test_ranks_are_real_processes_of_one_world(ranks):
    """4 ranks: a collective of the world sees all of them."""
    assert ranks(4, _sum) == [4.0] * 4


@pytest.mark.long
def test_every_way_to_fail_is_distinguished(outcomes):
    """4 ranks: one that hangs, dies or raises is named as such, and no process survives."""
    fine, hung, died, raised = outcomes(4, _one_hangs_one_dies_one_raises, world=None, limit=6)
    assert (fine.ok, fine.value) == (True, "fine")
    assert (hung.hung, hung.ok) == (True, False)
    assert (died.code, died.ok) == (-9, False)
    assert (raised.error, raised.ok) == ("ValueError: on purpose", False)
    assert "_one_hangs_one_dies_one_raises" in raised.traceback


def test_a_server_goes_on_after_a_failure(ranks):
    """2 ranks: the world after one that hung is a fresh one."""
    assert ranks(2, _sum) == [2.0] * 2
