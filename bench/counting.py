"""A store that counts: each operation is handed on to the store that it was given.

What goes through it one key at a time may go to a TCP store in one batch of keys; the count is of keys asked for.
"""

from __future__ import annotations

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

    def set(self, *given: Any) -> Any:
        """Set a key."""
        return self._count("set", *given)

    def get(self, *given: Any) -> Any:
        """Wait for a key, and read it."""
        return self._count("get", *given)

    def add(self, *given: Any) -> Any:
        """Add to a counter."""
        return self._count("add", *given)

    def check(self, *given: Any) -> Any:
        """Ask whether keys are there."""
        return self._count("check", *given)

    def append(self, *given: Any) -> Any:
        """Write at the end of a value."""
        return self._count("append", *given)

    def multi_get(self, keys: Any) -> Any:
        """Read keys: each of them counts."""
        self.operations += len(keys) - 1
        return self._count("multi_get", keys)

    def has_extended_api(self) -> bool:
        """Whether it can read several keys at once: as the store around which it is."""
        extended: bool = self._inner.has_extended_api()  # type: ignore[attr-defined]  # absent from torch's stubs
        return extended

    def wait(self, *given: Any) -> Any:
        """Wait for keys."""
        return self._count("wait", *given)

    def compare_set(self, *given: Any) -> Any:
        """Set a key if it has a value."""
        return self._count("compare_set", *given)

    def delete_key(self, *given: Any) -> Any:
        """Delete a key."""
        return self._count("delete_key", *given)

    # By this name torch's own stores around this one call it.
    deleteKey = delete_key  # noqa: N815
