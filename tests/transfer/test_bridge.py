"""Bridges: activations cross from one mesh to another, and their gradients come back."""

import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh import sim

ROWS = 8


def _model():
    """Activations that come in, and the weights before and behind the bridge."""
    return [torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
            for n, shape in enumerate([(ROWS, 4), (4, 6), (6, 5)])]  # fmt: skip


def _moves(source, target):
    """The activations between, cut over dp on both meshes."""
    return rm.Transfer(*({"x": rm.Sharding(mesh, ("dp", None), (ROWS, 6), "float64")} for mesh in (source, target)))


def _train(source, target):
    """One rank's part: the gradients of the weight before the bridge and of the one behind it, where it has them."""
    rank, moves = dist.get_rank(), _moves(source, target)
    bridge = moves.bridge(1 << 16)
    x, *weights = _model()
    first, second = (w.clone().requires_grad_() for w in weights)
    given = {}
    if rank in source:
        (((low, high), _),) = moves.source["x"].of(rank).boxes
        given = {"x": x[low:high] @ first}
    got = bridge(given)
    if rank in target:
        (got["x"] @ second).sin().sum().backward()
    else:
        got[""].backward()
    return tuple(None if w.grad is None else w.grad.tolist() for w in (first, second))


def _single():
    """The gradients of one process."""
    x, w1, w2 = _model()
    whole = [w.clone().requires_grad_() for w in (w1, w2)]
    ((x @ whole[0]) @ whole[1]).sin().sum().backward()
    return [w.grad for w in whole]


def _summed(gradients, mesh):
    """What the data-parallel replicas of a mesh have together, from tp rank 0 of each."""
    return sum(torch.tensor(gradients[mesh.rank(tp=0, dp=dp)], dtype=torch.float64) for dp in range(mesh.axes["dp"]))


def _agrees(result, source, target):
    """Each side's gradients, summed over its replicas, are those of one process; copies of a replica agree."""
    expected = _single()
    assert torch.allclose(_summed([first for first, _ in result], source), expected[0], atol=1e-12)
    assert torch.allclose(_summed([second for _, second in result], target), expected[1], atol=1e-12)
    for tp in range(source.axes["tp"]):
        assert result[source.rank(tp=tp, dp=1)][0] == result[source.rank(tp=0, dp=1)][0]


def test_gradients_are_those_of_one_process():
    """Simulated ranks: apart (8 to 4 and 4 to 8 replicas) and on the same ranks, as one process has them."""
    for source, target in (
        (rm.Mesh(tp=2, dp=4), rm.Mesh(tp=2, dp=2, offset=8)),
        (rm.Mesh(tp=1, dp=2), rm.Mesh(tp=1, dp=4, offset=2)),
        (rm.Mesh(tp=2, dp=2), rm.Mesh(tp=1, dp=4)),
    ):
        _agrees(sim.run(_train, _moves(source, target).world_size, source, target), source, target)
