"""Text of several lines, which a prompt or a notebook shows as lines.

>>> Lines("rank 3 of 4")
rank 3 of 4
"""

from __future__ import annotations

__all__ = ["Lines"]


class Lines(str):
    """A string that is shown as it is, not quoted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
