"""Waiting for keys of a store, no longer than was said.

```
0 ───────────── the store wakes this rank ───────────── 30 s before the end ── this rank asks ── end
```

When a wait of torch's ``TCPStore`` is over in vain, it asks DNS for the names of both ends of its connection, to write
them in the log: where DNS does not answer this takes longer than many a limit, and a rank that stands there answers
nobody. So the end of a wait is never left to it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

__all__ = ["come"]

# Longer than a resolver takes that tries two servers twice, for 5 s each.
_LAST = 30.0
# Seconds between two questions: a twentieth of the time that they have been asked for, within these.
_SHARE, _LEAST, _MOST = 20, 0.001, 0.2


def come(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Whether all these keys are in the store within so many seconds; waits until they are."""
    if not _asks_for_names(store):
        return _woken(store, keys, seconds)
    end = time.monotonic() + seconds
    return (seconds > _LAST and _woken(store, keys, seconds - _LAST)) or _asked(store, keys, end)


def _asks_for_names(store: Any) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _woken(store: Any, keys: Sequence[str], seconds: float) -> bool:
    end = time.monotonic() + seconds
    try:
        # A store takes no time at all for no limit.
        store.wait(list(keys), timedelta(seconds=max(seconds, _LEAST)))
    except RuntimeError:
        # Stores count milliseconds, and have no error of their own for a wait that is over.
        if time.monotonic() < end - _LEAST:
            raise
        return False
    return True


def _asked(store: Any, keys: Sequence[str], end: float) -> bool:
    started = time.monotonic()
    while not store.check(list(keys)):
        now = time.monotonic()
        if now >= end:
            return False
        time.sleep(min(max((now - started) / _SHARE, _LEAST), _MOST, end - now))
    return True
