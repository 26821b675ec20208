"""Programs that are the same on every layout. Each has the layouts that it is tried on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.compare.parallel import (
    copied,
    ends,
    gather_rows,
    gathered,
    moe,
    norm_of_parts,
    pg,
    reduce_,
    scatter_rows,
    sinks_of_heads,
    stage,
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


@right("tp=2", "tp=4", "dp=2")
def vocabulary(groups):
    """Embedding and cross-entropy over a vocabulary that tp cuts."""
    tp, dp = groups["tp"], pg(groups, "dp")
    table = weight(groups, "table", (16, 4), ("tp", None))
    tokens = sim.shard(groups, torch.arange(8) * 7 % 16, ("dp",))
    low = tp.rank * len(table)
    outside = (tokens < low) | (tokens >= low + len(table))
    rows = F.embedding((tokens - low).masked_fill(outside, 0), table).masked_fill(outside[:, None], 0)
    hidden = summed(rows, tp.pg)
    scores = copied(hidden, tp.pg) @ table.T
    highest = reduce_(scores.detach().amax(-1), tp.pg, dist.ReduceOp.MAX)
    total = summed((scores - highest[:, None]).exp().sum(-1), tp.pg).log() + highest
    scored = scores.gather(1, (tokens - low).masked_fill(outside, 0)[:, None])[:, 0].masked_fill(outside, 0)
    loss = (total - summed(scored, tp.pg)).sum()
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), dp))
    sim.see("table.grad", reduce_(table.grad, dp), ("tp", None))


@right("cp=2", "cp=4", "dp=2,cp=2")
def context_parallel(groups):
    """Attention whose keys and values are gathered over cp."""
    cp = pg(groups, "cp")
    w = weight(groups, "w", (12, 4))
    x = sim.random(groups, "x", (8, 4), ("cp", None))
    queries, keys, values = (x @ w.T).chunk(3, dim=-1)
    keys, values = gathered(keys, cp), gathered(values, cp)
    out = F.softmax(queries @ keys.T, dim=-1) @ values
    out.square().sum().backward()
    sim.see("out", out, ("cp", None))
    sim.see("w.grad", reduce_(w.grad, cp))


@right("cp=2", "cp=4")
def zigzag(groups):
    """Each rank of cp has one chunk from the front and one from the back."""
    cp = groups["cp"]
    w = weight(groups, "w", (4, 4))
    chunks = sim.random(groups, "x", (16, 4)).chunk(2 * cp.size)
    x = torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]])
    y = (x @ w.T).tanh()
    keys = gathered(y, cp.pg)
    loss = (y @ keys.T).square().sum()
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), cp.pg))
    sim.see("w.grad", reduce_(w.grad, cp.pg))


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


@right("tp=2", "tp=2,pp=2", "tp=2,dp=2")
def clipping(groups):
    """The norm of all gradients: cut weights over tp, whole ones once, all stages."""
    tp, pp = groups["tp"], pg(groups, "pp")
    cut, whole = weight(groups, "cut", (8, 4), ("tp", None)), weight(groups, "whole", (4,))
    x = sim.random(groups, "x", (8, 4))
    y = summed((copied(x * whole, tp.pg) @ cut.T).square().sum(), tp.pg)
    y.backward()
    square = cut.grad.square().sum() + (whole.grad.square().sum() if tp.rank == 0 else 0)
    norm = reduce_(square, tp.pg).sqrt()
    total = reduce_(norm.square(), pp).sqrt() / groups["pp"].size ** 0.5
    for parameter in (cut, whole):
        parameter.grad *= 1.0 / (total + 1e-6)
    sim.see("norm", total)
    sim.see("cut.grad", cut.grad, ("tp", None))
    sim.see("whole.grad", whole.grad)


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
def averaged_by_hooks(groups):
    """Gradients averaged over dp by hooks of the tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    hooks = [parameter.register_hook(lambda g: reduce_(g.clone(), pg(groups, "dp"), dist.ReduceOp.AVG))
             for parameter in model.parameters()]  # fmt: skip
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    model(x).square().mean().backward()
    sim.see("model", module=model)
    for hook in hooks:
        hook.remove()


