"""A guard of a model and its optimizer: what DTensors, stages and plain parameters say of where they are."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankmesh as rm
from rankmesh import sim
from rankmesh.guard.model_state import model_state


def described(groups, model, optimizer=None, replicated=None):
    """The cut and the places of each tensor of a job, and how many of them this rank has."""
    tensors, shardings = model_state(model, optimizer, groups, replicated)
    for name, one in shardings.items():
        if one.holds(groups.rank):
            local = tensors[name].to_local() if hasattr(tensors[name], "to_local") else tensors[name]
            assert tuple(local.shape) == one.of(groups.rank).shape
    return {name: (one.cut, dict(one.at or {})) for name, one in shardings.items()}


def stages(groups):
    """Each stage has a layer of its own, and both ends an embedding."""
    stage = groups["pp"].rank
    model = nn.ModuleDict({f"layer{stage}": nn.Linear(4, 4)})
    if stage in (0, groups["pp"].size - 1):
        model["embedding"] = nn.Embedding(6, 4)
    return model


def test_plain_parameters_of_stages():
    """Each tensor is where a stage has it, with copies on all ranks of that stage."""
    found = sim.run(lambda groups: described(groups, stages(groups)), "tp=2,dp=2,pp=3")
    assert found == [found[0]] * 12
    assert found[0] == {
        "embedding.weight": ((None, None), {"pp": (0, 2)}),
        **{f"layer{n}.weight": ((None, None), {"pp": (n,)}) for n in range(3)},
        **{f"layer{n}.bias": ((None,), {"pp": (n,)}) for n in range(3)},
    }


def test_plain_parameters_that_are_other_tensors_along_an_axis():
    """Those of tp=0 and tp=1 are two tensors, each with copies along dp."""
    found = sim.run(lambda groups: described(groups, nn.Linear(2, 2), replicated="dp"), "tp=2,dp=2")
    assert found[0] == {
        f"{name}@tp{at}": (cut, {"tp": (at,)})
        for name, cut in (("weight", (None, None)), ("bias", (None,)))
        for at in range(2)
    }


def _sharded(groups):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    column, row = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    mesh = groups.device_mesh("dp", "tp")
    parallelize_module(model, mesh["tp"], {"0": column, "2": row})
    fully_shard(model, mesh=mesh["dp"])
    return model


def test_dtensors_of_two_axes():
    """FSDP2 over tensor parallelism: tp cuts first, and the norm has the same shards on all ranks of tp."""
    found = sim.run(lambda groups: described(groups, _sharded(groups)), "tp=2,dp=2")
    assert found == [found[0]] * 4
    assert found[0]["0.weight"] == (("tp-dp", None), {})
    assert found[0]["2.weight"] == (("dp", "tp"), {})
    assert found[0]["1.weight"] == (("dp",), {})


def _on_a_mesh(sizes, names, *cut):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(dim) for dim in cut]))
    return model


@pytest.mark.parametrize(
    ("sizes", "names", "placements", "cut"),
    [
        ((2, 2), ("dp", "tp"), (0, 1), ("dp", "tp")),
        ((2, 2), ("slow", "fast"), (1, 0), ("tp", "dp")),
        ((4, 1), ("all", "one"), (0, 1), ("dp-tp", None)),
    ],
)
def test_a_mesh_of_any_names(sizes, names, placements, cut):
    """Its ranks tell which axes of the plan, or of one of its kinds, it has."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("both", axes="tp-dp")])
    found = sim.run(lambda groups: described(groups, _on_a_mesh(sizes, names, *placements)), plan)
    assert [one["weight"][0] for one in found] == [cut] * 4


def test_a_mesh_of_other_ranks_is_refused():
    """By the name of the tensor: the plan has no axes with its ranks."""

    def program(groups):
        with pytest.raises(rm.PlanError, match="'weight' is a DTensor whose DeviceMesh has ranks"):
            described(groups, _on_a_mesh((4,), ("tp",), 0))

    sim.run(program, "tp=2,dp=2")


