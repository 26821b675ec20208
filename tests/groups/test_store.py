"""What meetings leave in the store, and what they find out in a large world."""

import pytest
import torch.distributed as dist
from tests.counting import Counting
from tests.torch_lacks import listed_keys

import rankmesh as rm
from rankmesh.core.rank_range import RankRange
from rankmesh.errors import AgreementError
from rankmesh.runtime.agreement import PlanProposal, agree


def _plan(number):
    return rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")], name=f"plan {number}")


def _many(me):
    """The keys in the store after ten, and after many more, plans were connected and closed."""
    found = []
    for rounds in (10, 90):
        for number in range(rounds):
            rm.connect(_plan(f"{rounds} {number}"), timeout=20).close()
        me.meet(f"after {rounds}")
        found.append(len([key for key in me.store.list_keys() if not key.startswith(("met/", "meet/"))]))
        me.meet(f"counted {rounds}")
    return found


@pytest.mark.long
@listed_keys
def test_nothing_stays_in_the_store(ranks):
    """4 ranks, 100 plans connected and closed: as many keys as after ten."""
    for ten, hundred in ranks(4, _many):
        assert hundred == ten


def _after_failures(me):
    store = dist.PrefixStore("own", me.store)
    for number in range(3):
        proposal = PlanProposal(me.rank, RankRange(0, me.size), {"plan": number, "own": me.rank})
        me.error(AgreementError, agree, store, proposal, 20)
    proposal = PlanProposal(me.rank, RankRange(0, me.size), {"plan": "same"})
    agree(store, proposal, 20).complete(20, 20)
    me.meet("end")
    return [key for key in me.store.list_keys() if "own/" in key]


@listed_keys
def test_what_failed_is_deleted_with_the_next_that_succeeds(ranks):
    """3 ranks, three meetings at which all differ, then one at which they agree: nothing of the three stays."""
    assert ranks(3, _after_failures, world=None) == [["own/rankmesh/job/0-3/epoch"]] * 3


def test_who_is_missing_in_a_large_world_is_found_in_few_words(tmp_path):
    """No process, 16,384 ranks of which three did not come: one rank finds them in the store, by name."""
    size, missing = 16_384, [7, 8_000, 16_000]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proposal = PlanProposal(0, RankRange(0, size), {"plan": "same"})
    for block in range(-(-size // 31)):
        here = sum(
            1 << rank % 31 * 2 for rank in range(block * 31, min(size, block * 31 + 31)) if rank not in [0, *missing]
        )
        store.add(f"rankmesh/job/0-{size}/0/agree/arrived/{block}", here)
    counting = Counting(store)
    with pytest.raises(AgreementError) as caught:
        agree(counting, proposal, 0.2)
    assert caught.value.values["missing"] == missing
    assert counting.calls.total() < 1_100, "some words for each 31 ranks, not for each"
