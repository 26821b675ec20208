"""Sites: the line of a call, which is the innermost outside torch, rankmesh and the standard library.

```
distributed_c10d.py:3245 in all_reduce
c10d_logger.py:83 in wrapper
accelerator.py:2860 in gather            <- the site where no line is the program's own
train.py:31 in step                      <- the site; none where all are torch's
train.py:12 in main
```

A frame is looked at once: torch's pickles hold each of them once, however many calls have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

__all__ = ["Sites", "innermost", "is_library"]

_LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages|src)/(torch|rankmesh)/"
    r"|(^|/)torch/(_|autograd/|cuda/|distributed/|fx/|nn/|optim/|utils/)"
    r"|(^|/)lib(64)?/python3(\.\d+)?t?/(?!(site|dist)-packages/)"
    r"|^<frozen"
)
# As installed, or unpacked under the number of a release; a checkout is the user's to change.
_FRAMEWORK = re.compile(
    r"(^|(site|dist)-packages/|-\d[^/]*/(src/)?)"
    r"(accelerate|deepspeed|fairscale|lightning|lightning_fabric|megatron|pytorch_lightning|torchtitan|transformers)/"
)
# In place of the number of a frame's line.
_IN_LIBRARY, _IN_FRAMEWORK = -1, -2
_Frame = TypeVar("_Frame")


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
        """Return the number of the first line of the program, else of a framework; -1 where there is neither."""
        framework = None
        for frame in frames:
            known = self._of_frame.get(id(frame))
            if known is None:
                known = self._of_frame[id(frame)] = self._seen(frame)
            if known >= 0:
                return known
            if known == _IN_FRAMEWORK and framework is None:
                framework = frame
        return -1 if framework is None else self._number(framework)

    def _seen(self, frame: Mapping[str, Any]) -> int:
        """Return the number of a line of the program, or what else the frame is of."""
        if is_library(frame["filename"]):
            return _IN_LIBRARY
        return _IN_FRAMEWORK if _is_framework(frame["filename"]) else self._number(frame)

    def _number(self, frame: Mapping[str, Any]) -> int:
        return self._numbers.setdefault((frame["filename"], frame["line"], frame["name"]), len(self._numbers))


def innermost(frames: Iterable[_Frame], file: Callable[[_Frame], str]) -> _Frame | None:
    """Return the first frame of the program, else the first of a framework; None where all are of libraries.

    >>> innermost(["/venv/lib/python3.11/site-packages/accelerate/accelerator.py", "train.py"], str)
    'train.py'
    """
    framework = None
    for frame in frames:
        if is_library(file(frame)):
            continue
        if not _is_framework(file(frame)):
            return frame
        framework = frame if framework is None else framework
    return framework


@cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to torch, to rankmesh or to the standard library, wherever these are installed.

    >>> is_library("/usr/lib/python3.11/selectors.py"), is_library("/venv/lib/python3.11/site-packages/megatron/x.py")
    (True, False)
    """
    return bool(_LIBRARY.search(str(file)[:4000]))


@cache
def _is_framework(file: str) -> bool:
    return bool(_FRAMEWORK.search(str(file)[:4000]))
