"""A store that counts: each operation is handed on to the store that it was given.

What goes through it one key at a time may go to a TCP store in one batch of keys; the count is of keys asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

__all__ = ["CountingStore"]


class CountingStore(Store):
    """A ``torch.distributed.Store`` around another; ``operations`` says how often it was called."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.operations = 0

    def _count(self, name: str, *given: Any) -> Any:
        self.operations += 1
        return getattr(self._inner, name)(*given)

    def multi_get(self, keys: Any) -> Any:
        """Read keys: each of them counts."""
        self.operations += len(keys) - 1
        return self._count("multi_get", keys)

    def has_extended_api(self) -> bool:
        """Return whether the inner store can read several keys at once."""
        extended: bool = self._inner.has_extended_api()  # type: ignore[attr-defined]  # absent from torch's stubs
        return extended


def _counted(name: str) -> Callable[..., Any]:
    return lambda self, *given: self._count(name, *given)


for _name in ("set", "get", "add", "check", "append", "wait", "compare_set", "delete_key"):
    setattr(CountingStore, _name, _counted(_name))
# By this name torch's own stores around this one call it.
CountingStore.deleteKey = CountingStore.delete_key  # type: ignore[attr-defined]
