"""The stores of a simulated world: dictionaries that let other ranks run where a real store would wait."""

# torch's stubs lack what its Python subclasses override.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from rankmesh.sim.simulation import Simulation

__all__ = ["Keys", "ServedStore", "SimulatedStore", "unreachable"]


class Keys:
    """Keys of a store for which a rank waits."""

    def __init__(self, store: SimulatedStore, keys: Sequence[str], site: object) -> None:
        self.store, self.keys, self.site = store, tuple(keys), site

    @property
    def here(self) -> bool:
        """Return whether all of them are there now."""
        return all(key in self.store.data for key in self.keys)

    def __str__(self) -> str:
        return f"the store's keys {list(self.keys)[:4]} at {self.site}"


class SimulatedStore(dist.Store):  # type: ignore[name-defined, misc]  # absent from torch's stubs
    """The store of all ranks of one simulation; a wait has a limit in simulated time, as in torch 300 s.

    ``data`` are its keys and their values, by default no keys.
    """

    def __init__(self, simulation: Simulation, data: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._simulation = simulation
        self.data = {} if data is None else data

    def _reached(self) -> dict[str, bytes]:
        """Return the keys and their values, for one call."""
        return self.data

    def set(self, key: str, value: str | bytes) -> None:
        self._reached()[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._simulation.stored(key)

    def get(self, key: str) -> bytes:
        """Read a value; wait until it is there."""
        self.wait([key])
        return self._reached()[key]

    def add(self, key: str, amount: int) -> int:
        value = int(self._reached().get(key, b"0")) + amount
        self.set(key, str(value))
        return value

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._reached().get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write where the value is the expected one; an absent key counts as empty. The value then."""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if key not in self._reached() and wanted:
            return wanted
        if self._reached().get(key, b"") == wanted:
            self.set(key, desired)
        return self._reached()[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._reached().pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._reached())

    # How a PrefixStore calls them.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  - torch's names

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; lets the other ranks run first where they are not."""
        return self._has(keys) or (self._simulation.look() and self._has(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; ``DistStoreError`` when they are not within the timeout."""
        limit = self.timeout if timeout is None else timeout
        if not self._has(keys) and not self._simulation.await_keys(self, keys, limit.total_seconds()):
            raise dist.DistStoreError(
                f"wait timeout after {limit.total_seconds() * 1000:g}ms, keys: {', '.join(keys)} (simulated time)"
            )

    def _has(self, keys: Sequence[str]) -> bool:
        data = self._reached()
        return all(key in data for key in keys)


class ServedStore(SimulatedStore):
    """A connection of a rank to the store that another rank serves, which ends with that one, or where it is cut."""

    def __init__(self, simulation: Simulation, server: int, client: int) -> None:
        super().__init__(simulation, simulation.stores.setdefault(server, {}))
        self.server, self._client = server, client
        self._is_cut = False

    @property
    def store(self) -> ServedStore:
        return self

    def cut(self) -> None:
        self._is_cut = True
        scheduler = self._simulation.scheduler
        waiting = scheduler.waiting.get(self._client)
        if waiting is not None and isinstance(waiting.what, Keys) and waiting.what.store is self:
            scheduler.wake(self._client, unreachable(self.server))

    def _reached(self) -> dict[str, bytes]:
        if self._is_cut or self._simulation.stores.get(self.server) is not self.data:
            raise unreachable(self.server)
        return self.data


def unreachable(server: int) -> Exception:
    """Return the error that torch raises for a store that is gone."""
    return dist.DistNetworkError(f"the connection to the store of member {server} was closed")
