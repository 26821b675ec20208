"""Groups that connect at once: where ranks listen is told once, and making a group asks the store for nothing."""

import random
import time

import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from bench.counting import CountingStore
from rankmesh.backend import torch_private
from rankmesh.backend.addresses import Address, Addresses
from rankmesh.core.rank_range import RankRange
from rankmesh.errors import AgreementError
from rankmesh.rendezvous.store import JobStore

PLAN = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp")])


def _use(groups):
    for group in groups.values():
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group.pg)
        assert tensor.item() == group.size


def test_what_is_told_is_what_is_read():
    """No process, 50 ranks from 7 on in any order: each reads the addresses of any others, by position."""
    source = random.Random(1)  # noqa: S311  - the same order in every run
    told = Addresses(JobStore(dist.HashStore()), "at", RankRange(7, 50))
    ranks = list(told.span.members)
    source.shuffle(ranks)
    for rank in ranks:
        told.tell(rank, f"host{rank}", bytes([rank]) * 16, {0: rank, 3: 2 * rank})
    for _ in range(20):
        members = {step: source.sample(ranks, 5) for step in (0, 3)}
        assert told.read(members) == {
            step: [Address(f"host{rank}", bytes([rank]) * 16, (1 + step // 3) * rank) for rank in chosen]
            for step, chosen in members.items()
        }
    assert sorted(told.keys) == sorted(key for rank in ranks for key in told.keys_of(rank))


@pytest.mark.parametrize("text", ["", "7 host\n", "7 host 00 0=x\n", "7 host zz 0=1\n", "hello"])
def test_what_is_no_address_is_refused(text):
    """No process: a text of another program is an error that says whose keys these are."""
    store = dist.HashStore()
    told = Addresses(JobStore(store), "at", RankRange(7, 2))
    store.set("rankmesh/job/at/0", text)
    with pytest.raises(AgreementError, match="another program writes under rankmesh's keys"):
        told.read({0: [7, 8]})


def _operations(me, plan):
    """Store operations from the world to groups that are used, and the keys that are there while they live."""
    store = CountingStore(me.store)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
    dist.barrier()
    before = store.operations
    with rm.connect(plan, timeout=20) as groups:
        _use(groups)
        done = store.operations - before
        me.meet("used")
        keys = [key for key in me.store.list_keys() if "rankmesh" in key or "gloo" in key]
        own = [key for key in keys if any(f"{name}/" in key for name in plan.kinds)]
        me.meet("counted")
    dist.destroy_process_group()
    return done, own


def test_groups_that_connect_at_once_leave_no_word_in_the_store(ranks):
    """8 ranks, Megatron's 20 kinds: no key of any group, and at most 26 operations a rank, whoever comes last."""
    plan = rm.recipes.megatron(8, tp=2, cp=2, pp=2, ep=2)
    found = ranks(8, _operations, plan, world=None)
    assert all(own == [] for _, own in found)
    assert max(done for done, _ in found) <= 26


def _asking(me, those):
    """Connect where gloo's addresses are of a form that these ranks do not know."""
    if me.rank in those:
        torch_private.GlooDevices.listening = None
    if len(those) < me.size:
        return me.error(AgreementError, rm.connect, PLAN, timeout=20)["fields"]
    with rm.connect(PLAN, timeout=20) as groups:
        _use(groups)
    return "used"


def test_where_addresses_are_not_known_the_store_is_asked(ranks):
    """4 ranks: all of them ask the store; one alone that does so is told, before any group is made."""
    assert ranks(4, _asking, (0, 1, 2, 3)) == ["used"] * 4
    assert all("gloo" in fields for fields in ranks(4, _asking, (2,)))


def _other_numbers(me):
    """Connect where one rank's gloo gives its pairs other numbers than that rank had told."""
    if me.rank == 1:
        next_pairs = torch_private.GlooDevices.next_pairs
        torch_private.GlooDevices.next_pairs = lambda self, sizes: {
            step: first + 1 for step, first in next_pairs(self, sizes).items()
        }
    return me.error(rm.ConnectError, rm.connect, rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp")]), timeout=2)["message"]


def test_numbers_that_gloo_does_not_give_are_found_out(ranks):
    """2 ranks, one tells wrong numbers of pairs: no group is made of pairs that belong to another one."""
    assert all("rank 1" in message for message in ranks(2, _other_numbers))


def _one_is_slow(me):
    """Connect while rank 0, then the last rank, takes its time between two groups: longer than one try of its peers."""
    create, turns = torch_private.create, []

    def slow(making, **how):
        if "all" in how["desc"]:
            turns.append(len(turns))
            time.sleep(2 if me.rank == (0, me.size - 1)[turns[-1]] else 0)
        return create(making, **how)

    torch_private.create = slow
    for _ in range(2):
        with rm.connect(PLAN, timeout=6) as groups:
            assert groups.phases["all"] > 2
            _use(groups)
    assert turns == [0, 1]


def test_a_slow_member_is_waited_for(ranks):
    """4 ranks, of which the first, or the last, is slow between its groups: the others try again, and all are used."""
    ranks(4, _one_is_slow)


def _after_failure(me):
    """A connect that one rank fails in the middle, then three more: the first of their numbers were called before."""
    create, made = torch_private.create, []

    def failing(making, **how):
        made.append(how["name"])
        if me.rank == 3 and len(made) == 2:
            raise RuntimeError("a full disk")
        return create(making, **how)

    torch_private.create = failing
    failed = me.error(rm.ConnectError, rm.connect, PLAN, timeout=3)["message"]
    torch_private.create = create
    for _ in range(3):
        with rm.connect(PLAN, timeout=20) as groups:
            _use(groups)
    return "full disk" in failed


def test_a_device_is_not_used_again_after_a_failure(ranks):
    """4 ranks, one fails while groups are made: all hear it, and connect anew without each other's old calls."""
    assert ranks(4, _after_failure, limit=60) == [True] * 4
