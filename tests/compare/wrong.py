"""Programs that are wrong in ways that raise nothing. The line that should be named ends in ``# wrong``.

A line ``sim.see`` is named where no other one is known to be wrong. Each has its layouts, and its repair or None.
"""

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
from tests.compare.right import EXPERTS

from rankmesh import sim

WRONG = {}


def wrong(*layouts, repair, group=None):
    """Add a program to the corpus; ``group`` is what its wrong collective is made on."""

    def add(program):
        WRONG[program.__name__] = (program, list(layouts), repair, group)
        return program

    return add


def mlp(groups, name="x", rows=8):
    """A column-parallel layer on this rank's rows: its input, weight and loss."""
    w = weight(groups, "w", (8, 4), ("tp", None))
    x = sim.random(groups, name, (rows, 4), ("dp", None))
    y = copied(x, pg(groups, "tp")) @ w.T
    return w, summed(y.square().sum(), pg(groups, "tp")) / rows


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "dp"), group="tp")
def gradients_over_tp(groups):
    """Gradients of a cut weight summed over tp, which mixes shards, and not over dp."""
    w, loss = mlp(groups)
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))
    reduce_(w.grad, pg(groups, "tp"))  # wrong
    sim.see("w.grad", w.grad, ("tp", None))


@wrong("dp=2", "cp=2", "dp=2,cp=2", repair=("group", "dp_cp"), group="dp")
def gradients_without_cp(groups):
    """Gradients summed over dp where the ranks of cp have other tokens, too."""
    w = weight(groups, "w", (4, 4))
    x = sim.random(groups, "x", (8, 4), ("dp-cp", None))
    loss = (x @ w.T).square().sum()
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp_cp")))
    reduce_(w.grad, pg(groups, "dp"))  # wrong
    sim.see("w.grad", w.grad)


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("all-reduce", "dp"))
def gradients_not_reduced(groups):
    """No sum over dp at all."""
    w, loss = mlp(groups)
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))
    sim.see("w.grad", w.grad, ("tp", None))  # wrong


@wrong("dp=2", "dp=4", "tp=2,dp=2", repair=("scale", "1/dp"), group="dp")
def reduced_twice(groups):
    """Summed by a hook, then once more after the backward pass."""
    dp = pg(groups, "dp")
    w = weight(groups, "w", (4, 4))
    w.register_hook(lambda gradient: reduce_(gradient.clone(), dp))
    x = sim.random(groups, "x", (8, 4), ("dp", None))
    (x @ w.T).square().sum().backward()
    reduce_(w.grad, dp)  # wrong
    sim.see("w.grad", w.grad)


@wrong("tp=2", "dp=2", "tp=4,dp=2", repair=("scale", "tp"))
def divided_by_the_world(groups):
    """The mean over dp taken with the size of the world, after a sum that is right."""
    dp = pg(groups, "dp")
    w, loss = mlp(groups)
    loss.backward()
    dist.all_reduce(w.grad, group=dp)
    w.grad *= groups["dp"].size / dist.get_world_size()
    sim.see("w.grad", w.grad, ("tp", None))  # wrong


@wrong("pp=2", "pp=4", "dp=2,pp=2", repair=("all-reduce", "embd"))
def tied_not_summed(groups):
    """The two copies of a tied table keep their own gradients."""
    pp = groups["pp"]
    table = weight(groups, "table", (8, 4))
    tokens = sim.shard(groups, torch.arange(8), ("dp",))
    x = table[tokens]
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    y = x.detach().requires_grad_()
    loss = F.cross_entropy(y.tanh() @ (table if pp.size == 1 else table.clone()).T, tokens, reduction="sum")
    if last:
        loss.backward()
    if pp.size > 1:
        gradient = y.grad if last else torch.zeros(len(tokens), 4)
        dist.broadcast(gradient, group=pp.pg, group_src=pp.size - 1)
    else:
        gradient = y.grad
    if first:
        x.backward(gradient)
    if first or last:
        reduce_(table.grad, pg(groups, "dp"))
        sim.see("table.grad", table.grad)  # wrong


@wrong("tp=2", "tp=4", "tp=2,dp=2", repair=("all-reduce", "tp"))
def norm_of_sequence_parallel(groups):
    """A norm's weight sees a part of the sequence, and its gradient is not summed over tp."""
    norm, up, down, _ = norm_of_parts(groups)
    for parameter in (up, down, norm):
        reduce_(parameter.grad, pg(groups, "dp"))
    sim.see("up.grad", up.grad, ("tp", None))
    sim.see("norm.grad", norm.grad)  # wrong


@wrong(*EXPERTS, repair=("group", "edp"), group="dp")
def experts_over_dp(groups):
    """Experts' gradients summed over dp, whose ranks hold other experts."""
    router, w, y = moe(groups)
    sim.see("y", y, ("dp", None))
    sim.see("router.grad", reduce_(router.grad, pg(groups, "dp")))
    reduce_(w.grad, pg(groups, "dp"))  # wrong
    sim.see("experts.grad", w.grad, ("ep", None, None), view="expert")


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "dp"), group="new_group")
def loss_over_tp(groups):
    """A loss that every rank of tp has, averaged over dp, and summed over tp as well."""
    w, loss = mlp(groups)
    both = dist.new_group(list(range(dist.get_world_size())))
    total = loss.detach()
    dist.all_reduce(total, group=both)  # wrong
    sim.see("loss", total)
    loss.backward()
    sim.see("w.grad", reduce_(w.grad, pg(groups, "dp")), ("tp", None))


