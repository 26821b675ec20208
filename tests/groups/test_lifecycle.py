import gc
import time

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.torch_lacks import private_backend

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.registries import registries
from rankmesh.errors import ConnectError, NotAMember, PlanError, UnknownGroup


def _plan(dp=2, **how):
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp"), rm.GroupSpec("pp")]
    kinds += [rm.GroupSpec("ends", "tp-dp", pick=rm.ends), rm.GroupSpec("all2", "tp-dp")]
    return rm.Plan(rm.Mesh(tp=2, dp=dp, pp=1), kinds, **how)


def use(groups):
    """Every group adds up its members."""
    for group in groups.values():
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group.pg)
        assert tensor.item() == group.size


def _cycles(me, plan, count):
    """Resources after two cycles, and after many more."""

    def measured():
        gc.collect()
        time.sleep(0.05)  # gloo's threads end on their own
        me.meet(f"measured {len(taken)}")
        return {**me.resources(), **registries()}

    taken = []
    for number in range(count + 5):
        with rm.connect(plan, timeout=20) as groups:
            use(groups)
        if number == 4:
            taken.append(measured())
    taken.append(measured())
    return taken


LEFT = private_backend("torch keeps an entry of each group that it names")


@LEFT
@pytest.mark.nightly
def test_a_hundred_cycles_leave_everything_where_it_was(ranks):
    """4 ranks, 100 connects: descriptors, threads and registries as before, memory within 6 MiB."""
    for before, after in ranks(4, _cycles, _plan(), 100):
        grown = after.pop("memory") - before.pop("memory")
        assert after == before
        assert grown < 6 * 1024


def _closed(me, plan):
    before = registries()
    groups = rm.connect(plan)
    tp = groups["tp"]
    absent = me.error(NotAMember, groups.__getitem__, "ends") if me.rank in (1, 2) else None
    unknown = me.error(UnknownGroup, groups.__getitem__, "ends_")
    groups.close()
    groups.close()
    uses = [lambda: groups["tp"], lambda: tp.pg, groups.report, groups.warm_up, groups.__enter__]
    messages = [me.error(ConnectError, use)["message"] for use in uses]
    return {
        "absent": absent,
        "unknown": unknown["message"],
        "messages": messages,
        "closed": groups.closed,
        "back": registries() == before,
    }


@LEFT
def test_closed_groups_say_so(ranks):
    """4 ranks: close twice is nothing, any use after it is an error; a non-member is told the members."""
    for rank, seen in enumerate(ranks(4, _closed, _plan())):
        assert (seen["closed"], seen["back"]) == (True, True)
        assert all("closed" in message and "connect again" in message for message in seen["messages"])
        assert "did you mean 'ends'?" in seen["unknown"]
        if rank in (1, 2):
            assert "[0, 3]" in seen["absent"]["message"]


def _refused_group(use):
    """The group of our error, behind which torch's wrapper of its functions puts one of its own."""
    try:
        use()
    except (ConnectError, ValueError) as error:
        return next(one.group for one in (error, error.__context__) if isinstance(one, ConnectError))


def _kept(me):
    with rm.connect("tp=1,dp=2") as groups:
        single, pair = groups["tp"].pg, groups["dp"].pg
    tensors = [torch.ones(1), torch.zeros(1)]
    uses = [
        lambda: dist.all_reduce(tensors[0], group=single),
        lambda: dist.all_gather_into_tensor(tensors[1], tensors[0], group=single),
        lambda: dist.barrier(group=single),
    ]
    me.error(ValueError, dist.broadcast, tensors[0], 0, group=pair)
    return list(map(_refused_group, uses))


@LEFT
def test_a_process_group_that_was_kept(ranks):
    """2 ranks: one of a single rank raises our error after close; of another, torch refuses what names a rank."""
    assert ranks(2, _kept) == [["tp@dp0"] * 3, ["tp@dp1"] * 3]


def _fails_inside(me, plan):
    before = registries()
    try:
        with rm.connect(plan) as groups:
            use(groups)
            raise KeyError("inside")
    except KeyError:
        pass
    back = registries() == before
    with rm.connect(plan) as groups:
        use(groups)
    return [groups.closed, back, registries() == before]


@LEFT
def test_an_exception_inside_closes_too(ranks):
    """4 ranks: the exception comes out, the groups are gone, and the next connect works."""
    assert ranks(4, _fails_inside, _plan()) == [[True, True, True]] * 4


# Options of the second of two groups, and what the error has of them.
BAD = [
    ({"backend": "gluu"}, "gluu"),
    ({"nccl": {"max_ctas": 4}}, "NCCL options"),
    ({"high_priority": True}, "NCCL options"),
    ({"sharp": True, "backend": "gloo"}, "NCCL options"),
]