@right("tp=2", "dp=2", "tp=2,dp=2")
def dropout(groups):
    """A mask that each element has from its place in the whole tensor."""
    tp, dp = pg(groups, "tp"), pg(groups, "dp")
    up, down = weight(groups, "up", (8, 4), ("tp", None)), weight(groups, "down", (4, 8), (None, "tp"))
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    kept = sim.random(groups, "mask", (8, 8), ("dp", "tp"), draw=torch.rand) > 0.3
    y = summed(((copied(x, tp) @ up.T) * kept / 0.7) @ down.T, tp)
    y.square().sum().backward()
    sim.see("y", y, ("dp", None))
    sim.see("up.grad", reduce_(up.grad, dp), ("tp", None))


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


@right("dp=2", "dp=4", "dp=2,cp=2")
def uneven_tokens(groups):
    """A mean over the tokens that count, whose number differs between ranks."""
    data = pg(groups, "dp_cp")
    w = weight(groups, "w", (4,))
    x = sim.random(groups, "x", (16, 4), ("dp-cp", None))
    counts = (sim.random(groups, "counts", (16,), ("dp-cp",), draw=torch.rand) > 0.4).double()
    total = reduce_(counts.sum(), data)
    loss = ((x @ w).square() * counts).sum() / total
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), data))
    sim.see("w.grad", reduce_(w.grad, data))


@right("dp=2", "dp=4")
def accumulated(groups):
    """Two microbatches on each rank, reduced once."""
    dp = pg(groups, "dp")
    w = weight(groups, "w", (4, 4))
    x = sim.random(groups, "x", (16, 4), ("dp", None))
    for part in x.chunk(2):
        ((part @ w.T).tanh().sum() / 16).backward()
    sim.see("w.grad", reduce_(w.grad, dp))


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


@right("dp=2", "dp=4")
def synchronised_batch_norm(groups):
    """Statistics over the whole batch."""
    dp = pg(groups, "dp")
    w = weight(groups, "w", (4, 4))
    x = sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T
    sums = summed(torch.stack([x.sum(0), x.square().sum(0)]), dp)
    mean, square = sums[0] / 8, sums[1] / 8
    y = (x - mean) / (square - mean.square() + 1e-5).sqrt()
    sim.see("y", y, ("dp", None))


@right("tp=2", "tp=4", "tp=2,dp=2")
def biased(groups):
    """A row-parallel layer whose bias is added once, after the sum."""
    tp, dp = pg(groups, "tp"), pg(groups, "dp")
    w, bias = weight(groups, "w", (4, 8), (None, "tp")), weight(groups, "bias", (4,))
    x = sim.random(groups, "x", (8, 8), ("dp", "tp"))
    y = summed(x @ w.T, tp) + bias
    y.square().sum().backward()
    sim.see("y", y, ("dp", None))
    sim.see("bias.grad", reduce_(bias.grad, dp))


@right("cp=2", "cp=4", "tp=2,cp=2")
def ulysses(groups):
    """Sequence for heads and back by all-to-all."""
    cp = groups["cp"]
    x = sim.random(groups, "x", (8, 4, 2), ("cp", None, None))
    pieces = [piece.contiguous() for piece in x.chunk(cp.size, dim=1)]
    arrived = [torch.empty_like(pieces[0]) for _ in pieces]
    dist.all_to_all(arrived, pieces, group=cp.pg)
    heads = torch.cat(arrived)
    mixed = F.softmax(torch.einsum("shd,thd->hst", heads, heads), dim=-1)
    out = torch.einsum("hst,thd->shd", mixed, heads)
    back = [piece.contiguous() for piece in out.chunk(cp.size)]
    arrived = [torch.empty_like(back[0]) for _ in back]
    dist.all_to_all(arrived, back, group=cp.pg)
    sim.see("heads", heads, (None, "cp", None))
    sim.see("out", torch.cat(arrived, dim=1), ("cp", None, None))


@right("tp=2", "tp=4", "tp=2,dp=2")
def sinks(groups):
    """Attention with a learned sink for each head, which tp cuts as it cuts the heads."""
    sink, out = sinks_of_heads(groups)
    sim.see("out", out, ("dp",))
    sim.see("sink.grad", reduce_(sink.grad, pg(groups, "dp")), ("tp",))


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


