"""Say: every rank says a text, one of them concludes, all hear it; nothing stays in the store.

```
every rank    its text ──append──> one key              the last to come reads all, concludes, writes what it found
              waits, reads, counts itself out           the last to leave deletes the keys
```

Five store operations a rank, two more for the last to come, four for the last to leave, whatever the size of the world.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rankmesh.errors import ConnectError
from rankmesh.rendezvous.store import answering
from rankmesh.rendezvous.waiting import come

__all__ = ["say"]


def say(
    store: Any,
    meeting: str,
    rank: int,
    size: int,
    text: object,
    conclude: Callable[[list[Any]], object],
    limit: timedelta,
    what: str,
) -> Any:
    """What ``conclude`` makes of what all ``size`` ranks said, as JSON data, on each of them.

    Raises ``ConnectError`` when they do not come within the limit; ``what`` is what they came for, in words.
    """
    with answering(rank):
        store.append(f"{meeting}/said", json.dumps(text) + "\n")
        if store.add(f"{meeting}/came", 1) == size:
            said = [json.loads(line) for line in store.get(f"{meeting}/said").decode().splitlines()]
            store.set(f"{meeting}/found", json.dumps(conclude(said)))
        if not come(store, [f"{meeting}/found"], limit.total_seconds()):
            came = store.add(f"{meeting}/came", 0)
            raise ConnectError(
                f"rank {rank}: {came} of {size} ranks came to {what} within {limit.total_seconds():g} s; "
                "every rank calls it; look for the ones that do not",
                rank=rank,
            )
        found = json.loads(store.get(f"{meeting}/found"))
        if store.add(f"{meeting}/left", 1) == size:
            for key in ("said", "came", "found", "left"):
                store.delete_key(f"{meeting}/{key}")
    return found
