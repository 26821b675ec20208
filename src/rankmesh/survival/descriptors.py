"""Descriptors of one thread alone: the kernel closes them as soon as that thread ends, whatever else ends later.

```
killed ── its threads end: these are closed ── its memory is freed ── the descriptors of the process are closed
          0.1 ms                               a second and more      and not before children that it forked have ended
```

A thread that such a thread starts has these descriptors, too, so it starts none.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

__all__ = ["separate"]

# Of close_range(2): in a copy of the table, this thread's from now on. Containers that forbid unshare(2) allow it.
_UNSHARE = 2
_LAST = 2**32 - 1
_STANDARD = 3


def separate(kept: int) -> bool:
    """Give this thread a table of its own, in which ``kept`` is the same as before, and nothing else of the process.

    Whether the system does that: Linux since 5.9, with glibc since 2.34.
    """
    close_range = getattr(ctypes.CDLL(None), "close_range", None)
    if close_range is None or close_range(ctypes.c_uint(kept + 1), ctypes.c_uint(_LAST), _UNSHARE) != 0:
        return False
    os.closerange(0, kept)
    with suppress(OSError):  # no /dev/null
        _fill_standard_streams()
    return True


def _fill_standard_streams() -> None:
    """Have what the interpreter writes there go nowhere, instead of into a socket that gets the number."""
    while (number := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
        pass
    os.close(number)
