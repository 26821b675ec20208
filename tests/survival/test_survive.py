"""rm.survive on real processes that are killed, stopped, or fail: the results are those of a run without loss."""

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
from tests.survival.faults import SEEDS, moments
from tests.survival.program import BATCH, COLUMNS, ROWS, batch, member, started, text_of
from torch.distributed.device_mesh import init_device_mesh

import rankmesh as rm
from rankmesh.rendezvous import ChannelLost
from rankmesh.survival import session, world
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.machine import Left
from rankmesh.survival.members import Members

STEPS = 8
# Two halves of a run that shrinks are compared with sums in another order.
CLOSE = 1e-12
# A rank that is killed closes its connections: nobody waits this long, and a loaded machine loses nobody else.
KILLED = 60


@pytest.fixture
def job(outcomes, tmp_path):
    """Run a job of ``size`` members of which some die; how each of the others ended."""

    def run(size, deaths, layout="tp=2,pp=2,dp=*", limit=200.0, *, may_fail=False, **how):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        ended = outcomes(size, member, free_port(), str(folder), deaths, STEPS, layout, how, world=None, limit=limit)
        dead = {int(path.name.removeprefix("dead-")) for path in folder.glob("dead-*")}
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


@pytest.fixture(scope="module")
def expected(_server, tmp_path_factory):
    """What the ranks of tp=2,pp=2,dp=2 return in a run without loss: (result, losses), by rank."""
    return _unharmed(_server, tmp_path_factory, 8)


def _unharmed(server, tmp_path_factory, size):
    folder = str(tmp_path_factory.mktemp("expected"))
    module, arguments = "tests.survival.program", (free_port(), folder, [], STEPS, "tp=2,pp=2,dp=*", {})
    request = {"size": size, "module": module, "function": "member", "args": arguments, "world": None}
    return _results([outcome.value for outcome in server.run({**request, "limit": 60.0, "timeout": 20.0})])


def _results(ended):
    """The results and the losses by rank of the plan, of those that had a rank at the end."""
    found = {}
    for value in ended:
        if value is not None and value.get("result") is not None:
            found[value["history"][-1][1]] = (value["result"], value["losses"])
    return found


def _same(ended, expected):
    """The results are those of the run without loss, bit by bit; so are the losses that a member has seen."""
    _same_of(_results(ended), expected, [value and value.get("error") for value in ended])


def _same_of(found, expected, errors=None):
    assert found.keys() == expected.keys(), errors
    for rank, (result, losses) in found.items():
        assert result == expected[rank][0], rank
        assert losses.items() <= expected[rank][1].items(), rank


@pytest.mark.long
def test_without_loss(job, expected):
    """8 ranks and a spare: train's results, None for the spare; no socket, thread or group is left."""
    ended = job(9, [], spares=1)
    _same(ended, expected)
    assert ended[8]["result"] is None
    assert ended[8]["history"] == []


DEATHS = {
    "in a step": [{"member": 3, "at": "step", "n": 4}],
    "rank 0": [{"member": 0, "at": "step", "n": 4}],
    "in commit": [{"member": 5, "at": "take", "n": 4}],
    "after the last step": [{"member": 2, "at": "returned", "n": 1}],
    "before the first": [{"member": 6, "at": "hold", "n": 1}],
    "two at once": [{"member": 3, "at": "step", "n": 4}, {"member": 6, "at": "step", "n": 4}],
    "a second one in the regroup": [{"member": 3, "at": "step", "n": 4}, {"member": 0, "at": "agree", "n": 1}],
    "a second one in the transfer": [{"member": 3, "at": "step", "n": 4}, {"member": 1, "at": "restore", "n": 1}],
    "a spare": [{"member": 8, "at": "enter", "n": 1, "after": True}, {"member": 3, "at": "step", "n": 4}],
    "a spare that takes over": [{"member": 3, "at": "step", "n": 4}, {"member": 8, "at": "enter", "n": 2}],
    "as another one begins": [
        {"member": 6, "at": "client", "n": 1},
        {"member": 2, "at": "gather", "n": 1, "how": "sleep", "seconds": 1.0, "after": True},
    ],
}


# The others die in simulated ranks, too; make test-nightly lets them die in processes.
SHORT = {"rank 0": (), "a spare that takes over": (), "a second one in the regroup": pytest.mark.long}


@pytest.mark.parametrize("what", [pytest.param(what, marks=SHORT.get(what, pytest.mark.nightly)) for what in DEATHS])
def test_spares_take_over(job, expected, what):
    """8 ranks and 2 spares: the results are bit-equal to those of a run without loss."""
    # One that dies before it is connected is missed as late as one that is slow.
    timeout = 6 if what == "as another one begins" else KILLED
    ended = job(10, DEATHS[what], spares=2, timeout=timeout)
    _same(ended, expected)
    assert {who for who, value in enumerate(ended) if value is None} == {
        death["member"] for death in DEATHS[what] if "how" not in death
    }


