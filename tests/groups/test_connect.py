import json
import os
import random
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.torch_lacks import kept_order, private_backend

import rankmesh as rm
from rankmesh.backend.members import MemberBackend
from rankmesh.backend.registries import registries
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.runtime import World

SHUFFLED = [5, 2, 7, 0, 1, 6, 3, 4]
AXES = ["tp", "dp", "pp"]


def _cube(**how):
    """Three axes of two, groups along one, two and all of them, and two picks.

    The first pick leaves ranks out: they own other numbers of groups, from the first one on.
    """
    kinds = [rm.GroupSpec("back", "dp-tp", pick=(3, 1, 0)), *(rm.GroupSpec(name) for name in AXES)]
    kinds += [rm.GroupSpec("dp_tp", "dp-tp"), rm.GroupSpec("all", "tp-dp-pp")]
    kinds += [rm.GroupSpec("embd", "pp", pick=rm.ends)]
    return rm.Plan(rm.Mesh(tp=2, dp=2, pp=2, **how), kinds, world_size=10 if how.get("offset") else None)


PLANS = {
    "megatron": (8, rm.recipes.megatron(8, tp=2, pp=2)),
    "megatron with experts": (16, rm.recipes.megatron(16, tp=2, cp=2, pp=2, ep=2, etp=1)),
    "megatron with instances and twins": (
        16,
        rm.recipes.megatron(16, tp=2, optimizer_instances=2, gloo=True),
    ),
    "megatron with hierarchical cp": (16, rm.recipes.megatron(16, cp=8, hierarchical_cp=(2, 2, 2), pp=2)),
    "megatron, another order": (16, rm.recipes.megatron(16, tp=2, cp=2, pp=2, ep=2, order="tp-pp-dp-ep-cp")),
    "nanotron": (16, rm.recipes.nanotron(tp=2, cp=2, dp=2, pp=2, local_world_size=8)),
    "ezpz": (16, rm.recipes.ezpz(16, tp=2, cp=2, pp=2)),
    "three_d": (8, rm.recipes.three_d(tp=2, pp=2, dp=2)),
    "torchtitan": (16, rm.recipes.torchtitan(16, tp=2, cp=2, dp_replicate=2, pp=1, ep=4)),
    "a rank map": (8, _cube(rank_map=SHUFFLED)),
    "an offset": (10, _cube(offset=2)),
    "a slice whose ranks are apart": (
        8,
        rm.Plan(
            rm.Mesh(tp=2, dp=2, pp=2).slice("dp-pp", of=1),
            [rm.GroupSpec("dp"), rm.GroupSpec("pp"), rm.GroupSpec("all", "dp-pp")],
            world_size=8,
        ),
    ),
    "an offset and a rank map": (10, _cube(offset=2, rank_map=[rank + 2 for rank in SHUFFLED])),
}


def _unsorted(plan):
    return any(list(members) != sorted(members) for kind in plan.kinds.values() for members in kind)


def _seen(group):
    """What one member sees of a group, through the network."""
    mine = torch.tensor([group.ranks[group.rank]])
    total = mine.clone()
    dist.all_reduce(total, group=group.pg)
    every = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(every, mine, group=group.pg)
    return {
        "sum": total.item(),
        "gathered": [tensor.item() for tensor in every],
        "rank": dist.get_rank(group.pg),
        "registered": dist.get_process_group_ranks(group.pg),
        "description": group.pg.group_desc,
    }


def _connect(me, plan):
    with rm.connect(plan, timeout=limits.LONG) as groups:
        assert list(groups) == list(plan.of(me.rank))
        return {name: _seen(group) for name, group in groups.items()}


