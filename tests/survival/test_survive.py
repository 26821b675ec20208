"""rm.survive on real processes that are killed, stopped, or fail: the numbers are those of a run without loss."""

import gc
import os
import signal
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.sockets import free_port
from tests.survival.program import member, text_of
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh.rendezvous import ChannelLost
from rankmesh.survival import session, world
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.machine import Left
from rankmesh.survival.members import Members

# A rank that is killed closes its connections: nobody waits this long, and a loaded machine loses nobody else.
KILLED = 60


@pytest.fixture
def job(outcomes, tmp_path):
    """Run a job of ``size`` members of which some die; how each of the others ended."""

    def run(size, deaths, *, may_fail=False, **how):
        arguments = (free_port(), str(tmp_path), deaths, "tp=2,pp=2,dp=*", how)
        ended = outcomes(size, member, *arguments, world=None)
        dead = {int(path.name.removeprefix("dead-")) for path in tmp_path.glob("dead-*")}
        values = []
        for outcome in ended:
            if outcome.rank in dead:
                values.append(None)
                continue
            assert outcome.ok, text_of(ended)
            assert max(outcome.value["left"]) <= 0, text_of(ended)
            assert outcome.value["initialised"] is False
            assert may_fail or "error" not in outcome.value, text_of(ended)
            values.append(outcome.value)
        return values

    return run


def all_trained(ended, ranks=8):
    """Each rank of the plan has ended with the right numbers, once."""
    results = [value["result"] for value in ended if value is not None and value.get("result") is not None]
    assert sorted(results) == list(range(ranks)), [value and value.get("error") for value in ended]


# Simulated ranks die in more places; here are those that are others in processes.
DEATHS = {
    "rank 0": [{"member": 0, "at": "step", "n": 4}],
    "a second one in the regroup": [{"member": 3, "at": "step", "n": 4}, {"member": 0, "at": "agree", "n": 1}],
    "a spare that takes over": [{"member": 3, "at": "step", "n": 4}, {"member": 8, "at": "enter", "n": 2}],
    "as another one begins": [
        {"member": 6, "at": "client", "n": 1},
        {"member": 2, "at": "gather", "n": 1, "how": "sleep", "seconds": 1.0, "after": True},
    ],
}
LATE = {"a second one in the regroup": pytest.mark.long, "as another one begins": pytest.mark.nightly}


@pytest.mark.parametrize("what", [pytest.param(what, marks=LATE.get(what, ())) for what in DEATHS])
def test_spares_take_over(job, what):
    """8 ranks and 2 spares: all numbers are right; lost ranks and spares that wait return None."""
    # One that dies before it is connected is missed as late as one that is slow.
    timeout = 6 if what == "as another one begins" else KILLED
    ended = job(10, DEATHS[what], spares=2, timeout=timeout)
    all_trained(ended)
    dead = {who for who, value in enumerate(ended) if value is None}
    assert dead == {death["member"] for death in DEATHS[what] if "how" not in death}
    waited = [value for value in ended if value is not None and not value["history"]]
    assert [value["result"] for value in waited] == [None] * (2 - len(dead))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "moment",
    [
        {"at": "step", "n": 3},
        {"at": "take", "n": 4},
        {"at": "rankmesh.survival.redundancy:Copies._meet", "n": 3, "after": True},
        {"at": "rankmesh.survival.redundancy:Copies.send", "n": 1, "after": True},
        {"at": "rankmesh.survival.redundancy:Copies.send", "n": 4, "after": True},
    ],
    ids=["in a step", "in a commit", "as copies have arrived", "as the first copies travel", "as copies travel"],
)
def test_copies_of_a_shard_without_a_replica(job, moment):
    """4 ranks and a spare: rank 3 is lost with the only shards of its stage and slice, and the spare gets them."""
    all_trained(job(5, [{"member": 3, **moment}], spares=1, redundancy=1, timeout=KILLED), ranks=4)