@right("pp=2", "pp=4", "dp=2,pp=2")
def microbatches(groups):
    """Two microbatches through the stages, and their gradients back, each in order."""
    pp, (first, last) = groups["pp"], ends(groups)
    run, parts = stage(groups), [x.clone() for x in sim.random(groups, "x", (8, 4), ("dp", None)).chunk(2)]
    done = []
    for x in parts:
        if not first:
            dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        done.append(run(x.requires_grad_()))
        if not last:
            dist.send(done[-1].detach(), group=pp.pg, group_dst=pp.rank + 1)
    for x, y in zip(parts, done, strict=True):
        gradient = torch.ones_like(y)
        if last:
            gradient = y.detach()
        else:
            dist.recv(gradient, group=pp.pg, group_src=pp.rank + 1)
        y.backward(gradient)
        if not first:
            dist.send(x.grad, group=pp.pg, group_dst=pp.rank - 1)
    if last:
        sim.see("y", torch.cat(done), ("dp", None), at={"pp": -1})
    if first:
        sim.see("x.grad", torch.cat([x.grad for x in parts]), ("dp", None), at={"pp": 0})


def rotated(x, group):
    """What the member before this one has."""
    got = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group.pg, group_peer=(group.rank + 1) % group.size),
        dist.P2POp(dist.irecv, got, group=group.pg, group_peer=(group.rank - 1) % group.size),
    ]
    for work in dist.batch_isend_irecv(operations) if group.size > 1 else ():
        work.wait()
    return got if group.size > 1 else x


@right("cp=2", "cp=4", "dp=2,cp=2")
def ring(groups):
    """Keys that go round a ring of cp, one step at a time."""
    cp = groups["cp"]
    queries, keys = (sim.random(groups, name, (2, 8, 4), ("dp", "cp", None)) for name in ("q", "k"))
    scales, mine, y = sim.random(groups, "scales", (8,)).chunk(cp.size), cp.rank, 0
    for _ in range(cp.size):
        y = y + torch.einsum("bqe,bke,k,bkf->bqf", queries, keys, scales[mine], keys)
        keys, mine = rotated(keys, cp), (mine - 1) % cp.size
    sim.see("y", y, ("dp", "cp", None))


@right("tp=2,pp=2", "tp=2,pp=4", "pp=2")
def scatter_gather(groups):
    """Each rank of tp sends its part of what all of them have; the next stage gathers the parts."""
    tp, pp, (first, last) = groups["tp"], groups["pp"], ends(groups)
    run, x = stage(groups), sim.random(groups, "x", (8, 4))
    if not first:
        part = x.chunk(tp.size)[tp.rank].clone()
        dist.recv(part, group=pp.pg, group_src=pp.rank - 1)
        x = gather_rows(part, tp.pg)
    x = run(x).detach()
    if not last:
        dist.send(x.chunk(tp.size)[tp.rank], group=pp.pg, group_dst=pp.rank + 1)
    else:
        sim.see("y", x, at={"pp": -1})


@right("pp=4", "dp=2,pp=4")
def skip(groups):
    """The third stage gets the output of the second, and that of the first besides."""
    pp, run, x = groups["pp"], stage(groups), sim.random(groups, "x", (8, 4), ("dp", None))
    if pp.size == 1:
        weights = [weight(groups, f"layer{i}", (4, 4)) for i in range(4)]
        a = (x @ weights[0].T).tanh()
        x = ((((a @ weights[1].T).tanh() + 2 * a) @ weights[2].T).tanh() @ weights[3].T).tanh()
    else:
        if pp.rank:
            dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        if pp.rank == 2:
            besides = torch.empty_like(x)
            dist.recv(besides, group=pp.pg, group_src=0)
            x = x + 2 * besides
        x = run(x).detach()
        works = [dist.isend(x, group=pp.pg, group_dst=to) for to in {0: (2, 1), 1: (2,), 2: (3,)}.get(pp.rank, ())]
        for work in works:
            work.wait()
    if pp.rank == pp.size - 1:
        sim.see("y", x, ("dp", None), at={"pp": -1})
