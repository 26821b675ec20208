"""Time limits of calls: seconds or a timedelta, as a timedelta.

>>> time_limit(1.5)
datetime.timedelta(seconds=1, microseconds=500000)
"""

from __future__ import annotations

from datetime import timedelta

from rankmesh.errors import PlanError, quoted

__all__ = ["time_limit"]

# Stores count in milliseconds, and take zero for no limit at all.
_LEAST, _MOST = 0.001, 1e9


def time_limit(timeout: object) -> timedelta:
    """The limit as a timedelta; ``PlanError`` for what no rank could wait for: none, nothing, less, or for ever."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _LEAST <= seconds <= _MOST:
        raise PlanError(
            f"timeout is {quoted(timeout)}; give a timedelta or a number of seconds from {_LEAST:g} to {_MOST:g}, or "
            "leave it out for the default",
            received=timeout,
        )
    return timedelta(seconds=seconds)
