"""DeepSpeed's own ``PipelineModule`` and engine, trained on gloo ranks over its grid, or over an ``Mpu`` as grid."""

import contextlib
import importlib
import os

import torch
import torch.distributed as dist

STEPS, WIDTH, ROWS = 3, 8, 4


def data(seed):
    """Batches of a data-parallel rank."""
    place = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randn(ROWS, WIDTH, generator=place)
        yield rows, rows.roll(1, dims=1)


def train(stages, zero, over):
    """Three steps; the losses, a sum of this stage's parameters, and whether the grid is ours."""
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from rankmesh.dialects.deepspeed import Mpu

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # gloo does what it would compile
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(7)
    layers = [layer for _ in range(2) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    given, mpu = {"num_stages": stages}, None
    with contextlib.ExitStack() as stack:
        if over == "ours":
            mpu = stack.enter_context(Mpu.connect(pp=stages))
            with mpu.as_grid() as topology:
                module = PipelineModule(layers, topology=topology, loss_fn=torch.nn.functional.mse_loss)
        else:
            module = PipelineModule(layers, loss_fn=torch.nn.functional.mse_loss, **given)
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": zero},
                "zero_allow_untested_optimizer": True,
            },
        )
        batches = data(20 + engine.grid.data_parallel_id)
        losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
        total = [float(weight.detach().double().sum()) for weight in module.parameters()]
        dist.barrier()
        return {"losses": losses, "weights": total, "ours": engine.grid is mpu, "stage": engine.stage_id}