def _check(plan, rank, seen):
    """Every group that has this rank, and no other, against the plan's rank lists."""
    expected = {}
    for name, kind in plan.kinds.items():
        expected.update((name, members) for members in kind.array.tolist() if rank in members)
    assert set(seen) == set(expected)
    for name, members in expected.items():
        group = seen[name]
        assert group["gathered"] == group["registered"] == members, name
        assert (group["sum"], group["rank"]) == (sum(members), members.index(rank)), name
        # A shared process group is described as the kind that leads.
        prefix = f"{plan.name}:" if plan.name else ""
        assert group["description"] == prefix + str(plan.of(rank)[plan.of(rank)[name].canonical]), name


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=kept_order) if _unsorted(plan) else what for what, (_, plan) in PLANS.items()]
)
def test_every_group_of_a_plan_is_what_the_plan_says(ranks, what):
    """8 to 16 ranks: sums, gathers and positions in every group of every kind, in the members' own order."""
    size, plan = PLANS[what]
    for rank, seen in enumerate(ranks(size, _connect, plan)):
        _check(plan, rank, seen)


def _job(me, plans):
    with rm.connect(plans, timeout=limits.LONG) as job:
        assert list(job) == list(plans)
        return [{name: _seen(group) for name, group in groups.items()} for groups in job.values()]


def test_several_meshes_in_one_job(ranks):
    """12 ranks: an encoder and a language model side by side, and a colocated one, connected in one meeting."""
    job = rm.Job(
        world_size=12,
        encoder=rm.Mesh(tp=2, dp=2),
        llm=rm.Mesh(tp=2, dp=2, pp=2, offset=4),
        critic=rm.Mesh(dp=4, tp=2, offset=4),
    )
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("dp")]
    plans = rm.Plan.of_job(job, {"encoder": kinds, "llm": [*kinds, rm.GroupSpec("pp")], "critic": kinds})
    for rank, seen in enumerate(ranks(12, _job, plans)):
        for plan, groups in zip(plans.values(), seen, strict=True):
            _check(plan, rank, groups)


def _forms(me):
    given = ["tp=2,dp=*", rm.Mesh(tp=2, dp=2), {"a": "dp=*", "b": rm.Plan(rm.Mesh(tp=4), [rm.GroupSpec("tp")])}]
    found = []
    for form in given:
        with rm.connect(form, timeout=limits.LONG) as live:
            groups = live.values() if isinstance(form, dict) else [live]
            found.append([{name: _seen(group)["gathered"] for name, group in mine.items()} for mine in groups])
    return found


def test_a_spec_a_mesh_and_a_mapping_are_connected(ranks):
    """4 ranks: what is left of the world is filled in, a mesh has a group for each axis, a job one result a key."""
    for rank, (spec, mesh, job) in enumerate(ranks(4, _forms)):
        pair, other = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert spec == mesh == [{"tp": pair, "dp": other}]
        assert job == [{"dp": [0, 1, 2, 3]}, {"tp": [0, 1, 2, 3]}]


def _named(me):
    with rm.connect({"left": _cube(), "right": _cube()}) as job:
        return [
            (group.pg.group_name, group.pg.group_desc == f"{key}:{live.local[group.local.canonical]}")
            for key, live in job.items()
            for group in live.values()
        ]


@private_backend("torch names the groups")
def test_a_process_group_has_a_name_of_its_own_and_a_description(ranks):
    """8 ranks, a job of two equal plans: their groups have other names; descriptions tell plan, kind and coordinate."""
    for found in ranks(8, _named):
        half = len(found) // 2
        assert {name for name, _ in found[:half]}.isdisjoint(name for name, _ in found[half:])
        assert all(right for _, right in found)


def _lost(me):
    before = registries()
    with suppress(KeyError):
        groups = rm.connect(_cube())  # noqa: F841  - lost with the frame that had it
        raise KeyError
    kept = [list(live) for live in World.current().live]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberBackend, "create", _no_memory)
        error = me.error(ConnectError, rm.connect, _line(8), timeout=limits.LONG)["message"]
    rm.close_all()
    return len(kept), error, list(World.current().live), registries() == before


def _no_memory(*_, **__):
    raise RuntimeError("out of memory")


@private_backend("one rank fails in a call that all ranks make")
def test_what_was_lost_can_be_closed(ranks):
    """8 ranks: groups whose mapping an exception has lost are the world's, which closes them; an error says how."""
    for kept, error, live, back in ranks(8, _lost):
        assert (kept, live, back) == (1, [], True)
        assert "out of memory" in error
        assert "groups that were connected before: rm.close_all() closes them" in error


