"""Bridges: activations cross from one mesh to another, and their gradients come back."""

import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh import sim

ROWS = 8


def _training(source, target):
    """Two halves of a model on two meshes: w1 before the bridge, w2 behind it; gradients of both, by rank."""
    x, w1, w2 = (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
                 for n, shape in enumerate([(ROWS, 4), (4, 6), (6, 5)]))  # fmt: skip
    sides = [{"x": rm.Sharding(mesh, ("dp", None), (ROWS, 6), "float64")} for mesh in (source, target)]
    moves = rm.Transfer(*sides)

    def train():
        rank = dist.get_rank()
        bridge = moves.bridge(1 << 16)
        first, second = (w.clone().requires_grad_() for w in (w1, w2))
        given = {}
        if rank in source:
            (((low, high), _),) = sides[0]["x"].of(rank).boxes
            given = {"x": x[low:high] @ first}
        got = bridge(given)
        if rank in target:
            (got["x"] @ second).sin().sum().backward()
        else:
            got[""].backward()
        return (
            None if first.grad is None else first.grad.tolist(),
            None if second.grad is None else second.grad.tolist(),
        )

    whole = [w.clone().requires_grad_() for w in (w1, w2)]
    ((x @ whole[0]) @ whole[1]).sin().sum().backward()
    told = sim.run(train, moves.world_size)
    return told, [w.grad for w in whole]


def _summed(gradients, mesh):
    """What the data-parallel replicas of a mesh have together, from tp rank 0 of each."""
    return sum(torch.tensor(gradients[mesh.rank(tp=0, dp=dp)], dtype=torch.float64) for dp in range(mesh.axes["dp"]))


def test_gradients_are_those_of_one_process():
    """Simulated ranks: apart (8 to 4 and 4 to 8 replicas) and on the same ranks, as one process has them."""
    for source, target in (
        (rm.Mesh(tp=2, dp=4), rm.Mesh(tp=2, dp=2, offset=8)),
        (rm.Mesh(tp=1, dp=2), rm.Mesh(tp=1, dp=4, offset=2)),
        (rm.Mesh(tp=2, dp=2), rm.Mesh(tp=1, dp=4)),
    ):
        told, expected = _training(source, target)
        assert torch.allclose(_summed([first for first, _ in told], source), expected[0], atol=1e-12)
        assert torch.allclose(_summed([second for _, second in told], target), expected[1], atol=1e-12)
        for tp in range(source.axes["tp"]):
            assert told[source.rank(tp=tp, dp=1)][0] == told[source.rank(tp=0, dp=1)][0]
