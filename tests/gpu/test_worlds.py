"""Live groups on NCCL: in worlds that are bound to their device and in others, alone and beside gloo."""

import random

import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.debug.verification.verify import verify

WORLDS = [("nccl", False), ("nccl", True), ("cpu:gloo,cuda:nccl", False), ("cpu:gloo,cuda:nccl", True)]
LIMIT = {"world": None, "limit": 90.0, "timeout": 60.0}


def _join(me, backend, bound):
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        backend,
        rank=me.rank,
        world_size=me.size,
        store=dist.PrefixStore("world", me.store),
        device_id=device if bound else None,
    )
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    assert one.item() == me.size


def _verified(groups):
    """Every group of the plan that this rank is in, proved on the GPU; its members and its backend."""
    found = {}
    for verified in verify(groups, "cuda"):
        group = groups[verified.name]
        mine = torch.tensor([dist.get_rank()], device="cuda")
        every = [torch.empty_like(mine) for _ in group.ranks]
        dist.all_gather(every, mine, group=group.pg)
        found[verified.name] = [int(each) for each in every], dist.get_backend(group.pg)
    return found


def _used_again():
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    return one.item()


# -- each kind of world ------------------------------------------------------------------------------------------------


def _megatron(me, backend, bound):
    plan = rm.recipes.megatron(8, tp=2, pp=2, ep=2)
    _join(me, backend, bound)
    before = registries()
    with rm.connect(plan) as groups:
        groups.warm_up()
        found = _verified(groups)
        wanted = {name: list(plan.of(me.rank)[name].ranks) for name in found}
    after = registries()
    again = _used_again()
    dist.destroy_process_group()
    changed = {
        name: (before[name], after[name]) for name in before if name != "group_count" and before[name] != after[name]
    }
    return found, wanted, changed, again


@pytest.mark.parametrize(("backend", "bound"), WORLDS)
def test_megatrons_groups(ranks, backend, bound):
    """8 ranks: every group is proved on the GPU; closed, nothing is left, and the world still works."""
    for found, wanted, changed, again in ranks(8, _megatron, backend, bound, **LIMIT):
        assert {name: members for name, (members, _) in found.items()} == wanted
        assert len(found) > 10
        assert changed == {}
        assert again == 8


# -- worlds that are bound to a device: every rank takes part in every split -------------------------------------------


def _counted(me, plans, warm):
    """Connect these plans; how many splits this rank took part in, and what it found."""
    _join(me, "nccl", True)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    before = backend.comm_split_count()
    with rm.connect(plans) as groups:
        if warm:
            for each in groups.values():
                each.warm_up()
        splits = backend.comm_split_count() - before
        found = {key: _verified(each) for key, each in groups.items()}
    again = _used_again()
    dist.destroy_process_group()
    return splits, found, again


def _two_towers(me):
    encoder = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")], world_size=8)
    model = rm.Plan(
        rm.Mesh(tp=2, pp=2, offset=4), [rm.GroupSpec("tp"), rm.GroupSpec("pp", pipeline=True)], world_size=8
    )
    return _counted(me, {"encoder": encoder, "model": model}, warm=True)


def test_two_meshes_of_one_job(ranks):
    """8 ranks, bound: an encoder on ranks 0 to 3, a model on 4 to 7; no rank waits for a split of the others."""
    outcomes = ranks(8, _two_towers, **LIMIT)
    for rank, (splits, found, again) in enumerate(outcomes):
        assert again == 8
        assert splits >= 0
        tower, other = ("encoder", "model") if rank < 4 else ("model", "encoder")
        assert set(found[tower]) == ({"tp", "dp"} if rank < 4 else {"tp", "pp"})
        assert other not in found or found[other] == {}


def _random_plans(me, seed):
    source = random.Random(seed)  # noqa: S311  - the same plans on every rank
    result = []
    _join(me, "nccl", True)
    for _ in range(4):
        sizes = source.choice([{"a": 2, "b": 2}, {"a": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2}])
        mesh = rm.Mesh(**sizes, offset=source.choice([0, 2 if rm.Mesh(**sizes).size <= 6 else 0]))
        names = sorted(source.sample(sorted(sizes), source.randint(1, len(sizes))))
        plan = rm.Plan(mesh, [rm.GroupSpec(name) for name in names], world_size=8)
        with rm.connect(plan) as groups:
            found = _verified(groups)
            wanted = {name: list(plan.of(me.rank)[name].ranks) for name in found}
            result.append(({name: members for name, (members, _) in found.items()}, wanted))
    dist.destroy_process_group()
    return result


