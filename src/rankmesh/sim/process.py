"""State of the process that each rank needs for itself: exchanged when another rank runs.

```
random numbers    torch (and its devices, once used), random, numpy     each rank draws its own
environment       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ...   each rank reads its own
modules           the globals of dialects and of chosen modules         each rank sets its own
```

Only one rank runs at a time, so state of the whole process can belong to the rank that runs. Modules that keep a rank's
state in globals, as Megatron-Core's ``parallel_state`` does, work when they are named; a rank finds them as a new
process would, also those that another rank was the first to import.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rankmesh.launch.table import torchrun_variables
from rankmesh.runtime.registry import rank_states

__all__ = ["Environment", "Modules", "NumpyNumbers", "PerRank", "Process", "RandomNumbers"]

# Modules known to keep what belongs to one rank in their globals.
_KNOWN_MODULES = frozenset(
    {
        "deepspeed.runtime.pipe.module",
        "fairscale.nn.model_parallel.initialize",
        "megatron.core.num_microbatches_calculator",
        "megatron.core.parallel_state",
        "megatron.core.tensor_parallel.random",
        "megatron.training.global_vars",
        "torch.distributed.tensor._random",
    }
)
_KNOWN_PACKAGES = ("rankmesh.dialects.",)

# Words of the key of a Mersenne twister; its position follows.
_KEY = 624

State = TypeVar("State")
Names = dict[str, object]


class PerRank(Generic[State]):
    """One kind of state of the process; each rank has its own, and outside the ranks it is as it was before."""

    def __init__(self) -> None:
        self._kept: dict[int, State] = {}
        self._outside = self.read()

    def fresh(self, rank: int) -> State:
        """Return the state with which a rank starts."""
        raise NotImplementedError

    def read(self) -> State:
        """Return the state that is in place."""
        raise NotImplementedError

    def write(self, state: State) -> None:
        """Put a state in place."""
        raise NotImplementedError

    def switch(self, before: int | None, after: int | None) -> None:
        """Keep the state of one rank, and put another rank's in place; None is outside."""
        if before is not None:
            self._kept[before] = self.read()
        if after is None:
            self.write(self._outside)
        else:
            self.write(self._kept.pop(after) if after in self._kept else self.fresh(after))


class Process:
    """All state of the process that is each rank's own."""

    def __init__(self, world_size: int, seed: int, ranks_per_node: int, modules: Iterable[str | ModuleType]) -> None:
        self._modules = Modules(modules)
        self._parts: Sequence[PerRank[Any]] = (
            RandomNumbers(seed),
            NumpyNumbers(seed),
            Environment(world_size, ranks_per_node),
            self._modules,
        )

    def switch(self, before: int | None, after: int | None) -> None:
        """Keep the state of one rank, and put another rank's in place; None is outside."""
        for part in self._parts:
            part.switch(before, after)

    @contextmanager
    def adopting_imports(self) -> Iterator[None]:
        """Let a known module that a rank is the first to import be each rank's own, too."""
        finder = _Finder(self._modules.adopt)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def _rank_seed(seed: int, rank: int) -> int:
    return (seed + 1_000_003 * (rank + 1)) % 2**32


# The states of torch on the processor, on its GPUs, and of random; numpy's engine, and its state where it was used.
_Numbers = tuple[torch.Tensor, list[torch.Tensor] | None, tuple[Any, ...]]
_OfNumpy = tuple[np.random.BitGenerator, dict[str, Any] | None]


class RandomNumbers(PerRank[_Numbers]):
    """The global generators of torch and random.

    torch starts with ``seed`` on every rank, as new processes start with one seed; random and numpy, which new
    processes seed from the system, start differently on each rank.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def fresh(self, rank: int) -> _Numbers:
        generator = torch.Generator().manual_seed(self._seed)
        return generator.get_state(), None, random.Random(_rank_seed(self._seed, rank)).getstate()  # noqa: S311

    def read(self) -> _Numbers:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return torch.get_rng_state(), devices, random.getstate()

    def write(self, state: _Numbers) -> None:
        host, devices, python = state
        torch.set_rng_state(host)
        random.setstate(python)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        elif torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(self._seed)


class NumpyNumbers(PerRank[_OfNumpy]):
    """numpy's global generator: each rank has its own engine, which is exchanged as a whole.

    Reading and writing the state of an engine takes 0.13 ms, as much as all else at a switch, so that is done for one
    that was used, whose spare normal number must be kept: numpy draws them in pairs, and forgets the second when the
    engine changes.
    """

    def __init__(self, seed: int) -> None:
        self._unused: tuple[int, int] | None = None
        super().__init__()
        self._seed = seed

    def fresh(self, rank: int) -> _OfNumpy:
        return np.random.MT19937(np.random.SeedSequence(_rank_seed(self._seed, rank))), None

    def read(self) -> _OfNumpy:
        engine = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs do not export it
        used = self._unused is None or _place(engine) != self._unused
        return engine, dict(np.random.get_state(legacy=False)) if used else None

    def write(self, state: _OfNumpy) -> None:
        engine, numbers = state
        np.random.set_bit_generator(engine)  # type: ignore[attr-defined]  # the same
        if numbers is not None:
            np.random.set_state(numbers)
        self._unused = _place(engine) if numbers is None else None


def _place(engine: np.random.BitGenerator) -> tuple[int, int] | None:
    """Return the first word of an engine's key and its position, read from its memory; None for other kinds."""
    if not isinstance(engine, np.random.MT19937):
        return None
    words = (ctypes.c_uint32 * (_KEY + 1)).from_address(engine.ctypes.state_address)
    return words[0], words[_KEY]


