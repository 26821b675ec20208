"""One training step of a job with three axes, small enough to be computed by hand in one process.

```
tp = 2    each layer is cut by its inputs; partial products are summed over tp
pp = 3    one layer a stage; activations go to next, gradients to prev
dp = 2    each has its own sample; gradients are averaged over dp
```

Besides: the norm over tp-pp, the tokens over tp-dp, and the embedding's gradient, which both ends of pp hold.
All numbers are whole, so that results are exact in any order.
"""

import torch
import torch.distributed as dist

import rankmesh as rm

TP, DP, PP, WIDTH = 2, 2, 3, 4
PLAN = rm.Plan(
    rm.Mesh(tp=TP, dp=DP, pp=PP),
    [
        *(rm.GroupSpec(name) for name in ("tp", "dp", "pp")),
        rm.GroupSpec("mp", "tp-pp"),
        rm.GroupSpec("tp_dp", "tp-dp"),
        rm.GroupSpec("embd", "pp", pick=rm.ends),
    ],
)


def weight(stage):
    """The layer of one stage."""
    return (torch.arange(WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH) * (stage + 2)) % 7 - 3


def sample(replica):
    """The input, and the number of tokens, of one replica."""
    return torch.arange(1.0, WIDTH + 1, dtype=torch.float64) + 3 * replica, 5 + replica


def in_one_process():
    """What every rank must find: gradients by stage, the norm squared, the tokens, the embedding's gradient."""
    gradients = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in range(PP)]
    for replica in range(DP):
        inputs = [sample(replica)[0]]
        for stage in range(PP):
            inputs.append(weight(stage) @ inputs[-1])
        grad = torch.ones(WIDTH, dtype=torch.float64)
        for stage in reversed(range(PP)):
            gradients[stage] += torch.outer(grad, inputs[stage]) / DP
            grad = weight(stage).t() @ grad
    norm = sum(float((grad**2).sum()) for grad in gradients)
    tokens = sum(sample(replica)[1] for replica in range(DP))
    return gradients, norm, tokens, float(1 + PP)


def step(groups):
    """The step on one rank, with whatever groups it is given; an assertion where a number is wrong."""
    gradients, norm, tokens, embedding = in_one_process()
    here = PLAN.mesh.coordinate(dist.get_rank())
    stage, mine = here["pp"], slice(2 * here["tp"], 2 * here["tp"] + 2)
    given, count = sample(here["dp"])
    if stage:
        given = _received(groups["pp"], groups["pp"].prev)
    out = weight(stage)[:, mine] @ given[mine]
    dist.all_reduce(out, group=groups["tp"].pg)
    grad = torch.ones(WIDTH, dtype=torch.float64)
    if stage < PP - 1:
        dist.send(out, groups["pp"].next, group=groups["pp"].pg)
        grad = _received(groups["pp"], groups["pp"].next)
    local = torch.outer(grad, given[mine])
    parts = [torch.empty(2, dtype=torch.float64) for _ in range(groups["tp"].size)]
    dist.all_gather(parts, weight(stage)[:, mine].t() @ grad, group=groups["tp"].pg)
    if stage:
        dist.send(torch.cat(parts), groups["pp"].prev, group=groups["pp"].pg)
    dist.all_reduce(local, group=groups["dp"].pg)
    local /= groups["dp"].size
    squares = (local**2).sum()
    dist.all_reduce(squares, group=groups["mp"].pg)
    seen = torch.tensor(count)
    dist.all_reduce(seen, group=groups["tp_dp"].pg)
    assert torch.equal(local, gradients[stage][:, mine])
    assert float(squares) == norm
    assert int(seen) == TP * tokens
    if stage in (0, PP - 1):
        table = torch.tensor([1.0 + stage])
        dist.all_reduce(table, group=groups["embd"].pg)
        assert float(table) == embedding


def _received(pipeline, peer):
    tensor = torch.empty(WIDTH, dtype=torch.float64)
    dist.recv(tensor, peer, group=pipeline.pg)
    return tensor
