"""torch's own parallelism in a comparison: DDP, FSDP2, tensor and sequence parallelism, pipelines; right and broken."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from rankmesh import sim

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def model(groups):
    """Two layers, with the weights that they have on one process."""
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for name, parameter in net.named_parameters():
        parameter.data = sim.random(groups, name, parameter.shape)
    return net


def trained(groups, net, cut=("dp", None)):
    """A backward pass over this rank's rows; the mean over the rows, which DDP and FSDP take."""
    net(sim.random(groups, "x", (8, 4), cut)).square().mean().backward()
    return net


def see_whole(net):
    """Every gradient, put together."""
    for name, parameter in net.named_parameters():
        grad = parameter.grad
        sim.see(name, grad.full_tensor() if hasattr(grad, "full_tensor") else grad)


def ddp(groups, over="dp"):
    """DistributedDataParallel."""
    sim.see(
        "model", module=trained(groups, DistributedDataParallel(model(groups), process_group=groups[over].pg)).module
    )


def sharded_optimizer(groups):
    """ZeroRedundancyOptimizer over DistributedDataParallel."""
    net = DistributedDataParallel(model(groups), process_group=groups["dp"].pg)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, process_group=groups["dp"].pg)
    trained(groups, net)
    optimizer.step()
    sim.see("model", module=net.module)


def fsdp(groups, over="dp"):
    """fully_shard of each layer and of the whole; parameters are DTensors, and an optimizer updates them."""
    net = model(groups)
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=groups.device_mesh(over))
    trained(groups, net)
    sim.see("model", module=net)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    sim.see("after", module=net)


def hybrid_sharded(groups):
    """fully_shard over two axes: replicas along cp, shards along dp."""
    net = model(groups)
    fully_shard(net, mesh=groups.device_mesh("cp", "dp"))
    see_whole(trained(groups, net, ("cp-dp", None)))


def clipped(groups):
    """clip_grad_norm_ of DTensors."""
    net = model(groups)
    fully_shard(net, mesh=groups.device_mesh("dp"))
    norm = nn.utils.clip_grad_norm_(trained(groups, net).parameters(), 0.1)
    sim.see("norm", norm.full_tensor())
    sim.see("model", module=net)


def tensor_parallel(groups, over="dp"):
    """parallelize_module; the gradients are summed over the data."""
    net = parallelize_module(model(groups), groups.device_mesh("tp"), PLAN)
    net(sim.random(groups, "x", (8, 4), ("dp", None))).square().sum().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=groups[over].pg)
    sim.see("model", module=net)


def sequence_parallel(groups):
    """A norm over parts of the sequence before the layers."""
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    net = parallelize_module(nn.Sequential(nn.LayerNorm(4), *model(groups)), groups.device_mesh("tp"), plan)
    net(sim.random(groups, "x", (2, 8, 4), (None, "tp", None))).square().sum().backward()
    see_whole(net)


def two_dimensional(groups):
    """parallelize_module along tp, fully_shard along dp."""
    mesh = groups.device_mesh("dp", "tp")
    net = parallelize_module(model(groups), mesh["tp"], PLAN)
    fully_shard(net, mesh=mesh["dp"])
    see_whole(trained(groups, net))


def dtensors(groups):
    """Products, norms and a change of placements."""
    mesh = groups.device_mesh("tp")
    weight = distribute_tensor(sim.random(groups, "w", (8, 4)), mesh, [Shard(0)])
    product = distribute_tensor(sim.random(groups, "x", (8, 4)), mesh, [Replicate()]) @ weight.T
    sim.see("product", product.redistribute(mesh, [Shard(0)]))
    sim.see("norm", product.norm().full_tensor())


def pipeline(groups):
    """torch.distributed.pipelining: two stages, two microbatches."""
    stages, stage = groups["pp"].size, groups["pp"].rank
    net = model(groups)
    part = net if stages == 1 else [net[:2], net[2:]][stage]
    run = PipelineStage(part, stage, stages, torch.device("cpu"), group=groups["pp"].pg)
    schedule = ScheduleGPipe(run, 2, loss_fn=lambda output, target: (output - target).square().mean())
    first, last = stage == 0, stage == stages - 1
    target = {"target": sim.random(groups, "target", (8, 4)), "losses": []} if last else {}
    schedule.step(*([sim.random(groups, "x", (8, 4))] if first else []), **target)
    for name, parameter in part.named_parameters():
        here = name if stages == 1 else ["0.weight", "2.weight"][stage]
        sim.see(here, parameter.grad, at={"pp": stage} if stages > 1 else None)


RIGHT = {
    ddp: ("dp=2", "tp=2,dp=2"),
    sharded_optimizer: ("dp=2", "dp=4"),
    fsdp: ("dp=2", "tp=2,dp=2"),
    hybrid_sharded: ("cp=2", "dp=2", "dp=2,cp=2"),
    clipped: ("dp=2", "dp=4"),
    tensor_parallel: ("tp=2", "tp=2,dp=2"),
    sequence_parallel: ("tp=2", "tp=4"),
    two_dimensional: ("tp=2", "dp=2", "tp=2,dp=2"),
    dtensors: ("tp=2", "tp=4"),
    pipeline: ("pp=2",),
}


def whole(layouts):
    """Layouts with every axis."""
    return [",".join([one, *(f"{axis}=1" for axis in ("tp", "cp", "dp", "pp") if axis not in one)]) for one in layouts]


@pytest.mark.few(2)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_right_program_is_the_same(program):
    """No difference, and in float64: the noise is measured over DTensors, too."""
    result = sim.compare(program, whole(RIGHT[program]))
    assert result.same, result.report()
    assert result.dtype == "float64"


@pytest.mark.parametrize(
    ("program", "text"),
    [(ddp, ".backward()"), (tensor_parallel, "dist.all_reduce")],
    ids=["ddp", "tensor_parallel"],
)
def test_wrong_group_is_found(program, text):
    """The gradients are summed over tp: the line, which for the hooks of DDP is that of the backward pass."""
    import inspect
    import linecache

    first = sim.compare(partial(program, over="tp"), whole(("tp=2,dp=2",)), seconds=100.0).first
    file, line = first.site.split(":")
    assert file == "test_torch.py"
    assert text in linecache.getline(inspect.getsourcefile(program), int(line))
    assert (first.operation, first.group, first.repair, first.settles) == ("all-reduce", "tp", ("group", "dp"), True)
