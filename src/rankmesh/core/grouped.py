"""Values by a key that several of them have: the ranks of each call, the groups of each kind."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

__all__ = ["grouped"]

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, in the order of the pairs.

    >>> grouped([("tp", 0), ("dp", 0), ("tp", 1)])
    {'tp': [0, 1], 'dp': [0]}
    """
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