def test_plans_that_leave_ranks_out(ranks):
    """8 ranks, bound: random plans one after another, some ranks in none of their groups; all are split and proved."""
    for result in ranks(8, _random_plans, 5, **LIMIT):
        for found, wanted in result:
            assert found == wanted


# -- options -----------------------------------------------------------------------------------------------------------


def _options(me, bound):
    _join(me, "cpu:gloo,cuda:nccl", bound)
    mesh = rm.Mesh(tp=2, dp=2)
    requested = rm.GroupSpec("tp", nccl={"min_ctas": 2, "max_ctas": 4}, high_priority=True, timeout=77)
    plan = rm.Plan(mesh, [requested, rm.GroupSpec("dp", backend="gloo")])
    with rm.connect(plan) as groups:
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one, group=groups["tp"].pg)
        dist.all_reduce(torch.ones(1), group=groups["dp"].pg)
        has = groups["tp"].pg._get_backend(torch.device("cuda")).options
        result = has.config.min_ctas, has.config.max_ctas, has.is_high_priority_stream, has._timeout.total_seconds()
        backends = dist.get_backend(groups["tp"].pg), dist.get_backend(groups["dp"].pg)
        value = one.item()
    dist.destroy_process_group()
    return result, backends, value


@pytest.mark.parametrize("bound", [False, True])
def test_options_are_in_effect(ranks, bound):
    """4 ranks: what a group asks of NCCL is what its backend says it has; a group of gloo stands beside it."""
    for result, backends, value in ranks(4, _options, bound, **LIMIT):
        assert result == [2, 4, True, 77]
        assert backends[1] == "gloo"
        assert value == 2


def _lazy(me):
    _join(me, "nccl", False)
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp", lazy=True)])
    with rm.connect(plan) as groups:
        found = {}
        if me.rank in (0, 2):
            one = torch.ones(1, device="cuda")
            dist.all_reduce(one, group=groups["dp"].pg)
            found["dp"] = one.item()
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one, group=groups["tp"].pg)
        found["tp"] = one.item()
    dist.destroy_process_group()
    return found


def test_a_lazy_group_is_made_by_its_members(ranks):
    """4 ranks: two ask for their lazy group and get it, the others never do, and nobody waits for them."""
    for rank, found in enumerate(ranks(4, _lazy, **LIMIT)):
        assert found == {"tp": 2, **({"dp": 2} if rank in (0, 2) else {})}


# -- what stands on live groups ----------------------------------------------------------------------------------------


def _mesh(me, bound):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    _join(me, "nccl", bound)
    with rm.connect(rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])) as groups:
        mesh = groups.device_mesh("dp", "tp")
        whole = torch.arange(32.0, device="cuda").reshape(8, 4)
        cut = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert isinstance(cut, DTensor)
        back = cut.redistribute(placements=[Replicate(), Replicate()]).to_local()
        result = mesh.device_type, list(cut.to_local().shape), bool(torch.equal(back, whole))
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("bound", [False, True])
def test_a_device_mesh_moves_tensors(ranks, bound):
    """4 ranks: a DTensor on the mesh of live groups is cut and made whole again on the GPU."""
    for result in ranks(4, _mesh, bound, **LIMIT):
        assert result == ["cuda", [4, 2], True]


def _discovered(me):
    _join(me, "nccl", False)
    cluster = rm.discover()
    with rm.connect(rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])) as groups:
        found = groups.measure(sizes=(1 << 20,))
    dist.destroy_process_group()
    return cluster.to_dict(), found.to_dict()


def test_what_a_cluster_is_and_does(ranks):
    """4 ranks: discover finds one host; measure times the collectives of each kind on NCCL."""
    for cluster, found in ranks(4, _discovered, **LIMIT):
        assert len(cluster["hosts"]) == 1
        assert found["backend"] == "nccl"


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def _one_stays_away(me):
    from rankmesh.errors import AgreementError

    _join(me, "nccl", True)
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])
    if me.rank == 3:
        me.meet("over")
        return None
    error = me.error(AgreementError, rm.connect, plan, timeout=3)
    me.meet("over")
    return error


def test_a_rank_that_stays_away_is_named(ranks):
    """4 ranks, bound: rank 3 never connects; the others say so in time, and none of them is left in a split."""
    result = ranks(4, _one_stays_away, **LIMIT)
    for rank, error in enumerate(result):
        if rank != 3:
            assert error["ranks"] == [3] or error["missing"] == [3], error
            assert error["seconds"] < 10
