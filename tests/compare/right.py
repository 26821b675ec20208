"""Programs that are the same on every layout. Each has the layouts that it is tried on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.compare.parallel import (
    copied,
    gather_rows,
    moe,
    norm_of_parts,
    pg,
    reduce_,
    scatter_rows,
    summed,
    weight,
)

from rankmesh import sim

RIGHT = {}
EXPERTS = [
    "tp=1,dp=2/expert:etp=1,ep=2,edp=1",
    "tp=2,dp=2/expert:etp=2,ep=1,edp=2",
    "tp=1,dp=4/expert:etp=1,ep=2,edp=2",
]


def right(*layouts):
    """Add a program to the corpus."""

    def add(program):
        RIGHT[program.__name__] = (program, list(layouts))
        return program

    return add


@right("tp=2", "dp=2", "tp=2,dp=2")
def mlp(groups):
    """Column- and row-parallel layers, gradients summed over dp."""
    tp, dp = pg(groups, "tp"), pg(groups, "dp")
    up, down = weight(groups, "up", (8, 4), ("tp", None)), weight(groups, "down", (4, 8), (None, "tp"))
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    y = summed(F.gelu(copied(x, tp) @ up.T) @ down.T, tp)
    loss = y.square().sum() / 8
    loss.backward()
    for parameter in (up, down):
        reduce_(parameter.grad, dp)
    sim.see("y", y, ("dp", None))
    sim.see("loss", reduce_(loss.detach(), dp))
    sim.see("up.grad", up.grad, ("tp", None))
    sim.see("down.grad", down.grad, (None, "tp"))


@right("dp=2", "dp=4", "tp=2,dp=2")
def mean_loss(groups):
    """Means over equal shares, averaged over dp; three steps of AdamW."""
    dp = groups["dp"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        x = sim.random(groups, f"x{step}", (8, 4), ("dp", None))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=dp.pg)
            parameter.grad /= dp.size
        optimizer.step()
        sim.see("loss", reduce_(loss.detach(), dp.pg, dist.ReduceOp.AVG))
        sim.see("model", module=model, optimizer=optimizer)


@right("tp=2", "tp=4", "tp=2,dp=2")
def sequence_parallel(groups):
    """Rows over tp between the layers; the norm's weight sums its gradient over tp."""
    norm, up, down, y = norm_of_parts(groups)
    dp = pg(groups, "dp")
    reduce_(norm.grad, pg(groups, "tp"))
    for parameter in (norm, up, down):
        reduce_(parameter.grad, dp)
    sim.see("y", y, ("dp-tp", None))
    sim.see("norm.grad", norm.grad)
    sim.see("up.grad", up.grad, ("tp", None))


@right(*EXPERTS)
def experts(groups):
    """Experts over ep, their gradients over edp, the router's over dp."""
    router, w, y = moe(groups)
    sim.see("y", y, ("dp", None))
    sim.see("router.grad", reduce_(router.grad, pg(groups, "dp")))
    sim.see("experts.grad", reduce_(w.grad, pg(groups, "edp")), ("ep", None, None), view="expert")


@right("pp=2", "pp=4", "dp=2,pp=2")
def tied(groups):
    """The first and the last stage hold one table; its gradients are summed over embd."""
    pp, dp = groups["pp"], pg(groups, "dp")
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    table = weight(groups, "table", (8, 4)) if first or last else None
    layers = [weight(groups, f"layer{i}", (4, 4)) for i in range(4)]
    mine = range(4)[pp.rank * 4 // pp.size : (pp.rank + 1) * 4 // pp.size]
    tokens = sim.shard(groups, torch.arange(8), ("dp",))
    given = None
    if first:
        x = table[tokens]
    else:
        x = torch.empty(len(tokens), 4)
        dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        given = x.requires_grad_()
    for i in mine:
        x = (x @ layers[i].T).tanh()
    if last:
        loss = F.cross_entropy(x @ table.T, tokens, reduction="sum")
        loss.backward()
        sim.see("loss", reduce_(loss.detach(), dp))
    else:
        dist.send(x.detach(), group=pp.pg, group_dst=pp.rank + 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, group=pp.pg, group_src=pp.rank + 1)
        x.backward(gradient)
    if given is not None:
        dist.send(given.grad, group=pp.pg, group_dst=pp.rank - 1)
    for i in mine:
        sim.see(f"layer{i}.grad", reduce_(layers[i].grad, dp))
    if table is not None:
        reduce_(table.grad, pg(groups, "embd"))
        sim.see("table.grad", reduce_(table.grad, dp))


@right("dp=2", "dp=4", "dp=2,cp=2")
def zero(groups):
    """Each replica updates its rows of the weight, over dp_cp."""
    shards = groups["dp_cp"]
    w = weight(groups, "w", (8, 4))
    x = sim.random(groups, "x", (8, 4), ("dp-cp", None))
    (x @ w.T).square().sum().backward()
    gradient = scatter_rows(w.grad, shards.pg)
    part = w.detach().chunk(shards.size)[shards.rank] - 0.1 * gradient
    w.data.copy_(gather_rows(part, shards.pg))
    sim.see("w", w)


@right("dp=2", "dp=4")
def asynchronous(groups):
    """Gradients reduced while the backward pass goes on, waited for at its end."""
    dp = pg(groups, "dp")
    ws = [weight(groups, f"w{i}", (4, 4)) for i in range(3)]
    works = []

    def reduce_later(parameter):
        works.append(dist.all_reduce(parameter.grad, group=dp, async_op=True))

    for w in ws:
        w.register_post_accumulate_grad_hook(reduce_later)
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    for w in ws:
        x = (x @ w.T).tanh()
    x.sum().backward()
    for work in works:
        work.wait()
    for i, w in enumerate(ws):
        sim.see(f"w{i}.grad", w.grad)


@right("tp=2", "dp=2", "tp=4,dp=2")
def single_precision(groups):
    """float32, which moves by more than 1e-6 when sums are taken in another order."""
    tp, dp = pg(groups, "tp"), pg(groups, "dp")
    cut = {"up": ("tp", None), "down": (None, "tp")}
    up = weight(groups, "up", (256, 64), cut["up"], dtype=torch.float32)
    down = weight(groups, "down", (64, 256), cut["down"], dtype=torch.float32)
    x = sim.random(groups, "x", (64, 64), ("dp", None), dtype=torch.float32)
    y = summed(F.gelu(copied(x, tp) @ up.T) @ down.T, tp)
    y.square().mean().backward()
    sim.see("y", y, ("dp", None))
    sim.see("up.grad", reduce_(up.grad, dp) / dp.size(), ("tp", None))


@right("dp=2", "tp=2", "tp=2,dp=2")
def noise_only(groups):
    """A gradient that is zero but for rounding: a bias before a normalisation."""
    dp = pg(groups, "dp")
    w, bias = weight(groups, "w", (4, 4)), weight(groups, "bias", ())
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    h = x @ w.T + bias
    y = F.layer_norm(h, (4,))
    (y * torch.arange(4.0)).tanh().sum().backward()
    sim.see("bias.grad", reduce_(bias.grad, dp))
    sim.see("w.grad", reduce_(w.grad, dp))
