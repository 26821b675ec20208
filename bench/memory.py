"""Memory that a stretch of work takes at most: the highest resident size of this process, less that before it.

```
resident()  │ work │  highest()         highest() - resident() = the peak of the work
trim, reset ┘      └ VmHWM
```

An allocator keeps what was freed, and new buffers in kept memory do not show; so it gives it back first.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["highest", "resident"]


def resident() -> int:
    """Give back freed memory and return the resident bytes; the highest begins here (Linux, glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def highest() -> int:
    """Return the most resident bytes since `resident` was called."""
    return _status("VmHWM")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) * 1024
