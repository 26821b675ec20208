"""One rank of Megatron's ``pretrain_gpt.py``, as it stands: ``python megatron_pretrain.py SIDE OUT ARGUMENTS``.

``SIDE`` is ``own`` or ``drop-ins``: Megatron's modules, or ours under ``install()``. CUDA is stood in for: what is
asked for on a GPU is made on the CPU, and groups are gloo's. ``OUT`` gets the losses and the gradient norm of every
step, as JSON. The environment is torchrun's, and the checkout is the working folder.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import sys
import typing
import warnings
from multiprocessing import spawn
from pathlib import Path
from unittest.mock import MagicMock

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.peers import stand_ins  # noqa: E402
from tests.peers.fetch import MEGATRON, folder  # noqa: E402

stand_ins.triton()
sys.path.insert(0, str(Path.cwd()))  # after our own tests were found: Megatron has a package of that name

from tests.peers.megatron_training import AsOnAGpu, norms_over_parts_of_a_sequence  # noqa: E402

STEPS = []

if not hasattr(typing, "override"):  # Megatron's training loop is written for Python 3.12
    typing.override = lambda function: function


class Device(AsOnAGpu):
    """Besides tensors, moves to a GPU stay on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The call, with another device."""
        args = tuple("cpu" if isinstance(one, str | torch.device) and str(one)[:4] == "cuda" else one for one in args)
        return super().__torch_function__(function, types, args, kwargs)


def without_a_gpu():
    """What Megatron asks of CUDA, answered by the CPU."""
    cpu, cuda = torch.device("cpu"), torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.current_device = lambda: cpu
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: MagicMock(major=8, minor=0, total_memory=1 << 34, name="none")
    stream = MagicMock()
    cuda.current_stream = cuda.Stream = cuda.Event = lambda *_, **__: stream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "set_stream",
        "init",
        "_lazy_init",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
    ):
        setattr(cuda, name, lambda *_: 0)
    cuda.memory_stats = lambda *_: MagicMock(__getitem__=lambda *_: 0)
    cuda.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda *_: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for kind in ("Float", "Int", "Long", "Byte", "Double", "Bool", "Half"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def over_gloo():
    """The world, and whatever else asks for NCCL, is gloo's."""
    local = dist.init_process_group

    def begin(*given, **named):
        named.update(backend="gloo")
        named.pop("device_id", None)
        return local(**named)

    dist.init_process_group = begin


def compiled():
    """The helpers of data sets, which Megatron compiles at its start, from a release that has them compiled."""
    name = "megatron.core.datasets.helpers_cpp"
    (file,) = (folder("megatron-core", MEGATRON[-1]) / "megatron/core/datasets").glob("helpers_cpp*.so")
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None


def bare_children():
    """The processes that write checkpoints are spawned without this program, which stands on another path there."""
    mine = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {
        token: value for token, value in mine(name).items() if not token.startswith("init_main")
    }


def recorded():
    """Every step's losses and gradient norm, as the loop hands them to its log."""
    training = importlib.import_module("megatron.training.training")
    local = training.training_log
    named = inspect.signature(local)

    def log(*given, **options):
        result = named.bind(*given, **options).arguments
        norm = result["grad_norm"]
        STEPS.append(
            [{name: float(loss) for name, loss in result["loss_dict"].items()}, None if norm is None else float(norm)]
        )
        return local(*given, **options)

    training.training_log = log


def main(side, out, arguments):
    """Train, and write what was recorded."""
    without_a_gpu()
    over_gloo()
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    norms_over_parts_of_a_sequence()
    compiled()
    bare_children()
    recorded()
    if side == "drop-ins":
        from rankmesh.dialects.megatron import install

        install()
    sys.argv = ["pretrain_gpt.py", *arguments]
    with Device():
        runpy.run_path("pretrain_gpt.py", run_name="__main__")
    used = importlib.import_module("megatron.training.training").mpu.__name__
    Path(out).write_text(json.dumps({"steps": STEPS, "mpu": used}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
