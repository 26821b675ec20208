"""Sites: the line of a call, which is the innermost outside torch, rankmesh and the standard library.

```
distributed_c10d.py:3245 in all_reduce
c10d_logger.py:83 in wrapper
train.py:31 in step                      <- the site; none where all are torch's
train.py:12 in main
```

A frame is looked at once: torch's pickles hold each of them once, however many calls have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

__all__ = ["Sites", "is_library"]

_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages|src)/(torch|rankmesh)/"
    r"|(^|/)torch/(_|autograd/|cuda/|distributed/|fx/|nn/|optim/|utils/)"
    r"|(^|/)lib(64)?/python3(\.\d+)?t?/(?!(site|dist)-packages/)"
    r"|^<frozen"
)


class Sites:
    """The lines of a recording, each once; ``stacks`` are those that calls name by number."""

    def __init__(self, stacks: Sequence[Any]) -> None:
        self._stacks = stacks
        self._numbers: dict[tuple[Any, Any, Any], int] = {}
        self._of_frame: dict[int, int] = {}

    @property
    def listed(self) -> list[str]:
        """The lines: ``train.py:31 in step``."""
        return [f"{str(file)[:400]}:{int(line)} in {str(name)[:100]}" for file, line, name in self._numbers]

    def of(self, frames: Any) -> int:
        """Return the number of the line of a stack, which is a list or its number; -1 for none."""
        listed = self._stacks[frames] if isinstance(frames, int) else frames
        return self._site(listed) if listed else -1

    def _site(self, frames: Sequence[Any]) -> int:
        """Return the number of the first line of the program, -1 where there is none."""
        for frame in frames:
            known = self._of_frame.get(id(frame))
            if known is None:
                known = -1 if is_library(frame["filename"]) else self._number(frame)
                self._of_frame[id(frame)] = known
            if known >= 0:
                return known
        return -1

    def _number(self, frame: Mapping[str, Any]) -> int:
        return self._numbers.setdefault((frame["filename"], frame["line"], frame["name"]), len(self._numbers))


@cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to torch, to rankmesh or to the standard library, wherever these are installed.

    >>> is_library("/usr/lib/python3.11/selectors.py"), is_library("/venv/lib/python3.11/site-packages/megatron/x.py")
    (True, False)
    """
    return bool(_LIBRARY.search(str(file)[:4000]))