@pytest.mark.parametrize("who", [0, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_rank_that_is_stopped(job, expected, who):
    """8 ranks and a spare: a rank that is stopped, also the one that serves the store, is left out."""
    _same(job(9, [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP"}], spares=1, timeout=8), expected)


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("who", [0, 5])
def test_a_stopped_rank_goes_on(job, expected, who):
    """8 ranks and a spare: a rank that was left out while it was stopped hears so, and disturbs nobody."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP", "again": 8.0}]
    ended = job(9, deaths, spares=1, timeout=4, may_fail=True, slow=0.8)
    _same(ended[:who] + ended[who + 1 :], expected)
    left_out, too_late = f"member {who} was left out of the job", f"the job ends, since member {who} stood still for"
    assert ended[who]["error"].startswith((f"ConnectError: {left_out}", f"ConnectError: {too_late}"))


@pytest.mark.nightly
@pytest.mark.parametrize(("who", "seconds"), [(0, 2.0), (0, 2.3), (0, 2.7), (5, 2.3)])
def test_a_rank_is_stopped_for_about_the_timeout(job, expected, who, seconds):
    """8 ranks and a spare: it wakes as the others agree, and is left out or not; nobody else is, and nobody waits."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "SIGSTOP", "again": seconds}]
    ended = job(9, deaths, spares=1, timeout=2, may_fail=True, slow=0.3)
    error = ended[who].get("error", "")
    assert not error or error.startswith(f"ConnectError: member {who} was left out of the job"), error
    _same([*ended[:who], *ended[who + 1 :]] if error else ended, expected)
    others = [one for one in ended if one is not ended[who]]
    assert not [one["error"] for one in others if "error" in one]
    # From the end of the epoch to the agreement: not the patience of several timeouts.
    assert max(history[5].get("agree", 0.0) for one in others for history in one["history"]) < 3 * 2


@pytest.mark.long
def test_a_slow_rank_is_waited_for(job, expected):
    """8 ranks and a spare: a rank that is busy for four timeouts while it responds costs nobody anything."""
    ended = job(9, [{"member": 5, "at": "step", "n": 3, "how": "sleep", "seconds": 8.0}], spares=1, timeout=2)
    _same(ended, expected)
    assert [epoch for epoch, *_ in ended[5]["history"]] == [0]


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("who", [0, 5])
def test_a_rank_that_hangs_is_evicted(job, expected, who):
    """8 ranks and a spare: a rank responds, and comes to no call; the others name it after 2 s, and leave it out."""
    deaths = [{"member": who, "at": "step", "n": 3, "how": "hang"}]
    ended = job(9, deaths, spares=1, evict=2.0, timeout=4, may_fail=True)
    _same([*ended[:who], *ended[who + 1 :]], expected)
    assert [(epoch, step) for epoch, _, step, *_ in ended[1]["history"]] == [(0, 0), (1, 3)]
    start = f"ConnectError: member {who} was left out of the job, since the others waited for it (late: rank {who}"
    assert ended[who]["error"].startswith(start)


def test_strangers_end_nothing(job, expected):
    """8 ranks and a spare: whoever does not have the key tells every member in each step that the job is over."""
    ended = job(9, [{"member": 2, "at": "step", "n": 3}], spares=1, timeout=KILLED, strangers=True)
    _same(ended, expected)
    resumed = [(epoch, step) for epoch, _, step, *_ in ended[0]["history"]]
    # The copies of its last commit may be on their way as it dies.
    assert resumed in ([(0, 0), (1, 2)], [(0, 0), (1, 3)])


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


def test_a_rank_that_raises(job, expected):
    """8 ranks and a spare: an exception of the program leaves one rank out, where it is raised; the others go on."""
    ended = job(9, [{"member": 3, "at": "step", "n": 4, "how": "raise"}], spares=1, may_fail=True)
    _same([*ended[:3], *ended[4:]], expected)
    assert ended[3]["error"] == "ValueError: a bug at step 4"


def test_all_ranks_raise(job):
    """4 ranks and a spare: what every rank raises ends the job, with that error on each."""
    deaths = [{"member": rank, "at": "step", "n": 2, "how": "raise"} for rank in range(5)]
    ended = job(5, deaths, spares=1, may_fail=True)
    assert [value["error"] for value in ended[:4]] == ["ValueError: a bug at step 2"] * 4
    assert "ValueError: a bug at step 2" in ended[4]["error"]


def test_a_rank_that_raises_each_time(job):
    """8 ranks and 3 spares: an error that the next member at the rank raises, too, ends the job with it on each."""
    ended = job(11, [], spares=3, raises=[1, 3], may_fail=True)
    errors = [value["error"] for value in ended]
    assert errors[1] == "RuntimeError: a bug of the program"
    start = "ConnectError: the job ends, since the rank at tp=1,pp=0,dp=0 raised the same error again"
    assert sorted(error[: len(start)] for error in errors) == [start] * 9 + [errors[1]] * 2, errors
    end = " in step 3: RuntimeError: a bug of the program; no other member can avoid it"
    assert {error[len(start) :] for error in errors if error != errors[1]} == {end}


def test_a_program_that_regroups_itself(job, expected):
    """8 ranks and a spare: train catches the error of a collective, and goes on in the next epoch without leaving."""
    ended = job(9, [{"member": 3, "at": "step", "n": 4}], spares=1, regroups=True, timeout=KILLED)
    _same(ended, expected)


def _reference(sizes):
    """The loss of each step on one process that does what replicas do: ``sizes`` says how many there are in each."""
    weights, momenta = [started(stage) for stage in range(2)], [torch.zeros(ROWS, COLUMNS).double() for _ in range(2)]
    losses = []
    for step, replicas in enumerate(sizes):
        losses.append(0.0)
        gradients = [torch.zeros_like(weight) for weight in weights]
        for x in batch(step).chunk(replicas):
            for stage, weight in enumerate(weights):
                y = x @ weight.T
                x = x + y.tanh().sum(1, keepdim=True) / ROWS
                gradients[stage] += (1 - y.tanh() ** 2).T @ x / BATCH
            losses[-1] += float(x.square().sum() / BATCH)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.mul_(0.9).add_(gradient)
            weight.sub_(0.1 * momentum)
    return losses


@pytest.mark.parametrize(
    ("size", "deaths", "replicas"),
    [
        pytest.param(12, [{"member": 2, "at": "step", "n": 4}], 2, marks=pytest.mark.nightly),
        pytest.param(
            12,
            # Two replicas lose a member each, and fill each other's ranks.
            [{"member": 0, "at": "step", "n": 4}, {"member": 11, "at": "step", "n": 4}],
            2,
            marks=pytest.mark.nightly,
        ),
        (8, [{"member": 7, "at": "step", "n": 4}], 1),
    ],
)
def test_a_replica_is_lost(job, size, deaths, replicas):
    """8 and 12 ranks without spares: dp shrinks, and the losses are those of the smaller size from that step on."""
    ended = job(size, deaths, shrink="dp", timeout=KILLED)
    found = [value for value in ended if value is not None and value["result"] is not None]
    assert len(found) == 4 * replicas
    reference = _reference([size // 4] * 4 + [replicas] * 4)
    for value in found:
        assert [epoch for epoch, *_ in value["history"]] == [0, 1]
        for step, loss in value["losses"].items():
            assert abs(loss - reference[int(step)]) < CLOSE, (step, loss)
    spare = [value for value in ended if value is not None and value["result"] is None]
    assert len(spare) == size - len(deaths) - 4 * replicas


def test_a_rank_joins(job):
    """8 ranks, one of which is lost, and one that starts later: the plan shrinks, and grows back with the new one."""
    ended = job(9, [{"member": 7, "at": "step", "n": 2}], shrink="dp", joins="after", slow=0.3, timeout=KILLED)
    found = [value for value in ended if value is not None]
    assert len(found) == 8
    assert all(value["result"] is not None for value in found)
    for value in found:
        assert {epoch: replicas for epoch, _, _, replicas, *_ in value["history"]}.items() <= {0: 2, 1: 1, 2: 2}.items()
    grown = next(start for epoch, _, start, *_ in found[0]["history"] if epoch == 2)
    reference = _reference([2, 2] + [1] * (grown - 2) + [2] * (STEPS - grown))
    for value in found:
        for step, loss in value["losses"].items():
            assert abs(loss - reference[int(step)]) < CLOSE, (step, loss)
    assert ended[8]["history"][0][0] == 2


@pytest.mark.long
def test_a_rank_that_joined_takes_over(job, expected):
    """8 ranks, and one that starts later and waits: it takes the place of one that is lost."""
    ended = job(9, [{"member": 2, "at": "step", "n": 6}], joins="before", slow=0.4, timeout=KILLED)
    _same(ended, expected)
    assert [epoch for epoch, *_ in ended[8]["history"]] == [1]


def test_nothing_is_left_to_go_on_with(job):
    """4 ranks without spares and without an axis to shrink: every survivor ends, with the reason."""
    ended = job(4, [{"member": 3, "at": "step", "n": 4}], may_fail=True, timeout=KILLED)
    for value in ended[:3]:
        assert value["error"] == (
            "ConnectError: the job ends, since rank 3 of the plan lost its member and no spare is left; start more "
            "ranks than the plan has, or name an axis that may lose replicas, such as shrink='dp'"
        )


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


# -- any moment -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected_16(_server, tmp_path_factory):
    """What the ranks of tp=2,pp=2,dp=4 return in a run without loss."""
    return _unharmed(_server, tmp_path_factory, 16)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_moment(job, expected_16, seed):
    """16 ranks and 4 spares: one or two members, or four of a host, die or stop at any moment: equal results.

    Who dies after the last rank has returned takes its result along.
    """
    deaths = moments(seed, STEPS)
    ended = job(20, deaths, spares=4, timeout=5)
    found = _results(ended)
    assert len(found) >= 16 - sum(value is None for value in ended), deaths
    _same_of(found, {rank: expected_16[rank] for rank in found})