@pytest.mark.parametrize("make", ["AdamW", "Adam", "SGD", "Adagrad", "NAdam", "Adamax", "ASGD", "Rprop"])
def test_state_before_the_first_step(make):
    """It is made as it is before the first step: the steps after it give the same as without."""
    others = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "ASGD": {"lambd": 0.1}, "Rprop": {}}

    def program(groups):
        results = []
        for with_guard in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(3, 3)
            options = others.get(make, {"weight_decay": 0.1})
            optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.1, **options)
            guard = rm.Guard.of(model, optimizer, groups, every=1) if with_guard else None
            for step in range(3):
                model(torch.full((2, 3), 1.0 + step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if guard is not None:
                    guard.step(step)
            results.append([one.detach().clone() for one in model.parameters()])
        return all(torch.equal(one, other) for one, other in zip(*results, strict=True))

    assert sim.run(program, "dp=2") == [True, True]


@pytest.mark.parametrize(("make", "options"), [("SGD", {"momentum": 0.9, "dampening": 0.5}), ("LBFGS", {})])
def test_an_optimizer_whose_first_step_no_state_gives(make, options):
    """Refused, before it does a step."""

    def program(groups):
        model = nn.Linear(3, 3)
        optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.1, **options)
        with pytest.raises(rm.PlanError, match="give tensors and shardings instead of the optimizer"):
            described(groups, model, optimizer)
        return len(optimizer.state)

    assert sim.run(program, "dp=2") == [0, 0]


def test_a_wrong_optimizer_state_is_found():
    """A moment of Adam on one rank, of a norm whose copies tp and dp have."""

    def program(groups):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        optimizer = torch.optim.Adam(model.parameters())
        guard = rm.Guard.of(model, optimizer, groups)
        if groups.rank == 3:
            optimizer.state[model[1].bias]["exp_avg_sq"][2] = 1.0
            model[1].weight.data[0] = 5.0
        with pytest.raises(rm.Diverged) as raised:
            guard.check()
        return raised.value.tensor, raised.value.ranks, raised.value.box, str(raised.value)

    name, ranks, box, message = sim.run(program, "tp=2,dp=2")[2]
    assert (name, ranks, box) == ("1.bias.exp_avg_sq", (3,), ((2, 3),))
    assert message.startswith("'1.bias.exp_avg_sq' (optimizer state) differs within tp-dp")
    assert "; also '1.weight';" in message


def test_making_the_state_of_an_optimizer_runs_none_of_its_hooks():
    """Hooks of the optimizer do not run, and a scheduler still warns if it is stepped before the optimizer."""

    def program(groups):
        model, ran = nn.Linear(3, 3), []
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
        optimizer.register_step_post_hook(lambda *_: ran.append("after"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        rm.Guard.of(model, optimizer, groups)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()
        return ran, len(optimizer.state)

    assert sim.run(program, "dp=1") == [([], 2)]


def test_what_a_program_replaces_is_looked_up():
    """A buffer that is assigned, and the moments that are loaded; moments that the loaded state lacks are an error."""

    def program(groups):
        model = nn.SyncBatchNorm(2)
        optimizer = torch.optim.Adam(model.parameters())
        found = []
        guard = rm.Guard.of(model, optimizer, groups, action=found.append)
        model.running_mean = torch.full((2,), float(groups.rank == 1))
        guard.check()
        model.running_mean = torch.zeros(2)
        loaded = deepcopy(optimizer.state_dict())
        loaded["state"][1]["exp_avg"] += float(groups.rank == 2)
        optimizer.load_state_dict(loaded)
        guard.check()
        optimizer.load_state_dict({**loaded, "state": {}})
        with pytest.raises(rm.PlanError) as raised:
            guard.check()
        return [(error.tensor, error.ranks) for error in found], raised.value.name

    assert sim.run(program, "dp=3") == [([("running_mean", (1,)), ("bias.exp_avg", (2,))], "bias")] * 3


def test_what_batch_norm_has_seen_is_not_compared():
    """Each replica's running statistics are its own; its count of batches and its weights are copies."""

    def program(groups):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if groups["pp"].rank else nn.ReLU())
        tensors, shardings = model_state(model, None, groups, "dp")
        for norm in [one for one in model.modules() if isinstance(one, nn.BatchNorm1d)]:
            norm.running_mean += groups.rank
        guard = rm.Guard.of(model, None, groups, replicated="dp")
        guard.check()
        return sorted(tensors.local), len(guard.digests), len(shardings)

    local = ["1.running_mean@pp1", "1.running_var@pp1"]
    assert sim.run(program, "dp=2,pp=2") == [(local, 2, 9)] * 2 + [(local, 5, 9)] * 2


def test_ranks_that_describe_a_tensor_differently():
    """By shape: it is no copy; the error says over which axes it is replicated."""

    def program(groups):
        with pytest.raises(rm.PlanError, match="such as replicated='dp'"):
            described(groups, nn.Linear(2, 2 + groups["tp"].rank))
        dist.barrier()

    sim.run(program, "tp=2,dp=2")


def test_one_element_of_any_stride():
    """Torch counts it as contiguous: it is compared and explained as any other tensor."""

    def program(groups):
        weight = torch.full((2,), float(groups.rank == 0))[::2]
        with pytest.raises(rm.Diverged, match=r"rank 1 has 0.0 and rank 0 1.0 at \[0\].*; either may be wrong"):
            rm.Guard(groups, {"w": weight}, {"w": rm.Sharding(groups.plan.mesh, shape=(1,))}).check()

    sim.run(program, "dp=2")
