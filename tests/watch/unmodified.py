"""Programs that know nothing of rankmesh, on 4 ranks: ``unmodified.py PROGRAM MISTAKE``; rank 3 makes the mistake.

A step is a function of ``mistake``, which is called before the last collective of rank 3's second step.
"""

import importlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def plain():
    """Groups of torch's own: pairs, and the world."""
    made = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = made[dist.get_rank() // 2]

    def step(mistake):
        dist.all_reduce(torch.ones(4), group=group)
        if mistake():
            dist.all_reduce(torch.ones(4))

    return step


def megatron():
    """Megatron-Core's parallel state: tp=2, dp=2."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    def step(mistake):
        dist.all_reduce(torch.ones(4), group=parallel_state.get_tensor_model_parallel_group())
        if mistake():
            dist.all_reduce(torch.ones(4), group=parallel_state.get_data_parallel_group())

    return step


def fsdp():
    """FSDP2 over dp and tensor parallelism over tp, on a DeviceMesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(mistake):
        loss = model(torch.ones(2, 8)).sum()
        if mistake():
            loss.backward()
            optimizer.step()

    return step


def accelerate():
    """The loop of accelerate: a prepared model and loader, and a loss that is gathered."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    batches = torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)

    def step(mistake):
        loss = model(next(iter(batches))).sum()
        accelerator.backward(loss)
        optimizer.step()
        if mistake():
            accelerator.gather(loss.detach())

    return step


def deepspeed():
    """The groups of DeepSpeed's mixture of experts: pairs of experts, and their replicas."""
    import deepspeed
    from deepspeed.utils import groups

    # Gloo does what it would compile, for a minute. As an attribute, deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    groups._create_expert_and_data_parallel(2)

    def step(mistake):
        dist.all_reduce(torch.ones(4), group=groups._get_expert_parallel_group("ep_size_2"))
        if mistake():
            dist.all_reduce(torch.ones(4), group=groups._get_expert_data_parallel_group("ep_size_2"))

    return step


def main():
    """Three steps of a program, in the second of which rank 3 makes its mistake."""
    program, mistake = sys.argv[1:]
    dist.init_process_group("gloo")
    step, rank = globals()[program](), dist.get_rank()

    def makes_it():
        if mistake == "late":
            time.sleep(60)
        elif mistake == "dead":
            os.kill(os.getpid(), signal.SIGSTOP)
        return mistake != "absent"

    for number in range(3):
        step(makes_it if rank == 3 and number == 1 else lambda: True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
