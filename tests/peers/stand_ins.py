"""Stand-ins for what Megatron imports and these tests never call: triton, a gigabyte of it."""

import importlib.util
import sys
from types import ModuleType

import torch._inductor.runtime.triton_compat  # noqa: F401  - where torch looks for triton itself

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
