"""Sites: the line of a call, which is the innermost outside torch, rankmesh and the standard library.

```
distributed_c10d.py:3245 in all_reduce
c10d_logger.py:83 in wrapper
accelerator.py:2860 in gather            <- the site where no line is the program's own
train.py:31 in step                      <- the site; none where all are torch's
train.py:12 in main
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

__all__ = ["Sites", "innermost", "is_library", "site_of"]

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
_FILE = itemgetter("filename")
# Functions in which the main thread of a program begins: of a script, of ``python -m``, of a process that is forked.
_BEGINS = ("<module>", "_run_module_as_main", "_run_code")
# What a file is of.
_PROGRAM, _OF_FRAMEWORK, _OF_LIBRARY = range(3)
_Frame = TypeVar("_Frame")


class Sites:
    """The lines of a recording, each once; ``stacks`` are those that calls name by number."""

    def __init__(self, stacks: Sequence[Any]) -> None:
        self._stacks = stacks
        self._numbers: dict[tuple[Any, Any, Any], int] = {}

    @property
    def listed(self) -> list[str]:
        """The lines: ``train.py:31 in step``."""
        return [f"{str(file)[:400]}:{int(line)} in {str(name)[:100]}" for file, line, name in self._numbers]

    def of(self, frames: Any) -> int:
        """Return the number of the line of a stack, which is a list or its number; -1 for none."""
        frame = innermost(self._stack(frames), _FILE)
        if frame is None:
            return -1
        return self._numbers.setdefault((frame["filename"], frame["line"], frame["name"]), len(self._numbers))

    def thread_of(self, frames: Any) -> str | None:
        """Return the function that the thread of a stack runs, "" for the main thread; None without a whole stack."""
        listed = self._stack(frames)
        if not listed:
            return None
        if listed[-1]["name"] == "_bootstrap" and _FILE(listed[-1]).endswith("threading.py"):
            begins = next((frame for frame in listed[::-1] if not _FILE(frame).endswith("threading.py")), listed[-1])
            return f"{_FILE(begins)} {begins['name']}"
        return "" if listed[-1]["name"] in _BEGINS else None

    def _stack(self, frames: Any) -> Sequence[Any]:
        return (self._stacks[frames] if isinstance(frames, int) else frames) or ()


def innermost(frames: Iterable[_Frame], file: Callable[[_Frame], str]) -> _Frame | None:
    """Return the first frame of the program, else the first of a framework; None where all are of libraries.

    >>> innermost(["/venv/lib/python3.11/site-packages/accelerate/accelerator.py", "train.py"], str)
    'train.py'
    """
    framework = None
    for frame in frames:
        kind = _kind(file(frame))
        if kind == _PROGRAM:
            return frame
        if kind == _OF_FRAMEWORK and framework is None:
            framework = frame
    return framework


def site_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the line of the innermost of these frames, each a file, a line and a function; "" where there is none.

    >>> site_of([("train.py", 31, "step"), ("train.py", 40, "main")])
    'train.py:31 in step'
    """
    frame = innermost(frames, itemgetter(0))
    return "" if frame is None else f"{frame[0]}:{frame[1]} in {frame[2]}"


def is_library(file: str) -> bool:
    """Return whether a file belongs to torch, to rankmesh or to the standard library, wherever these are installed.

    >>> is_library("/usr/lib/python3.11/selectors.py"), is_library("/venv/lib/python3.11/site-packages/megatron/x.py")
    (True, False)
    """
    return _kind(file) == _OF_LIBRARY


@cache
def _kind(file: str) -> int:
    name = str(file)[:4000]
    return _OF_LIBRARY if _LIBRARY.search(name) else _OF_FRAMEWORK if _FRAMEWORK.search(name) else _PROGRAM
