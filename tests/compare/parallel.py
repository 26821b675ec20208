"""What the programs of the corpus are made of: collectives with gradients, and small layers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from rankmesh import sim


def copied(x, group):
    """The same tensor, whose gradient is summed over the group: Megatron's f."""
    return _Copied.apply(x, group)


def summed(x, group):
    """The sum over the group, whose gradient each rank has: Megatron's g."""
    return _Summed.apply(x, group)


def gathered(x, group):
    """The rows of all members; each gets the sum of the gradients of its own."""
    return _Gathered.apply(x, group)


def scattered(x, group):
    """This member's rows of the sum; their gradients are gathered."""
    return _Scattered.apply(x, group)


def reduce_(x, group, operation=dist.ReduceOp.SUM):
    """All-reduce in place."""
    dist.all_reduce(x, operation, group=group)
    return x


def gather_rows(x, group):
    """The rows of all members, without gradients."""
    rows = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(rows, x.contiguous(), group=group)
    return torch.cat(rows)


def scatter_rows(x, group):
    """This member's rows of the sum, without gradients."""
    pieces = [piece.contiguous() for piece in x.chunk(group.size())]
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=group)
    return mine


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_(gradient.clone(), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scatter_rows(gradient.contiguous(), ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_rows(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gather_rows(gradient, ctx.group), None


def weight(groups, name, shape, cut=None, scale=0.5, **options):
    """A parameter: this rank's shard of a random one."""
    return torch.nn.Parameter(scale * sim.random(groups, name, shape, cut, **options))


def pg(groups, name):
    """A process group by its kind."""
    return groups[name].pg


def stage(groups):
    """The layers of this stage of pp, of four: a function of their input."""
    pp = groups["pp"]
    weights = [weight(groups, f"layer{i}", (4, 4)) for i in range(pp.rank * 4 // pp.size, (pp.rank + 1) * 4 // pp.size)]

    def run(x):
        for w in weights:
            x = (x @ w.T).tanh()
        return x

    return run


def ends(groups):
    """Whether this stage of pp is the first one, and the last one."""
    return groups["pp"].rank == 0, groups["pp"].rank == groups["pp"].size - 1


def norm_of_parts(groups):
    """Layers of tp behind a norm of this rank's part of the sequence, after a backward pass: weights and output."""
    tp = pg(groups, "tp")
    norm = torch.nn.Parameter(torch.ones(4))
    up, down = weight(groups, "up", (8, 4), ("tp", None)), weight(groups, "down", (4, 8), (None, "tp"))
    x = sim.random(groups, "x", (8, 4), ("dp-tp", None))
    y = scattered(F.gelu(gathered(F.rms_norm(x, (4,), norm), tp) @ up.T) @ down.T, tp)
    y.square().sum().backward()
    return norm, up, down, y


def moe(groups):
    """A layer of experts, after a backward pass: the router, the experts and the output."""
    ep = groups["ep"]
    router = weight(groups, "router", (4, 4))
    w = weight(groups, "experts", (4, 4, 4), ("ep", None, None), view="expert")
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    shares, mine = F.softmax(x @ router.T, dim=-1), len(w)
    tokens, weights = gathered(x, ep.pg), gathered(shares, ep.pg)
    done = sum((tokens @ w[i].T).tanh() * weights[:, ep.rank * mine + i, None] for i in range(mine))
    y = scattered(done, ep.pg)
    y.square().sum().backward()
    return router, w, y