@wrong("tp=2", "tp=4", "tp=2,dp=2", repair=None)
def bias_on_every_rank(groups):
    """A row-parallel layer whose bias is added before the sum, on each rank of tp."""
    w, bias = weight(groups, "w", (4, 8), (None, "tp")), weight(groups, "bias", (4,))
    x = sim.random(groups, "x", (8, 8), ("dp", "tp"))
    y = summed(x @ w.T + bias, pg(groups, "tp"))
    sim.see("y", y, ("dp", None))  # wrong


@wrong("cp=2", "dp=2", "dp=2,cp=2", repair=None)
def wrong_order_of_shards(groups):
    """Parts that are cut by cp inside dp, gathered in the order of dp inside cp, as a zigzag may be."""
    x = sim.random(groups, "x", (8, 2), ("dp-cp", None))
    whole = gather_rows(x, pg(groups, "dp_cp"))
    sim.see("whole", whole)  # wrong


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "tp"), group="dp")
def activations_over_dp(groups):
    """A row-parallel layer summed over dp."""
    w = weight(groups, "w", (4, 8), (None, "tp"))
    x = sim.random(groups, "x", (8, 8), ("dp", "tp"))
    y = summed(x @ w.T, pg(groups, "dp"))  # wrong
    loss = y.square().sum()
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))
    sim.see("w.grad", reduce_(w.grad, pg(groups, "dp")), (None, "tp"))


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "tp"), group="dp")
def input_gradient_over_dp(groups):
    """What enters a column-parallel layer sums its gradient over the wrong group."""
    embedding, w = weight(groups, "embedding", (8, 4)), weight(groups, "w", (8, 4), ("tp", None))
    tokens = sim.shard(groups, torch.arange(8), ("dp",))
    x = copied(embedding[tokens].tanh(), pg(groups, "dp"))  # wrong
    loss = summed((x @ w.T).square().sum(), pg(groups, "tp"))
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))
    sim.see("w.grad", reduce_(w.grad, pg(groups, "dp")), ("tp", None))
    sim.see("embedding.grad", reduce_(embedding.grad, pg(groups, "dp")))


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "dp"), group="world")
def tokens_counted_over_tp(groups):
    """The number of tokens, which the ranks of tp share, summed over tp too."""
    w = weight(groups, "w", (4,))
    x = sim.random(groups, "x", (16, 4), ("dp", None))
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)  # wrong
    loss = (x @ w).square().sum() / count
    loss.backward()
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))
    sim.see("w.grad", reduce_(w.grad, pg(groups, "dp")))


@wrong("dp=2", "cp=2", "dp=2,cp=2", repair=("all-reduce", "cp"))
def zero_without_cp(groups):
    """Optimizer shards over dp, whose gradients leave out the tokens of cp."""
    shards = groups["dp"]
    w = weight(groups, "w", (8, 4))
    x = sim.random(groups, "x", (8, 4), ("dp-cp", None))
    (x @ w.T).square().sum().backward()
    gradient = scatter_rows(w.grad, shards.pg)
    sim.see("gradient", gradient, ("dp", None))  # wrong
    part = w.detach().chunk(shards.size)[shards.rank] - 0.1 * gradient
    sim.see("w", gather_rows(part, shards.pg))


@wrong("cp=2,tp=2", "cp=2,tp=2,dp=2", repair=("group", "cp"), group="tp")
def keys_over_tp(groups):
    """Keys and values gathered over tp, whose ranks have other heads of the same tokens."""
    w = weight(groups, "w", (2, 12, 4), ("tp", None, None))
    x = sim.random(groups, "x", (8, 4), ("cp", None))
    queries, keys, values = torch.einsum("se,hwe->shw", x, w).chunk(3, dim=-1)
    keys, values = gather_rows(torch.stack([keys, values], dim=1), pg(groups, "tp")).unbind(1)  # wrong
    out = torch.einsum("hst,thw->shw", F.softmax(torch.einsum("shw,thw->hst", queries, keys), dim=-1), values)
    sim.see("out", out, ("cp", "tp", None))


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "tp"), group="dp")
def skipped_on_one_rank(groups):
    """A layer whose sum is over dp, and which makes none where dp has one rank, as Megatron's layers do."""
    up, down = weight(groups, "up", (8, 4), ("tp", None)), weight(groups, "down", (4, 8), (None, "tp"))
    y = (sim.random(groups, "x", (8, 4), ("dp", None)) @ up.T) @ down.T
    if groups["dp"].size > 1:
        dist.all_reduce(y, group=pg(groups, "dp"))  # wrong
    sim.see("y", y, ("dp", None))


