"""What is queued: calls that a program has handed to its device, and that the device has not come to.

```
handed over    dp 4 (not over)    barrier 1        entered    dp 4
               of another group, so it waits for it           the barrier only when dp 4 is over
```

NCCL's recorder lists a call when it is handed over; torch's streams let it begin when those before it are over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["queued"]


def queued(every: Mapping[str, Any], apart: Any, on_device: Any, batches: Sequence[Any]) -> Any:
    """Whether each call only stands behind the first unfinished one of the device, which its rank has not left.

    A program hands its calls to the device and goes on; there each waits for the one before, whatever its group. A
    communicator takes its own collectives in order, so that those of the same group are compared by their numbers.
    """
    waiting = np.flatnonzero(every["pending"] & on_device)
    behind = np.zeros(len(on_device), dtype=bool)
    if len(waiting) < 2:
        return behind
    first = waiting[0]
    same = every["group"][waiting] == every["group"][first]
    if apart[first]:  # of what is exchanged, only what was made as one with it
        batch = np.array([batches[row] == batches[first] for row in waiting.tolist()], dtype=bool)
        same &= apart[waiting] & batch & (every["number"][waiting] == every["number"][first])
    behind[waiting] = ~same
    return behind
