"""What the example does not do, in its smallest form: each function is one part of a step on one rank's groups.

Sequence parallelism (with Megatron's second gather of the input for the gradient of the weight), ring attention's
exchange of keys and values, Ulysses' exchange of heads, gradients summed whole, weights gathered when they are used,
and the messages of an interleaved pipeline.
"""

import torch
import torch.distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gathered(part, group):
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    _gather(whole, part.contiguous(), group=group)
    return whole


def _scattered(whole, group):
    part = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    _scatter_sum(part, whole.contiguous(), group=group)
    return part


class _Column(torch.autograd.Function):
    """A matrix cut by columns: tokens are gathered before it, their gradient is scattered after it."""

    @staticmethod
    def forward(ctx, tokens, weight, group):
        ctx.save_for_backward(tokens, weight)
        ctx.group = group
        return _gathered(tokens, group) @ weight

    @staticmethod
    def backward(ctx, gradient):
        tokens, weight = ctx.saved_tensors
        whole = _gathered(tokens, ctx.group)
        return _scattered(gradient @ weight.T, ctx.group), whole.T @ gradient, None


class _Scattered(torch.autograd.Function):
    """Partial results: summed, and each rank keeps its tokens; their gradients are gathered."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return _scattered(whole, group)

    @staticmethod
    def backward(ctx, gradient):
        return _gathered(gradient, ctx.group), None


def sequence_parallel(tp, tokens, hidden, layers):
    """``layers`` dense layers forward and backward: attention and feed-forward are a pair of matrices each."""
    x = torch.ones(tokens // tp.size(), hidden, requires_grad=True)
    y = x
    for _ in range(2 * layers):
        up, down = (torch.ones(hidden, hidden, requires_grad=True) for _ in range(2))
        y = _Scattered.apply(_Column.apply(y, up, tp) @ down, tp)
    y.sum().backward()


def _shift(tensors, cp):
    arrived = [torch.empty_like(tensor) for tensor in tensors]
    ahead, behind = (cp.rank() + 1) % cp.size(), (cp.rank() - 1) % cp.size()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, group=cp, group_peer=ahead) for tensor in tensors]
        + [dist.P2POp(dist.irecv, tensor, group=cp, group_peer=behind) for tensor in arrived]
    )
    for work in works:
        work.wait()
    return arrived


def ring_attention(cp, tokens, keys):
    """Keys and values go round; backward they go round again, and their gradients with them, home in the end."""
    block = [torch.ones(2, tokens, keys)]
    for _ in range(cp.size() - 1):
        block = _shift(block, cp)
    block, gradients = [torch.ones(2, tokens, keys)], [torch.zeros(2, tokens, keys)]
    for step in range(cp.size()):
        gradients = _shift(gradients, cp)
        if step < cp.size() - 1:
            block = _shift(block, cp)


def heads_to_ranks(cp, tokens, queries, keys):
    """Tokens of all heads become all tokens of some heads, and back; backward the same."""
    for _ in range(2):
        for width in (queries + 2 * keys, queries):
            given = torch.ones(cp.size(), tokens * width // cp.size())
            dist.all_to_all_single(torch.empty_like(given), given, group=cp)


def gradients_summed(dp, count):
    """One all-reduce of every gradient."""
    dist.all_reduce(torch.ones(count), group=dp)


def weights_gathered(dp, count, passes):
    """Each pass gathers all weights forward and backward, and scatters their gradients."""
    each = -(-count // dp.size())
    for _ in range(passes):
        for _ in ("forward", "backward"):
            _gathered(torch.ones(each), dp)
        _scattered(torch.ones(each * dp.size()), dp)


def interleaved(pp, size, passes, chunks):
    """Every chunk but the last one of the last stage sends forward, every chunk but the very first one backward.

    Neighbours pass one message after the other here; how a schedule mixes them does not change what is sent.
    """
    stages = pp.size()
    for backward in (False, True):
        for chunk in range(chunks):
            for stage in range(stages):
                last = chunk == chunks - 1 and stage == stages - 1
                source, target = stage, (stage + 1) % stages
                if backward:
                    source, target = stages - 1 - stage, (stages - 2 - stage) % stages
                for _ in range(0 if last else passes):
                    if pp.rank() == source:
                        dist.send(torch.ones(size), group=pp, group_dst=target)
                    if pp.rank() == target:
                        dist.recv(torch.empty(size), group=pp, group_src=source)