@pytest.mark.parametrize("who", [0, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_rank_that_is_stopped(job, who):
    """8 ranks and a spare: a rank that is stopped, also the one that serves the store, is left out."""
    all_trained(job(9, [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP"}], spares=1, timeout=8))


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("who", [0, 5])
def test_a_stopped_rank_goes_on(job, who):
    """8 ranks and a spare: a rank that was left out while it was stopped hears so, and disturbs nobody."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP", "again": 8.0}]
    ended = job(9, deaths, spares=1, timeout=4, may_fail=True, pause=0.8)
    all_trained(ended[:who] + ended[who + 1 :])
    left_out, too_late = f"member {who} was left out of the job", f"the job ends, since member {who} stood still for"
    assert ended[who]["error"].startswith((f"ConnectError: {left_out}", f"ConnectError: {too_late}"))


@pytest.mark.nightly
@pytest.mark.parametrize(("who", "seconds"), [(0, 2.0), (0, 2.3), (0, 2.7), (5, 2.3)])
def test_a_rank_is_stopped_for_about_the_timeout(job, who, seconds):
    """8 ranks and a spare: it wakes as the others agree, and is left out or not; nobody else is, and nobody waits."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP", "again": seconds}]
    ended = job(9, deaths, spares=1, timeout=2, may_fail=True, pause=0.3)
    error = ended[who].get("error", "")
    assert not error or error.startswith(f"ConnectError: member {who} was left out of the job"), error
    all_trained([*ended[:who], *ended[who + 1 :]] if error else ended)
    others = [one for one in ended if one is not ended[who]]
    assert not [one["error"] for one in others if "error" in one]
    # From the end of the epoch to the agreement: not the patience of several timeouts.
    assert max(history[4].get("agree", 0.0) for one in others for history in one["history"]) < 3 * 2


@pytest.mark.long
def test_a_slow_rank_is_waited_for(job):
    """8 ranks and a spare: a rank that is busy for four timeouts while it responds costs nobody anything."""
    ended = job(9, [{"member": 5, "at": "step", "n": 3, "how": "sleep", "seconds": 8.0}], spares=1, timeout=2)
    all_trained(ended)
    assert [epoch for epoch, *_ in ended[5]["history"]] == [0]


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("who", [0, 5])
def test_a_rank_that_hangs_is_evicted(job, who):
    """8 ranks and a spare: a rank responds, and comes to no call; the others name it after 2 s, and leave it out."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "hang"}]
    ended = job(9, deaths, spares=1, evict=2.0, timeout=4, may_fail=True)
    all_trained([*ended[:who], *ended[who + 1 :]])
    assert [(epoch, step) for epoch, _, step, *_ in ended[1]["history"]] == [(0, 0), (1, 3)]
    start = f"ConnectError: member {who} was left out of the job, since the others waited for it (late: rank {who}"
    assert ended[who]["error"].startswith(start)


def test_a_spare_is_not_evicted(monkeypatch):
    """3 ranks and a spare, which the program waits for in the default group: the watch may name it, and it stays."""
    watched, evicted = {}, []
    monkeypatch.setattr(world, "Watch", lambda *_, **how: watched.update(how))
    one = object.__new__(world.EpochWorld)
    one._members = Members.first("dp=3", world_size=4, spares=1)
    one.watch(2.0, lambda _, members: evicted.append(members))
    watched["diagnosed"]("late: rank 3", (3,))
    watched["diagnosed"]("late: ranks 1, 3", (1, 3))
    assert evicted == [(), (1,)]


class _CutStore:
    """A store whose connection is cut."""

    def __getattr__(self, name):
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("enter", []),
        ("give", ["key", "text"]),
        ("taken", ["key"]),
        ("first", ["key", "text"]),
        ("meet", ["key"]),
        ("is_last", ["key"]),
        ("wait_for", [lambda: _CutStore().wait]),
    ],
)
def test_a_connection_of_ours_that_is_cut(call, given):
    """What torch raises for a store or a group of an epoch's world is ``ConnectError``: no call of the program's."""
    one = object.__new__(world.EpochWorld)
    one.rank, one.store, one._device, one._aborted = 2, _CutStore(), torch.device("cpu"), Future()
    one._seconds, one._group, one._members, one.size = 1.0, _CutStore(), Members.first("dp=3", world_size=3), 3
    with pytest.raises(rm.ConnectError) as raised:
        getattr(one, call)(*given)
    assert raised.value.rank == 2


def test_a_store_that_is_cut_as_a_round_concludes():
    """The round ends with an error of its own kind, and the members begin one through another store."""
    with pytest.raises(ChannelLost):
        world.has_finished(_CutStore(), Epoch(), 2)


class _Found:
    """What a member needs of the others until its first epoch; they are on one host."""

    member, hosts = 0, dict.fromkeys(range(2), "node1")

    def __init__(self, device):
        self.device = torch.device(device)

    def introduce(self):
        return None

    def announce(self, members, message, _):
        self.announced = [members, message["evicted"]]

    def event(self):
        return threading.Event()

    def now(self):
        return 0.0


@pytest.mark.parametrize(
    ("device", "evict", "limit", "ends"),
    [("cuda", None, 600.0, True), ("cuda", False, False, True), ("cuda", 5.0, 5.0, True), ("cpu", None, False, False)],
)
def test_a_hang_ends_the_epoch(monkeypatch, device, evict, limit, ends):
    """Over NCCL calls are watched by default, and a diagnosis without a culprit ends the epoch; over gloo the limit."""
    peers = _Found(device)
    prepared = mock.Mock()
    monkeypatch.setattr(session, "prepare", prepared)
    one = session.Session("dp=2", spares=0, shrink=None, timeout=10, evict=evict, reach=lambda _: peers)
    assert one.evict == limit
    assert prepared.called == bool(limit)
    one.driver.diagnosed(one.driver.epoch, "crosswise: ranks 0, 1 wait for each other", ())
    assert one.state.report(Left()).unclear == "crosswise: ranks 0, 1 wait for each other"
    assert one.driver.ended.is_set() == ends
    assert getattr(peers, "announced", None) == ([(1,), {}] if ends else None)
    one.driver.diagnosed(one.driver.epoch, "late: rank 1", (1,))
    assert peers.announced == [(1,), {"1": "the others waited for it (late: rank 1)"}]


class _Marker:
    """Something that a node of a graph holds."""


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 3

    @staticmethod
    def backward(_, gradient):
        raise RuntimeError("the group was aborted")


def test_a_member_that_leaves_its_world_has_nothing_of_a_backward_pass_that_failed():
    """The last node to be made runs first, and fails: torch has kept the other in its queue, with what that holds."""
    x, kept = torch.ones(1, requires_grad=True), _Marker()
    gone = weakref.ref(kept)
    loss = _Keeps.apply(x, kept) + _Fails.apply(x)
    with suppress(RuntimeError):
        loss.backward()
    del x, kept, loss
    session.drop_failed_backward()
    gc.collect()
    assert gone() is None


def test_a_rank_that_raises(job):
    """8 ranks and a spare: an exception of the program leaves one rank out, where it is raised; the others go on."""
    ended = job(9, [{"member": 3, "at": "step", "n": 4, "how": "raise"}], spares=1, may_fail=True)
    all_trained([*ended[:3], *ended[4:]])
    assert ended[3]["error"] == "ValueError: a bug at step 4"


def test_a_program_that_regroups_itself(job):
    """8 ranks and a spare: train catches the error of a collective, and goes on in the next epoch without leaving."""
    ended = job(9, [{"member": 3, "at": "step", "n": 4}], spares=1, regroups=True, timeout=KILLED)
    all_trained(ended)


def test_a_rank_joins(job):
    """8 ranks, one of which is lost, and one that starts later: the plan shrinks, and grows back with the new one."""
    ended = job(9, [{"member": 7, "at": "step", "n": 2}], shrink="dp", joins="after", pause=0.3, timeout=KILLED)
    all_trained(ended)
    sizes = {(epoch, size) for value in ended if value for epoch, _, _, size, *_ in value["history"]}
    assert sizes == {(0, 8), (1, 4), (2, 8)}
    assert ended[8]["history"][0][0] == 2


@pytest.mark.long
def test_a_rank_that_joined_takes_over(job):
    """8 ranks, and one that starts later and waits: it takes the place of one that is lost."""
    ended = job(9, [{"member": 2, "at": "step", "n": 6}], joins="before", pause=0.4, timeout=KILLED)
    all_trained(ended)
    assert [epoch for epoch, *_ in ended[8]["history"]] == [1]


def _with_meshes(me, port, whole):
    """A program makes torch's meshes and groups itself, of the plan's ranks, and then one of the whole world."""
    me.launched(port)

    def train(job):
        size, sums = job.plan.mesh.size, torch.ones(1)
        job.hold({"sums": sums}, {"sums": rm.Sharding(job.plan.mesh, None, (1,), "float32")})
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(sums, group=mesh["tp"].get_group())
        dist.all_reduce(sums, group=dist.new_group(range(size)))
        if job.epoch == 0 and job.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        everyone = (dist.get_world_size(),)
        group = dist.new_group() if whole == "group" else init_device_mesh("cpu", everyone).get_group()
        job.commit(1)
        dist.barrier(group=group)
        raise AssertionError("a rank is lost")

    try:
        rm.survive(train, "tp=2,dp=*", shrink="dp", timeout=KILLED)
    except rm.RankmeshError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("whole", ["mesh", pytest.param("group", marks=pytest.mark.long)])
def test_a_group_with_a_spare_is_refused(outcomes, whole):
    """4 ranks, of which one is lost and one becomes a spare: meshes of the plan work, a group of the world does not."""
    ended = outcomes(4, _with_meshes, free_port(), whole, world=None, limit=100.0)
    start = "PlanError: torch was asked for a group with rank 2, a spare, which does not call new_group(); give"
    assert [str(one.value)[: len(start)] for one in ended[:2]] == [start] * 2, text_of(ended)
    assert "rank 2, a spare" in ended[2].value
