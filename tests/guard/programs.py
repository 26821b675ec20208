"""Programs that were not written for rankmesh, for the switch; FAULT="rank:step:parameter" flips a bit from outside."""

import os
import sys
import time
from pathlib import Path

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


def accumulated(steps, rank):
    """Gradients of two batches, a scaler that skips steps, torch.compile, an optimizer made again, a state loaded."""
    model = DistributedDataParallel(torch.compile(net(), backend="eager"))
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    for number in range(steps):
        if number == steps // 2:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        if number == steps // 4:
            model.load_state_dict({name: 0.9 * one for name, one in model.state_dict().items()})
            optimizer.load_state_dict(optimizer.state_dict())
        for half in range(2):
            scaler.scale(model(batch(2 * number + half, rank)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(SECONDS)


def gan(steps, rank):
    """Two optimizers, of which one makes five steps for one of the other; a copy that is averaged; frozen weights."""
    one, other = DistributedDataParallel(net()), DistributedDataParallel(net())
    frozen = [parameter.requires_grad_(False) for parameter in torch.nn.Linear(9, 9).parameters()]
    average = torch.optim.swa_utils.AveragedModel(one.module, avg_fn=lambda a, b, _: 0.9 * a + 0.1 * b * (1 + rank))
    first, second = torch.optim.SGD(one.parameters(), 1e-3, 0.9), torch.optim.Adam([*other.parameters(), *frozen])
    for _ in range(steps):
        loop(one, first, 5, rank)
        loop(other, second, 1, rank)
        average.update_parameters(one.module)


def local_sgd(steps, rank):
    """Weights that are averaged every ten steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9)
    for _ in range(steps // 10):
        loop(model, optimizer, 10, rank)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def sharded(steps, rank, *sizes):
    """FSDP2, or HSDP with two sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(sizes or (1,)) :]
    model = fully_shard(net(), mesh=init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names))
    loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps, rank)


def hybrid(steps, rank):
    """HSDP: two replicas, each sharded."""
    sharded(steps, rank, 2, dist.get_world_size() // 2)


def accelerated(steps, rank):
    """An unmodified loop of accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := net(), torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(batch(number, rank)).square().mean())
        optimizer.step()
        time.sleep(SECONDS)


def zero(steps, rank):
    """DeepSpeed's ZeRO 1."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=net(), config=config, dist_init_required=False)
    for number in range(steps):
        engine.backward(engine(batch(number, rank)).square().mean())
        engine.step()
        time.sleep(SECONDS)


class Rows(torch.utils.data.Dataset):
    """Data of a Trainer; the last batch of an epoch is a short one."""

    def __len__(self):
        return 77

    def __getitem__(self, number):
        return {"input_ids": torch.arange(8) + number, "labels": torch.arange(8) + number}


def trained(steps, rank):
    """A GPT-2 of transformers under its Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Slow(TrainerCallback):
        def on_step_end(self, *_, **__):
            time.sleep(SECONDS)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    arguments = {"max_steps": steps, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
    arguments |= {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "ddp_backend": "gloo"}
    Trainer(model, TrainingArguments("out", **arguments), train_dataset=Rows(), callbacks=[Slow()]).train()


def lit(steps, rank):
    """Lightning with DDP."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, rows, number):
            time.sleep(SECONDS)
            return self.net(rows["input_ids"].float().repeat(1, 2)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    loader, size = torch.utils.data.DataLoader(Rows(), 4), dist.get_world_size()
    options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False, "max_steps": steps}
    lightning.Trainer(accelerator="cpu", devices=size, strategy="ddp", **options).fit(Module(), loader)


def megatron(steps, rank, distributed=False):
    """Megatron-Core's GPT on tp=2, with its own optimizer, distributed or not."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.peers import megatron_training as training

    training.without_a_gpu()
    training.STEPS = steps
    register_optimizer_step_post_hook(lambda *_: time.sleep(SECONDS))
    training.train(training.megatron("parallel_state"), {"tensor_model_parallel_size": 2}, sharded=distributed)


def megatron_distributed(steps, rank):
    """The same with the distributed optimizer."""
    megatron(steps, rank, distributed=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    inject()
    globals()[sys.argv[1]](int(sys.argv[2]), dist.get_rank())
    dist.destroy_process_group()