class Environment(PerRank["dict[bytes, bytes]"]):
    """The variables by which a launcher identifies a rank; what else ranks set is taken back at the end."""

    def __init__(self, world_size: int, ranks_per_node: int) -> None:
        super().__init__()
        self._world_size, self._ranks_per_node = world_size, ranks_per_node

    def fresh(self, rank: int) -> dict[bytes, bytes]:
        node, local = divmod(rank, self._ranks_per_node)
        here = min(self._ranks_per_node, self._world_size - node * self._ranks_per_node)
        place = {"local_rank": local, "local_world_size": here, "node": node}
        values = torchrun_variables(rank, self._world_size, **place, address="simulated", port=1)
        return {**self._outside, **{os.fsencode(name): os.fsencode(value) for name, value in values.items()}}

    def read(self) -> dict[bytes, bytes]:
        """Return the environment as the system has it; reading it through os.environ would decode it each time."""
        return dict(vars(os.environ)["_data"])

    def write(self, state: Mapping[bytes, bytes]) -> None:
        here = self.read()
        if state != here:
            for name in here.keys() - state.keys():
                del os.environ[os.fsdecode(name)]
            for name, value in state.items() - here.items():
                os.environ[os.fsdecode(name)] = os.fsdecode(value)


class Modules(PerRank["list[Names]"]):
    """The globals of modules, and the attributes of the objects in them; a rank starts with copies of containers.

    The modules are the named ones, which are imported, and the known ones as soon as they are there. Their own objects
    count, too: those in their globals whose class belongs to the same package, such as a tracker of random states, and
    what these hold in turn; and every object that is ``registry.RankState``, wherever a program keeps it.
    """

    def __init__(self, chosen: Iterable[str | ModuleType]) -> None:
        self._holders: dict[int, object] = {}
        self._starts: list[Names] = []
        named = [importlib.import_module(name) if isinstance(name, str) else name for name in chosen]
        for holder in [*named, *(sys.modules[name] for name in sorted(sys.modules) if _is_known(name)), *rank_states()]:
            self._add(holder)
        self._starts = self.read()
        super().__init__()

    def _add(self, holder: object) -> None:
        if id(holder) in self._holders:
            return
        self._holders[id(holder)] = holder
        kind = type(holder)
        package = (vars(holder)["__name__"] if kind is ModuleType else kind.__module__).partition(".")[0]
        if package != "torch":
            values = [value for name, value in vars(holder).items() if not name.startswith("__")]
            for value in _listed(values, set()):
                if _may_change(value, package):
                    self._add(value)

    def adopt(self, module: ModuleType) -> None:
        """Adopt a module that the running rank has imported; the others find it as it is now."""
        self._add(module)
        self._starts += self._copies(self.read()[len(self._starts) :])

    def fresh(self, rank: int) -> list[Names]:
        return self._copies(self._starts)

    def _copies(self, state: Sequence[Names]) -> list[Names]:
        """Copy the containers among the values: two names of one container share its copy."""
        copies: dict[int, object] = dict(self._holders)
        return [{name: _copied(name, value, copies) for name, value in names.items()} for names in state]

    def read(self) -> list[Names]:
        return [dict(vars(holder)) for holder in self._holders.values()]

    def write(self, state: list[Names]) -> None:
        """Put a state in place; what was adopted since it was kept is as it was imported."""
        late = self._copies(self._starts[len(state) :]) if len(state) < len(self._starts) else []
        for holder, values in zip(self._holders.values(), [*state, *late], strict=True):
            names = vars(holder)
            if names.keys() != values.keys():
                for name in names.keys() - values.keys():
                    del names[name]
            names.update(values)


def _is_known(module: str) -> bool:
    return module in _KNOWN_MODULES or module.startswith(_KNOWN_PACKAGES)


def _listed(values: Iterable[object], seen: set[int]) -> Iterator[object]:
    """Yield the values, and those in containers among them."""
    for value in list(values):
        if isinstance(value, dict | list | set):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _listed(value.values() if isinstance(value, dict) else value, seen)
        else:
            yield value


def _may_change(value: object, package: str) -> bool:
    """Return whether a value is an object of a package with attributes that may change."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != package or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    frozen = getattr(kind, "__dataclass_params__", None)
    return not isinstance(value, type) and (frozen is None or not frozen.frozen)


def _copied(name: str, value: object, copies: dict[int, object]) -> object:
    if type(value) not in (list, dict, set) or name.startswith("__"):
        return value
    known = len(copies)
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # noqa: BLE001  - whatever the values are that cannot be copied
        for half_made in list(copies)[known:]:
            del copies[half_made]
        copies[id(value)] = copy.copy(value)
        return copies[id(value)]


class _Finder(MetaPathFinder):
    """Finds known modules as the other finders do, and reports each that has been imported."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _is_known(fullname):
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    self._report(spec.loader)
                    return spec
        return None

    def _report(self, loader: Any) -> None:
        """Have a loader report the module that it executes next."""

        def executed(module: ModuleType) -> None:
            del loader.exec_module  # the one of its class is called from here on
            loader.exec_module(module)
            self._imported(module)

        loader.exec_module = executed
