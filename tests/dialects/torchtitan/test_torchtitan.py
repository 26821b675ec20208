import pytest
import torch
import torch.distributed as dist
from tests.dialects import leaks
from tests.torch_lacks import meshes_of_meshes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankmesh.backend.registries import registries
from rankmesh.dialects.torchtitan import ParallelDims
from rankmesh.errors import PlanError

EIGHT = {"dp_replicate": 2, "dp_shard": -1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 8}


def _loss(model, rows):
    loss = model(rows).square().mean()
    loss.backward()
    return loss


def _mlp():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def _train(me):
    single = _mlp()
    replicas = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = torch.stack([_loss(single, rows) for rows in replicas]).mean()
    before = registries()["pg_map"]
    with ParallelDims(**EIGHT, spmd_backend="partial_dtensor") as dims:
        model = _mlp()
        parallelize_module(model, dims.get_mesh("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=dims.get_mesh(["dp_replicate", "fsdp"]))
        loss = _loss(model, replicas[dims.get_mesh("batch").get_local_rank()]).detach()
        dist.all_reduce(loss, group=dims.get_mesh("loss").get_group())
        whole = model[0].weight.grad.full_tensor()
        made = registries()["pg_map"] - before
    return [
        torch.allclose(loss / 4, expected, atol=1e-6),
        torch.allclose(whole, single[0].weight.grad / 4, atol=1e-6),
        made,
        registries()["pg_map"] - before,
        leaks.left_by(me, _cycle),
    ]


def _cycle():
    with ParallelDims(**EIGHT) as dims:
        dims.build_mesh()


@meshes_of_meshes
@pytest.mark.long
def test_fsdp_and_tensor_parallelism(ranks):
    """8 ranks, 2 replicas x 2 shards x 2 tensors: loss and gradients of one process; 4 groups; nothing left."""
    for loss, gradient, made, kept, left in ranks(8, _train):
        # batch and loss share theirs; pp, cp and ep have one rank, and a group of it that torch counts too
        assert (loss, gradient, left) == (True, True, {})
        assert made == 4 + 1
        assert kept == 0


def test_what_it_knows_without_a_world():
    """Which axes there are, from the degrees alone; a backend that there is not is refused."""
    dims = ParallelDims(**EIGHT)
    assert (dims.dp_shard, dims.seq_len_divisor, dims.non_data_parallel_size) == (2, 4, 2)
    assert [dims.dp_enabled, dims.fsdp_enabled, dims.tp_enabled, dims.pp_enabled] == [True, True, True, False]
    assert dims == ParallelDims(**EIGHT) != ParallelDims(**{**EIGHT, "tp": 1})
    with pytest.raises(PlanError, match="spmd_backend 'other' is unknown"):
        ParallelDims(**EIGHT, spmd_backend="other")


def test_a_config_of_torchtitan():
    """The degrees that a ParallelismConfig has, by its names."""
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel",
             "pipeline_parallel", "expert_parallel")  # fmt: skip
    values = dict(zip((f"{name}_degree" for name in names), (1, -1, 1, 2, 1, 2), strict=True))
    config = type("Config", (), {**values, "spmd_backend": "full_dtensor"})
    assert ParallelDims.from_config(config, 4) == ParallelDims(1, 2, 1, 2, 1, 2, 4, "full_dtensor")