def _refused(me, options):
    gc.collect()
    before, resources = registries(), me.resources()
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("dp", **options)]
    error = me.error((ConnectError, PlanError), rm.connect, rm.Plan(rm.Mesh(tp=2, dp=2), kinds))
    back = registries() == before
    gc.collect()
    limits.until(lambda: me.resources()["descriptors"] <= resources["descriptors"], limits.AT_ONCE)
    left = me.resources()["descriptors"] - resources["descriptors"]
    with rm.connect(_plan()) as groups:
        use(groups)
    return [error["message"], back, left]


def _all_refused(me):
    return [_refused(me, options) for options, _ in BAD]


def test_a_failed_connect_leaves_nothing(ranks):
    """4 ranks, the second of two groups cannot be made: a named error, nothing left, and the next works."""
    for found in ranks(4, _all_refused):
        for (_, expected), (message, back, left) in zip(BAD, found, strict=True):
            assert expected in message
            assert (back, left) == (True, 0)


def _resize(me):
    """8, then 6, then 8 ranks; the two that leave come back; a world is destroyed while its groups are still alive."""
    worlds = []
    for number, (size, dp) in enumerate([(8, 4), (6, 3), (8, 4)]):
        if me.rank < size:
            me.world("gloo", prefix=f"world {number}", size=size)
            too_large = _plan(dp=5)
            assert "start 10 ranks" in me.error(ConnectError, rm.connect, too_large)["message"]
            groups = rm.connect(_plan(dp=dp))
            use(groups)
            worlds.append([groups["all"].size, groups.epoch])
            dist.barrier()
            dist.destroy_process_group()
            groups.close()
            assert "init_process_group" in me.error(ConnectError, rm.connect, _plan(dp=dp))["message"]
        me.meet(f"world {number} is over")
    return worlds


def test_a_world_that_shrinks_and_grows(ranks):
    """8 -> 6 -> 8 ranks in the same processes: each world has its groups; between two of them there is an error."""
    # In each world the refused plan took epoch 0.
    assert ranks(8, _resize, world=None) == [[[8, 1], [6, 1], [8, 1]]] * 6 + [[[8, 1]] * 2] * 2


@private_backend("a part of the world does not connect alone")
def test_a_plan_for_another_world_is_refused(ranks):
    """4 ranks: a plan for 8, and one that leaves the last two ranks out without saying so."""
    for rank, (larger, smaller) in enumerate(ranks(4, _wrong_world)):
        assert "the plan is for 8 ranks, but the world has 4" in larger
        assert ("leaves out others" in smaller) == (rank >= 2)


def _wrong_world(me):
    larger = me.error(ConnectError, rm.connect, _plan(world_size=8))["message"]
    if me.rank >= 2:
        return [larger, me.error(ConnectError, rm.connect, _plan(dp=1))["message"]]
    with rm.connect(_plan(dp=1)) as groups:
        use(groups)
    return [larger, ""]


# -- options --------------------------------------------------------------------------------------


def _lazy(me):
    kinds = [rm.GroupSpec("tp", lazy=True), rm.GroupSpec("dp"), rm.GroupSpec("pp", lazy=True)]
    with rm.connect(rm.Plan(rm.Mesh(tp=2, dp=2, pp=1), kinds)) as groups:
        first = registries()["pg_map"]
        made = {group.name: group.created for group in groups.report().groups}
        if me.rank in (0, 1):
            use({"tp": groups["tp"]})
        later = registries()["pg_map"]
        me.meet("end")
        return [first, made, later - first]


@private_backend("lazy groups are made with the others")
def test_lazy_groups_are_made_at_first_use_by_their_members(ranks):
    """4 ranks: only dp exists at first; ranks 0 and 1 use tp, and only they make it."""
    for rank, (first, made, more) in enumerate(ranks(4, _lazy)):
        assert (first, made) == (2, {"tp": False, "dp": True, "pp": False})
        assert more == (1 if rank < 2 else 0)


def _warmed():
    plan = rm.Plan(rm.Mesh(stage=2, dp=2), [rm.GroupSpec("stage", pipeline=True), rm.GroupSpec("dp")])
    with rm.connect(plan) as groups:
        return list(groups.warm_up())


def test_a_warm_up_knows_pipelines_by_what_they_are_for(monkeypatch):
    """4 simulated ranks: a kind that says that it is a pipeline warms its neighbours, whatever its axis is called."""
    requested, send = [], dist.batch_isend_irecv
    monkeypatch.setattr(
        dist, "batch_isend_irecv", lambda calls: requested.append((dist.get_rank(), calls[0].peer)) or send(calls)
    )
    assert sim.run(_warmed, 4) == [["stage", "dp"]] * 4
    assert set(requested) == {(0, 1), (1, 0), (2, 3), (3, 2)}
