"""Observe: the tensors that a program trains, by the framework's names, without a change of the program.

```
modules        torch's hooks for the registration of modules and parameters: where each is, from its making on
optimizers     torch's hook before a step of any optimizer: then all ranks are through with the step before
```

What an optimizer holds, its states too, and other parameters of modules that require a gradient: what DeepSpeed and
Megatron train is a copy of some of those in an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from rankmesh.transfer.live.shards import local

__all__ = ["Program", "Steps"]

# What wraps a module holds it under these names.
_WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Steps of other optimizers without one of the first, after which another one is the first.
_OTHERS = 8


class Program:
    """The modules and optimizers of this process, from now on."""

    def __init__(self) -> None:
        self._modules: WeakSet[torch.nn.Module] = WeakSet()
        self._parents: WeakKeyDictionary[torch.nn.Module, tuple[ReferenceType[torch.nn.Module], str]] = (
            WeakKeyDictionary()
        )
        # Optimizers by number, those that stepped last at the end; and names of parameters that no module has.
        self._optimizers: dict[int, ReferenceType[torch.optim.Optimizer]] = {}
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._unnamed: dict[int, tuple[ReferenceType[Tensor], str]] = {}
        register_module_module_registration_hook(self._submodule)
        register_module_parameter_registration_hook(self._parameter)

    def _submodule(self, module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        with suppress(TypeError):  # a module that has no hash
            self._modules.add(module)
            if submodule is not None:
                self._modules.add(submodule)
                self._parents[submodule] = ref(module), name

    def _parameter(self, module: torch.nn.Module, _name: str, _parameter: Tensor | None) -> None:
        with suppress(TypeError):
            self._modules.add(module)

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer, in the order of first steps."""
        number = self._numbers.setdefault(optimizer, len(self._optimizers))
        self._optimizers.pop(number, None)
        self._optimizers[number] = ref(optimizer)
        return number

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that are there now by name, local ones of DTensors; and the parameter of each state."""
        names = self._names()
        found, owners = dict[str, Tensor](), dict[str, str]()
        for number, reference in self._optimizers.items():
            if (optimizer := reference()) is None:
                continue
            for place, parameter in enumerate(_parameters(optimizer)):
                name = names.get(id(parameter)) or self._unnamed_name(
                    parameter, f"optimizer {number} parameter {place}"
                )
                names[id(parameter)] = name
                found[name] = parameter
                for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda pair: str(pair[0])):
                    if isinstance(value, Tensor) and value.numel() > 1:
                        found[f"{name}.{key}"], owners[f"{name}.{key}"] = value, name
        for module in list(self._modules):
            for _, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    found.setdefault(names[id(parameter)], parameter)
        usable = {name: one for name, tensor in found.items() if (one := _plain(tensor)) is not None}
        return usable, {state: name for state, name in owners.items() if state in usable}

    def _names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for module in list(self._modules):
            path = self._path(module)
            for key, parameter in module.named_parameters(recurse=False):
                name = ".".join([*path, key])
                found[id(parameter)] = min(name, found.get(id(parameter), name))
        return found

    def _path(self, module: torch.nn.Module) -> list[str]:
        path: list[str] = []
        seen = {id(module)}
        while (parent := self._parents.get(module)) is not None:
            above = parent[0]()
            if above is None or id(above) in seen:
                break
            path += [] if parent[1] in _WRAPPERS else [parent[1]]
            seen.add(id(above))
            module = above
        return path[::-1]

    def _unnamed_name(self, parameter: Tensor, name: str) -> str:
        kept = self._unnamed.get(id(parameter))
        if kept is None or kept[0]() is not parameter:
            kept = self._unnamed[id(parameter)] = ref(parameter), name
        return kept[1]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in the groups and in the state: DeepSpeed makes a step with one of its groups alone."""
    seen = set()
    for parameter in (*(one for group in optimizer.param_groups for one in group["params"]), *optimizer.state):
        if isinstance(parameter, Tensor) and id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def _plain(tensor: Tensor) -> Tensor | None:
    """Return a tensor whose memory can be read, None for any other: empty, on meta, freed, sparse, quantized."""
    found = local(tensor)
    kind = type(found)
    if kind is not Tensor or found.layout != torch.strided or found.device.type == "meta" or not found.numel():
        return None
    last = sum(stride * (size - 1) for stride, size in zip(found.stride(), found.shape, strict=True)) + 1
    end = (found.storage_offset() + last) * found.element_size()
    return found if found.untyped_storage().nbytes() >= end else None


class Steps:
    """The number of steps that the first optimizer has done, counted in the same way on every rank.

    An optimizer that steps with several sets of groups counts as several. If others make eight steps without the first,
    because it was made again, the one that steps is the first from then on.
    """

    def __init__(self) -> None:
        self.done = -1
        self._first: Any = None
        self._others = 0

    def begin(self, which: object) -> bool:
        """Return whether this is a step of the first optimizer; ``done`` are those before it."""
        if self._first is None or (which != self._first and self._others >= _OTHERS):
            self._first = which
        is_first = bool(which == self._first)
        self._others = 0 if is_first else self._others + 1
        self.done += is_first
        return is_first
