"""Programs that were not written for rankmesh, for the switch; FAULT="rank:step:parameter" flips a bit from outside."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

SECONDS = 0.03


def inject():
    """Flip bit 20 of element 5 of a parameter, or a state, after a step of the first optimizer, on one rank."""
    if not (fault := os.environ.get("FAULT")) or fault.split(":")[0] != os.environ["RANK"]:
        return
    _, when, number, *key = fault.split(":")
    steps = []

    def flip(optimizer, _args, _options):
        steps.append(0)
        if len(steps) == int(when):
            parameter = optimizer.param_groups[0]["params"][int(number)]
            tensor = optimizer.state[parameter][key[0]] if key else parameter
            tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
            words = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
            words[5] ^= 1 << 10

    register_optimizer_step_post_hook(flip)


def net():
    """Twelve tensors, dropout and BatchNorm among them."""
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.ReLU()]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1))


def batch(step, rank):
    """Another one for each step and rank."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loop(model, optimizer, steps, rank, step=lambda optimizer: optimizer.step()):
    """Train for some steps."""
    for number in range(steps):
        optimizer.zero_grad()
        model(batch(number, rank)).square().mean().backward()
        step(optimizer)
        time.sleep(SECONDS)


def plain(steps, rank):
    """DistributedDataParallel with Adam."""
    model = DistributedDataParallel(net())
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps, rank)


def separate(steps, rank):
    """Nobody reduces gradients."""
    model = net()
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    inject()
    globals()[sys.argv[1]](int(sys.argv[2]), dist.get_rank())
    dist.destroy_process_group()