def _two_threads(me):
    """The second connect comes while the first waits for the other rank."""
    if me.rank == 1:
        me.store.wait(["refused"], timedelta(seconds=limits.LONG))
        rm.connect(_line(2), timeout=limits.LONG).close()
        return None
    first = threading.Thread(target=lambda: rm.connect(_line(2), timeout=limits.LONG).close())
    first.start()
    limits.until(World.current()._connecting.locked)
    error = me.error(ConnectError, rm.connect, _line(2), timeout=limits.LONG)
    # Not through the client whose answer the other thread waits for: it makes one call after the other.
    me._open(is_master=False).set("refused", "yes")
    first.join()
    return error


def test_a_second_connect_at_the_same_time_is_refused(ranks):
    """2 ranks, two threads on one: the second is told at once, the first goes on."""
    error = ranks(2, _two_threads)[0]
    assert "connects on two threads at the same time" in error["message"]
    assert error["seconds"] < limits.AT_ONCE


def _line(size):
    return rm.Plan(rm.Mesh(dp=size), [rm.GroupSpec("dp")])


def _refused_on_one(me):
    """Rank 1 cannot make what the plan asks for; the others hear so instead of waiting for it."""
    if me.rank == 1:
        type(World.current().backend).check = _not_built
    return me.error((ConnectError, AgreementError), rm.connect, _line(3), timeout=limits.LONG)


def _not_built(*_):
    raise ConnectError("this torch was built without it")


def test_a_rank_that_cannot_serve_the_plan_proposes_its_reason(ranks):
    """3 ranks, one of which refuses the plan: it raises its reason, the others hear it at once."""
    errors = ranks(3, _refused_on_one)
    assert errors[1]["message"] == "this torch was built without it"
    for error in errors[::2]:
        assert error["ranks"] == [1]
        assert 'refused is "this torch was built without it"' in error["message"]
        assert error["seconds"] < limits.AT_ONCE


def _twice(me, plan):
    with rm.connect(plan) as groups:
        with rm.connect(plan) as others:
            seen = [_seen(live["tp"])["gathered"] for live in (others, groups)]
            apart = others["tp"].pg is not groups["tp"].pg
        return [apart, seen, _seen(groups["tp"])["gathered"]]


@kept_order
def test_a_plan_connected_twice_has_two_owners(ranks):
    """8 ranks: each connect has process groups of its own; closing one leaves the other."""
    for apart, seen, gathered in ranks(8, _twice, _cube()):
        assert apart
        assert seen == [gathered, gathered]
        assert len(gathered) == 2


# -- uneven membership ----------------------------------------------------------------------------


def _random_plan(random):
    """Up to eight kinds of group in a random order over 6 to 8 ranks, most of them picked from."""
    sizes = random.choice([(2, 2, 2), (4, 2), (2, 3), (6,), (7,), (8,), (3, 2), (2, 4), (5,)])
    names = random.sample(["tp", "cp", "dp", "pp"], len(sizes))
    size = 1
    for factor in sizes:
        size *= factor
    order = random.sample(range(size), size) if random.random() < 0.5 else None
    mesh = rm.Mesh(rank_map=order, **dict(zip(names, sizes, strict=True)))
    specs = []
    for number in range(random.randint(2, 6)):
        axes = random.sample(names, random.randint(1, len(names)))
        width = mesh.groups("-".join(axes)).size
        pick = random.sample(range(width), random.randint(1, width)) if random.random() < 0.7 else None
        specs.append(rm.GroupSpec(f"g{number}", "-".join(axes), pick=pick, share=random.random() < 0.7))
    return rm.Plan(mesh, specs, world_size=8)


