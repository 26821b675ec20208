"""Stand-ins for what Megatron imports and these tests never call: triton, a gigabyte of it; and for the GPU."""

import importlib.util
import sys
from types import ModuleType

import torch
import torch._inductor.runtime.triton_compat  # where torch looks for triton itself

_NAMES = ("triton", "triton.language")


class _Anything(ModuleType):
    """A module, decorator or value: whatever is asked of it while kernels are defined."""

    __path__ = ()
    __version__ = "0"

    def __call__(self, *given, **_):
        """A decorator gives back what it decorates."""
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class OnCpu(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on the GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The call, with another device."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def triton():
    """Let ``import triton`` succeed for Megatron's modules, after torch has found out that there is none."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        for name in _NAMES:
            sys.modules[name] = _Anything(name)


def no_triton():
    """End that, for whoever asks from now on whether triton is there."""
    for name in _NAMES:
        if isinstance(sys.modules.get(name), _Anything):
            del sys.modules[name]
