"""Calls and what differs between them: the one comparator of calls, of recordings and of simulated ranks alike.

```
rank 0   all_reduce  tensors float32[4], reduction SUM  ┐
rank 1   all_reduce  tensors float32[4], reduction SUM  ├─ reduction differs: rank 3 is the odd one
rank 3   all_reduce  tensors float32[4], reduction MAX  ┘
```

A call has a *signature*: the facts that are the same on all members of its group, by name.

>>> one, other = Signature.of("all_reduce", sizes=(4,)), Signature.of("all_reduce", sizes=(8,))
>>> print(difference([one, other]), difference([one, one]))
sizes differ None
>>> odd_ones({0: one, 1: one, 2: other})
[2]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

__all__ = ["Comparable", "Signature", "difference", "merged", "odd_ones", "signature_of"]

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
# NCCL's barrier is a reduction.
_SAME = {"all_reduce_barrier": "barrier"}
# Shapes of one call, and calls made as one, that are looked at.
_MOST = 64


class Comparable(Protocol):
    """A call that can be compared: its operation, and the facts that are equal on all members of its group."""

    @property
    def operation(self) -> str:
        """The name of the operation: ``all_reduce``."""

    @property
    def signature(self) -> Mapping[str, object]:
        """The facts by name."""


@dataclass(frozen=True)
class Signature:
    """One call as far as it is compared; ``shown`` is the call in words, which is not compared."""

    operation: str
    facts: tuple[tuple[str, Hashable], ...] = ()
    shown: str = field(default="", compare=False)

    @classmethod
    def of(cls, operation: str, shown: str = "", **facts: Hashable) -> Signature:
        """Make a signature from facts by name."""
        return cls(operation, tuple(facts.items()), shown)

    @property
    def signature(self) -> Mapping[str, object]:
        """The facts by name."""
        return dict(self.facts)

    def __str__(self) -> str:
        return f"{self.operation} {self.shown}".strip()


def difference(calls: Sequence[Comparable]) -> str | None:
    """Name the difference between calls of one number: ``sizes differ``; None for equal calls."""
    for other in calls[1:]:
        if other.operation != calls[0].operation:
            return "operations differ"
        ours, theirs = calls[0].signature, other.signature
        if names := [name for name in ours if ours[name] != theirs.get(name)]:
            return f"{', '.join(names)} {'differ' if len(names) > 1 or names[0].endswith('s') else 'differs'}"
    return None


def odd_ones(calls: Mapping[int, Signature], members: int = 0) -> list[int]:
    """Return the ranks whose call differs from the call of most members; all of them without a majority."""
    usual, count = Counter(calls.values()).most_common(1)[0]
    is_majority = 2 * count > max(members, len(calls))
    return sorted(rank for rank, call in calls.items() if not (is_majority and call == usual))


# -- calls of torch's flight recorder ----------------------------------------------------------------------------------


def signature_of(entry: Mapping[str, Any]) -> Signature:
    """Return the facts of a call on which all members agree: sizes in elements, since networks know no shapes; dtypes.

    >>> print(signature_of({"profiling_name": "gloo:gather", "input_sizes": [[4, 2]], "input_dtypes": ["Float"]}))
    gather float32[4, 2]
    """
    operation = str(entry["profiling_name"])[:100].rpartition(":")[2].partition(" ")[0]
    operation = _SAME.get(operation, operation)
    gives = _shapes(entry.get("input_sizes"), entry.get("input_dtypes"))
    takes = _shapes(entry.get("output_sizes"), entry.get("output_dtypes"))
    shown = takes if operation == "scatter" or not gives else gives
    text = " ".join(f"{dtype}{list(sizes)}" for sizes, dtype in shown[:4]) + (" ..." if len(shown) > 4 else "")
    facts: dict[str, Any] = {"dtypes": tuple(sorted({dtype for _, dtype in shown}))}
    if not operation.lower().startswith(("all_to_all", "alltoall")):
        facts["sizes"] = tuple(prod(sizes) for sizes, _ in shown)
    return Signature.of(operation, text, **facts)


def _shapes(sizes: object, dtypes: object) -> list[tuple[tuple[int, ...], str]]:
    listed = sizes if isinstance(sizes, list | tuple) else ()
    names = dtypes if isinstance(dtypes, list | tuple) else ()
    return [
        (
            tuple(int(size) for size in shape[:_MOST]),
            _DTYPES.get(str(names[i]), str(names[i])) if i < len(names) else "",
        )
        for i, shape in enumerate(listed)
    ]


def merged(parts: Sequence[Signature]) -> Signature:
    """Return one call that stands for these, with the facts of all of them, one after the other."""
    first, *others = parts
    parts = [first, *(part for part in others if part.operation != "coalesced")][:_MOST]
    facts: dict[str, tuple[Any, ...]] = dict.fromkeys(first.signature, ())
    for part in parts:
        facts |= {name: (*facts[name], *value) for name, value in part.facts if name in facts}  # type: ignore[misc]
    return Signature("+".join(part.operation for part in parts), tuple(facts.items()), first.shown)
