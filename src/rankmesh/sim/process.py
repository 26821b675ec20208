"""What a process would have for itself, and the ranks of a simulation share: saved and put back when the baton moves.

```
random numbers    torch (and its devices, once used), random, numpy     each rank draws its own
environment       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ...   each rank reads its own
modules           the globals of chosen modules                         each rank sets its own
```

Only one rank runs at a time, so state of the whole process can belong to the rank that runs. Modules that keep a rank's
state in globals, as Megatron-Core's ``parallel_state`` does, work when they are named.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import os
import random
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from rankmesh.launch.table import torchrun_variables

__all__ = ["KNOWN_MODULES", "Environment", "Globals", "NumpyNumbers", "Part", "Process", "RandomNumbers", "holders_of"]

# Modules known to keep what belongs to one rank in their globals; taken along where they are loaded.
KNOWN_MODULES = (
    "fairscale.nn.model_parallel.initialize",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.training.global_vars",
    "torch.distributed.tensor._random",
)
_KNOWN_PACKAGES = ("rankmesh.dialects.",)

# Words of the key of a Mersenne twister; its position follows.
_KEY = 624


class Part(Protocol):
    """One kind of state of the process."""

    def fresh(self, rank: int) -> Any:
        """The state with which a rank starts."""

    def swap(self, state: Any | None) -> Any:
        """Put a state in place; the one that was there. None leaves it there."""


class Process:
    """The state of the process, of which each rank has its own; outside the ranks it is as it was before."""

    def __init__(self, parts: Iterable[Part], ranks: int) -> None:
        self._parts = tuple(parts)
        self._outside = [part.swap(None) for part in self._parts]
        self._states = {rank: [part.fresh(rank) for part in self._parts] for rank in range(ranks)}

    def switch(self, before: int | None, after: int | None) -> None:
        """Keep the state of one rank, and put that of another in place; None is outside."""
        state = self._outside if after is None else self._states[after]
        left = [part.swap(own) for part, own in zip(self._parts, state, strict=True)]
        if before is not None:
            self._states[before] = left


class RandomNumbers:
    """The global generators of torch and random.

    torch starts with ``seed`` on every rank, as new processes start with one seed; random and numpy, which new
    processes seed from the system, start differently on each rank.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fresh(self, rank: int) -> Any:
        """The state with which a rank starts."""
        generator = torch.Generator().manual_seed(self._seed)
        return generator.get_state(), None, random.Random(_own_seed(self._seed, rank)).getstate()  # noqa: S311

    def swap(self, state: Any | None) -> Any:
        """Put a state in place; the one that was there."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        left = torch.get_rng_state(), devices, random.getstate()
        if state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state_all(state[1])
            elif devices is not None:
                torch.cuda.manual_seed_all(self._seed)
            random.setstate(state[2])
        return left


def _own_seed(seed: int, rank: int) -> int:
    return (seed + 1_000_003 * (rank + 1)) % 2**32


class NumpyNumbers:
    """numpy's global generator: each rank has its own engine, which is exchanged as a whole.

    Reading the state of an engine takes longer than all else here, so that is done for one that was used, whose spare
    normal number must be kept: numpy draws them in pairs, and forgets the second when the engine changes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._marks: tuple[int, int] | None = None

    def fresh(self, rank: int) -> Any:
        """The state with which a rank starts."""
        return np.random.MT19937(np.random.SeedSequence(_own_seed(self._seed, rank))), None

    def swap(self, state: Any | None) -> Any:
        """Put a state in place; the one that was there."""
        engine = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs do not export it
        used = self._marks is None or _marks(engine) != self._marks
        left = engine, np.random.get_state(legacy=False) if used else None
        if state is not None:
            np.random.set_bit_generator(state[0])  # type: ignore[attr-defined]  # the same
            if state[1] is not None:
                np.random.set_state(state[1])
            self._marks = None if state[1] is not None else _marks(state[0])
        return left


def _marks(engine: Any) -> tuple[int, int] | None:
    """Where an engine is, read from its memory: the first word of its key, and its position; None for other kinds."""
    if not isinstance(engine, np.random.MT19937):
        return None
    words = ctypes.cast(engine.ctypes.state_address, ctypes.POINTER(ctypes.c_uint32))
    return words[0], words[_KEY]


class Environment:
    """The variables by which a launcher tells a rank who it is; what else ranks set is taken back at the end."""

    def __init__(self, world_size: int, ranks_per_node: int) -> None:
        self._world_size, self._ranks_per_node = world_size, ranks_per_node
        self._before = _environment()

    def fresh(self, rank: int) -> dict[bytes, bytes]:
        """The state with which a rank starts."""
        node, local = divmod(rank, self._ranks_per_node)
        here = min(self._ranks_per_node, self._world_size - node * self._ranks_per_node)
        place = {"local_rank": local, "local_world_size": here, "node": node}
        values = torchrun_variables(rank, self._world_size, **place, address="simulated", port=1)
        return {**self._before, **{os.fsencode(name): os.fsencode(value) for name, value in values.items()}}

    def swap(self, state: Mapping[bytes, bytes] | None) -> dict[bytes, bytes]:
        """Put a state in place; the one that was there."""
        left = _environment()
        if state is not None and state != left:
            for name in left.keys() - state.keys():
                del os.environ[os.fsdecode(name)]
            for name, value in state.items() - left.items():
                os.environ[os.fsdecode(name)] = os.fsdecode(value)
        return left


def _environment() -> dict[bytes, bytes]:
    """The environment as the system has it; reading it through os.environ would decode it each time."""
    raw: dict[bytes, bytes] = vars(os.environ)["_data"]
    return dict(raw)


class Globals:
    """The globals of one module, or the attributes of one object; containers are copied for each rank."""

    def __init__(self, holder: object) -> None:
        self._names = vars(holder)
        self._base = dict(self._names)

    def fresh(self, rank: int) -> dict[str, Any]:
        """The state with which a rank starts."""
        return {
            name: _copied(value) if type(value) in (list, dict, set) and not name.startswith("__") else value
            for name, value in self._base.items()
        }

    def swap(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Put a state in place; the one that was there."""
        left = dict(self._names)
        if state is not None:
            for name in left.keys() - state.keys():
                del self._names[name]
            self._names.update(state)
        return left


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  - whatever the values are that cannot be copied
        return copy.copy(value)


def holders_of(names: Iterable[str | ModuleType]) -> list[object]:
    """What holds the state of a rank: the named modules, the known ones that are loaded, and their own objects.

    A module's own objects are instances in its globals whose class belongs to the same package, such as a tracker of
    random states, and what they hold in turn. A name that is no loaded module is imported.
    """
    chosen = [importlib.import_module(name) if isinstance(name, str) else name for name in names]
    known = [name for name in sys.modules if name in KNOWN_MODULES or name.startswith(_KNOWN_PACKAGES)]
    modules = [*chosen, *(sys.modules[name] for name in sorted(known))]
    found: dict[int, object] = {id(module): module for module in modules}
    for module in modules:
        package = module.__name__.partition(".")[0]
        if package != "torch":
            _add_own(found, module, package)
    return list(found.values())


def _add_own(found: dict[int, object], holder: object, package: str) -> None:
    for value in list(vars(holder).values()):
        has_state = isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, ModuleType)
        if has_state and type(value).__module__.partition(".")[0] == package and id(value) not in found:
            found[id(value)] = value
            _add_own(found, value, package)
