"""Calls: what a rank asks of a group, and the line of the user's program that asked.

A call has a *signature*, by which the calls of all members are compared:

```
all_reduce   tensors float32[4, 2]   reduce SUM
broadcast    tensors int64[1]        root rank 2
```
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import torch

import rankmesh

__all__ = ["Call", "Site", "call_site", "is_users_file", "raise_site", "shapes", "users_trace"]

_OURS = tuple(f"{Path(module.__file__).parent}/" for module in (torch, rankmesh) if module.__file__)
# The file of code that was made from a string.
_GENERATED = "<string>"
_PLUMBING = ("/contextlib.py", "/threading.py", "/functools.py")


@dataclass(frozen=True)
class Site:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """``file:line`` without the folder."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def _short(file: str) -> str:
    """Return the path from the working directory where it is inside, else its last two parts."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return "/".join(path.parts[-2:])


def call_site(frame: FrameType | None = None) -> Site:
    """Return the innermost line that belongs neither to torch nor to rankmesh; the outermost one where all do."""
    frame = sys._getframe(1) if frame is None else frame
    while not _is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raise_site(error: BaseException) -> Site | None:
    """Return the line of the user's program at which an error came out of it; None when it was in none."""
    entries = _users_entries(error)
    code = entries[-1].tb_frame.f_code if entries else None
    return None if code is None else Site(code.co_filename, entries[-1].tb_lineno, code.co_name)


def users_trace(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the lines of torch and of rankmesh."""
    kept: TracebackType | None = None
    for entry in reversed(_users_entries(error)):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _users_entries(error: BaseException) -> list[TracebackType]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found += [trace] if _is_users(trace.tb_frame) else []
        trace = trace.tb_next
    return found


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file == _GENERATED:  # of our own dataclasses, or what the user gives to python -c
        return frame.f_globals.get("__name__", "").partition(".")[0] not in (torch.__name__, rankmesh.__name__)
    return is_users_file(file)


def is_users_file(name: str) -> bool:
    """Return whether a file of code belongs neither to torch nor to rankmesh, nor to what starts threads."""
    return not (name.startswith((*_OURS, "<frozen")) or name.endswith(_PLUMBING))


@dataclass(eq=False)
class Call:
    """One call of one rank on one group.

    ``inputs``     what the rank gives; ``outputs`` where it wants the results
    ``signature``  what must be equal on all members, by name, in the order in which it is shown
    ``local``      what may differ between members: split sizes, the shapes of uneven gathers
    """

    rank: int
    position: int
    operation: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    site: Site
    signature: Mapping[str, object] = field(default_factory=dict)
    local: Mapping[str, object] = field(default_factory=dict)
    reduction: object = None
    root: int | None = None
    given: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    results: list[torch.Tensor] | None = None

    def __str__(self) -> str:
        facts = [f"{name} {_text(value)}" for name, value in {**self.signature, **self.local}.items()]
        return " ".join([self.operation, ", ".join(facts)]).strip()


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"({' '.join(map(_text, value))})" if len(value) != 1 else _text(value[0])
    return str(value)


def shapes(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Return each tensor as its dtype and shape.

    >>> shapes([torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)])
    ('float32[2, 3]', 'int64[]')
    """
    return tuple(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
