"""The same model and optimizer in plain torch, on one process, without a line of the example: the dumb answer."""

import torch
import torch.nn.functional as F  # noqa: N812


def rotated(x):
    """Queries or keys (batch, heads, places, width), as complex numbers turned by place times speed."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([10000.0 ** (-pair / half) for pair in range(half)], dtype=torch.float64)
    turns = torch.polar(torch.ones(x.shape[2], half, dtype=torch.float64), torch.arange(x.shape[2])[:, None] * speeds)
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(x, inward, outward):
    """All heads, the whole sequence."""
    queries, keys, values = (torch.einsum("bpe,hwe->bhpw", x, matrix) for matrix in inward)
    seen = F.scaled_dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
    return torch.einsum("bhpw,hwe->bpe", seen, outward)


def experts(x, router, up, down, top):
    """Every expert on every token, weighted by 0 where it was not chosen."""
    best = torch.softmax(x @ router.T, dim=-1).topk(top)
    weight = torch.zeros(*x.shape[:2], len(router), dtype=x.dtype).scatter(-1, best.indices, best.values)
    weight = weight / weight.sum(-1, keepdim=True)
    return sum(weight[..., e, None] * (F.gelu(x @ up[e].T) @ down[e]) for e in range(len(router)))


def loss_of(weights, shape, tokens, targets):
    """The mean loss of the whole batch."""
    x = F.embedding(tokens, weights["table"])
    for i in range(shape.layers):
        local = {name.removeprefix(f"block{i}."): w for name, w in weights.items() if name.startswith(f"block{i}.")}
        norm1, norm2 = local["norm1"], local["norm2"]
        x = x + attention(F.rms_norm(x, norm1.shape, norm1), local["attention.in"], local["attention.out"])
        y = F.rms_norm(x, norm2.shape, norm2)
        if "dense.up" in local:
            x = x + F.gelu(y @ local["dense.up"].T) @ local["dense.down"]
        else:
            x = x + experts(y, local["experts.router"], local["experts.up"], local["experts.down"], shape.top)
    scores = F.rms_norm(x, weights["norm"].shape, weights["norm"]) @ weights["table"].T
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(weights, run, batches):
    """The losses and norms of steps on these batches, (rows, length + 1), from these weights."""
    weights = {name: torch.nn.Parameter(values) for name, values in weights.items()}
    adam, result = torch.optim.AdamW(weights.values(), lr=run.rate), []
    for batch in batches:
        loss = loss_of(weights, run.shape, batch[:, :-1], batch[:, 1:])
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), run.clip)
        adam.step()
        result.append((float(loss), float(norm)))
    return result
