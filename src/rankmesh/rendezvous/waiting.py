"""Waiting for keys of a torch store, no longer than was said.

```
0 ───────────── the store wakes this rank ───────────── 30 s before the end ── this rank asks ── end
```

When a wait of torch's ``TCPStore`` ends in vain, it asks DNS for the names of both ends of its connection, to write
them in the log. Where DNS does not answer this takes longer than many a limit, and a rank that stands there answers no
probe. So the end of a wait is never left to it. A ``FileStore`` looks once a second, so a rank asks it all the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

__all__ = ["come", "underlying"]

# Longer than a resolver takes that tries two servers twice, for 5 s each.
_LAST = 30.0
# Seconds between two questions: a twentieth of the time that they have been asked for, within these.
_SHARE, _LEAST, _MOST = 20, 0.001, 0.2


def come(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Whether all these keys are in the store within so many seconds; waits until they are."""
    end, asked = time.monotonic() + seconds, _asked_for(underlying(store), seconds)
    if asked < seconds:
        there = _woken(store, keys, seconds - asked)
        if there or not asked:
            return there
    return _asked(store, keys, end)


def underlying(store: Any) -> Any:
    """The store in which those that only add a prefix keep their keys."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _asked_for(store: Any, seconds: float) -> float:
    """How much of a wait is spent asking instead of waiting to be woken."""
    if isinstance(store, FileStore):
        return seconds
    return min(seconds, _LAST) if isinstance(store, TCPStore) else 0.0


def _woken(store: Any, keys: Sequence[str], seconds: float) -> bool:
    try:
        # A store takes no time at all for no limit.
        store.wait(list(keys), timedelta(seconds=max(seconds, _LEAST)))
    except RuntimeError:
        # Each kind of store has an error of its own for the end of the time; one that has failed fails again here.
        return bool(store.check(list(keys)))
    return True


def _asked(store: Any, keys: Sequence[str], end: float) -> bool:
    started = time.monotonic()
    while not store.check(list(keys)):
        now = time.monotonic()
        if now >= end:
            return False
        time.sleep(min(max((now - started) / _SHARE, _LEAST), _MOST, end - now))
    return True