def _random_plans(me, least, seconds):
    """At least so many random plans, more while there is time: rank 0 says when to stop."""
    source = random.Random(7)  # noqa: S311  - the same plans on every rank
    started, right = time.monotonic(), 0
    go = torch.ones(1)
    while go:
        plan = _random_plan(source)
        with rm.connect(plan, timeout=20) as groups:
            for group in groups.values():
                seen = _seen(group)
                assert seen["gathered"] == list(group.ranks), (plan, group, seen)
                assert seen["sum"] == sum(group.ranks), (plan, group, seen)
        right += 1
        go[0] = right < least or time.monotonic() - started < seconds
        dist.broadcast(go, 0)
    return right


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_random_plans_with_uneven_membership_never_hang(ranks):
    """8 ranks: at least 100 random plans (or RANKMESH_TEST_PLANS) in one world, under an outer limit."""
    least = int(os.environ.get("RANKMESH_TEST_PLANS", "100"))
    done = ranks(8, _random_plans, least, 8, limit=60 + least / 4, timeout=30)
    assert len(set(done)) == 1
    assert done[0] >= least


def _no_backend(me):
    """A world whose backend torch chose."""
    dist.init_process_group(store=me.store, rank=me.rank, world_size=me.size)
    with rm.connect(rm.Plan(rm.Mesh(tp=2, pp=1), [rm.GroupSpec("tp"), rm.GroupSpec("pp")])) as groups:
        one = torch.ones(1)
        dist.all_reduce(one, group=groups["tp"].pg)
        return [one.item(), dist.get_backend(groups["tp"].pg), groups.report().groups[0].backend]


def test_a_world_of_no_named_backend(ranks):
    """2 ranks: init_process_group() without a backend; groups have the backend of each device."""
    assert ranks(2, _no_backend, world=None) == [[2.0, "cpu:gloo", "cpu:gloo"]] * 2


# -- sharing --------------------------------------------------------------------------------------

SHARING = rm.Plan(
    rm.Mesh(tp=2, dp=4, pp=1),
    [
        rm.GroupSpec("dp"),
        rm.GroupSpec("dp_pp", "dp-pp"),  # as dp
        rm.GroupSpec("own", "dp", share=False),
        rm.GroupSpec("slow", "dp", timeout=77),
        rm.GroupSpec("gather", "dp", overlap="gather"),
        rm.GroupSpec("gather2", "dp", overlap="gather"),  # as gather
        rm.GroupSpec("turned", "dp", pick=(3, 2, 1, 0)),
        rm.GroupSpec("tp"),
        rm.GroupSpec("pp"),
    ],
)


def _shared(me, plan):
    before = registries()["pg_map"]
    with rm.connect(plan) as groups:
        registered = registries()["pg_map"] - before
        report = groups.report()
        same = groups["dp"].pg is groups["dp_pp"].pg and groups["gather"].pg is groups["gather2"].pg
        apart = len({id(groups[name].pg) for name in ("dp", "own", "slow", "gather", "turned")})
        seen = {name: _seen(group)["gathered"] for name, group in groups.items()}
        return [registered, same, apart, report.to_json(), str(report), seen]


@kept_order
def test_one_communicator_for_equal_members_and_options(ranks):
    """8 ranks, 9 kinds: five communicators along dp, one along tp, one local group; report() says so."""
    for rank, (registered, same, apart, text, table, seen) in enumerate(ranks(8, _shared, SHARING, timeout=20.0)):
        assert (registered, same, apart) == (7, True, 5)
        assert seen["turned"] == seen["dp"][::-1]
        report = json.loads(text)
        assert report["communicators"] == 6
        canonical_of = {group["name"]: group["communicator"] for group in report["groups"]}
        assert canonical_of == {
            "dp": "dp",
            "dp_pp": "dp",
            "own": "own",
            "slow": "slow",
            "gather": "gather",
            "gather2": "gather",
            "turned": "turned",
            "tp": "tp",
            "pp": None,
        }
        timeouts = {group["name"]: group["timeout"] for group in report["groups"]}
        assert (timeouts["slow"], timeouts["dp"]) == (77.0, 20.0)
        assert [group["ranks"] for group in report["groups"]] == list(seen.values())
        lines = {line.split()[0]: line for line in table.splitlines()[2:]}
        assert "9 groups, 6 communicators" in table
        assert "dp's" in lines["dp_pp"]
        assert "77 s" in lines["slow"]
        assert "none needed" in lines["pp"]
        assert report["rank"] == rank