# -- a group and its divisor, wrong together --------------------------------------------------------------------------


@wrong("dp=2", "cp=2", "dp=2,cp=2", "dp=2,cp=4", repair=None)
def averaged_without_cp(groups):
    """The mean over dp where the ranks of cp have other tokens, divided before the sum."""
    w, v = weight(groups, "w", (8, 4)), weight(groups, "v", (8,))
    ((sim.random(groups, "x", (8, 4), ("dp-cp", None)) @ w.T).tanh() @ v).square().mean().backward()
    for parameter in (w, v):
        parameter.grad.div_(dist.get_world_size(groups["dp"].pg))
        dist.all_reduce(parameter.grad, group=pg(groups, "dp"))
    sim.see("w.grad", w.grad)  # wrong
    sim.see("v.grad", v.grad)


@wrong("tp=2", "dp=2", "tp=2,dp=2", repair=("group", "dp"), group="tp")
def loss_and_count_over_tp(groups):
    """The sum of the losses and the number of tokens, both over tp: one alone is a factor away from being right."""
    w, group = weight(groups, "w", (4,)), pg(groups, "tp")
    losses = (sim.random(groups, "x", (8, 4), ("dp", None)) @ w).square().detach()
    total, count = losses.sum(), torch.tensor(float(len(losses)))
    dist.all_reduce(total, group=group)  # wrong
    dist.all_reduce(count, group=group)
    sim.see("loss", total / count)


# -- factors that differ by layout ------------------------------------------------------------------------------------


@wrong("dp=2", "dp=4", "tp=2,dp=2", repair=("scale", "1/dp"), group="dp")
def loss_not_divided(groups):
    """The means of replicas are summed for the log: the line that sums is named, not that which chose the group."""

    def logged(value, group):
        value = value.detach().clone()
        dist.all_reduce(value, group=group)  # wrong
        return value

    x, w = sim.random(groups, "x", (8, 4), ("dp", None)), weight(groups, "w", (4,))
    sim.see("loss", logged((x @ w).square().mean(), pg(groups, "dp")))


@wrong("tp=2", "tp=4", "tp=2,dp=2", repair=("scale", "tp"), group="tp")
def partial_sums_averaged(groups):
    """A row-parallel layer that takes the mean of its partial sums."""
    w, x = weight(groups, "w", (4, 8), (None, "tp")), sim.random(groups, "x", (8, 8), ("dp", "tp"))
    y = x @ w.T
    dist.all_reduce(y, dist.ReduceOp.AVG, group=pg(groups, "tp"))  # wrong
    sim.see("y", y, ("dp", None))


@wrong("dp=2", "dp=4", "tp=2,dp=2", repair=("scale", "dp"))
def loss_divided_twice(groups):
    """Each rank's part of a mean is divided by dp once more, before the sum."""
    w = weight(groups, "w", (4, 4))
    ((sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T).square().sum() / 8 / groups["dp"].size).backward()
    dist.all_reduce(w.grad, group=pg(groups, "dp"))
    sim.see("w.grad", w.grad)  # wrong


@wrong("tp=2,dp=2", "tp=4,dp=4", repair=("scale", "1/tp"), group="tp")
def loss_counted_by_tp(groups):
    """The loss of the ranks of tp is added up where all have it, under layouts in which dp is as large."""
    w = weight(groups, "w", (4, 4))
    loss = (sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T).square().sum().detach()
    dist.all_reduce(loss, group=pg(groups, "dp"))
    dist.all_reduce(loss, group=pg(groups, "tp"))  # wrong
    sim.see("loss", loss)


@wrong("tp=2,dp=2", "tp=4,dp=4", repair=("scale", "1/tp", "1/dp"))
def loss_times_tp(groups):
    """A loss that is multiplied by tp before the right sum over dp, which is as large."""
    w = weight(groups, "w", (4, 4))
    loss = (sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T).square().sum() * groups["tp"].size
    sim.see("loss", reduce_(loss.detach(), pg(groups, "dp")))  # wrong


@wrong("tp=2", "dp=4", "tp=4,dp=2", repair=None)
def sum_divided_by_the_world(groups):
    """A sum over all tokens is divided by the size of the world."""
    w = weight(groups, "w", (4, 4))
    (sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T).square().sum().backward()
    dist.all_reduce(w.grad, group=pg(groups, "dp"))
    w.grad /= dist.get_world_size()
    sim.see("w.grad", w.grad)  # wrong


# -- what no change repairs -------------------------------------------------------------------------------------------


@wrong("dp=2", "dp=4", repair=None)
def gathered_without_gradient(groups):
    """A contrastive loss whose negatives come from an all-gather that has no backward pass; the sum is right."""
    dp, w = pg(groups, "dp"), weight(groups, "w", (4, 4))
    x = sim.random(groups, "x", (8, 4), ("dp", None)) @ w.T
    loss = (x @ gather_rows(x.detach(), dp).T if dp.size() > 1 else x @ x.T).exp().sum().log()
    loss.backward()
    reduce_(w.grad, dp)
    sim.see("w.grad", w.grad)  # wrong
