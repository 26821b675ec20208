"""What a wait that ran out is told besides: the verdict of this rank's watch, where there is one.

```
connect, warm_up ──timeout──> ask the watch ──> "...; by the recordings: late: rank 3 behind by 1 call of dp@tp1 ..."
```

The watch lives above the groups, and says here how it is asked while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankmesh.errors import AgreementError, ConnectError

__all__ = ["asked_of", "with_verdict"]

# The watches of this process, the last one first asked: each gives a verdict, or None.
asked_of: list[Callable[[str], str | None]] = []


@contextmanager
def with_verdict(what: str) -> Iterator[None]:
    """Errors inside that name ranks which did not come end with the verdict of the watch."""
    try:
        yield
    except (AgreementError, ConnectError) as error:
        if not asked_of or not (error.values.get("missing") or error.values.get("late")):
            raise
        verdict = asked_of[-1](f"{what} waited too long")
        if verdict is None:
            raise
        raise type(error)(f"{error.message}; by the recordings: {verdict}", **error.values) from error
