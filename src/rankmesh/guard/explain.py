"""Explain: which tensor differs first, on which ranks, and where; every rank takes part and gets the same result.

Nothing of this runs as long as all is equal. One of the ranks that are right sends the tensor to one that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.core.sharding import Sharding
from rankmesh.errors import Diverged, in_words, quoted
from rankmesh.guard.everyone import Everyone, gathered
from rankmesh.guard.replicas import differing
from rankmesh.transfer.live.shards import flat, local

__all__ = ["explained", "minority", "sentence"]

# Bytes that travel in one message.
_PIECE = 2**24


def explained(
    everyone: Everyone,
    tensors: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    names: Sequence[str],
    digests: Tensor | None,
    step: int,
    since: int | None,
) -> Diverged:
    """Return the error of the first of these tensors that differs between ranks, which were equal ``since`` a step.

    A rank that holds them gives its ``digests``. A tensor without a sharding is one number.
    """
    mine = range(len(names)) if digests is not None else ()
    given = torch.zeros(0, dtype=torch.int64, device=everyone.device) if digests is None else digests
    differ = everyone.compare(len(names), mine, given)()
    number, *others = sorted(differ, key=lambda one: names[one])
    name = names[number]
    by_rank = gathered(everyone.groups, None if digests is None else int(digests[number]))
    odd, right, wrong = minority(by_rank)
    first = None
    if everyone.rank in (right, wrong):
        first = _first(everyone, local(tensors[name]), shardings.get(name), right, wrong)
    at, count, *sides = gathered(everyone.groups, first)[wrong]
    box = None if at is None else tuple((low, low + 1) for low in at)
    expected, got = (complex(*side) if isinstance(side, list) else side for side in sides)
    group, agree = differing(everyone.groups.plan, by_rank)
    values = {"tensor": name, "ranks": odd, "group": group, "step": step, "since": since, "box": box}
    values |= {"count": count, "expected": expected, "got": got}
    there, here = ([rank for rank, one in by_rank.items() if one == by_rank[side]] for side in (wrong, right))
    also = [_called(names[one], tensors) for one in others]
    message = sentence(values | {"agree": agree, "called": _called(name, tensors)}, there, here, also)
    return Diverged(message, tied=right in odd, **values)


def minority(digests: Mapping[int, int]) -> tuple[tuple[int, ...], int, int]:
    """Return the ranks in the minority (all where there is none), a rank that is right, and one that is not.

    >>> minority({0: 7, 1: 7, 2: 5, 3: 7}), minority({4: 1, 6: 2})
    (((2,), 0, 2), ((4, 6), 4, 6))
    """
    counts = Counter(digests.values()).most_common(2)
    expected = counts[0][0]
    odd = tuple(rank for rank, one in digests.items() if one != expected)
    tied = counts[0][1] == counts[1][1]
    right = next(rank for rank, one in digests.items() if one == expected)
    return tuple(digests) if tied else odd, right, odd[0]


def _first(everyone: Everyone, tensor: Tensor, sharding: Sharding | None, right: int, wrong: int) -> list[object]:
    """Return the first element in which the wrong rank's tensor differs from the right one's, as plain data.

    Its place, how many elements differ, and both values.
    """
    place, count = None, 0
    values: list[object] = [None, None]
    elements = flat(tensor.contiguous())
    length = max(1, _PIECE // elements.element_size())
    for start in range(0, len(elements), length):
        piece = elements[start : start + length].to(everyone.device)
        if everyone.rank == right:
            dist.send(piece.view(torch.uint8), wrong, group=everyone.pg)
            continue
        expected = torch.empty_like(piece)
        dist.recv(expected.view(torch.uint8), right, group=everyone.pg)
        differ = (expected.view(torch.uint8) != piece.view(torch.uint8)).view(len(piece), -1).any(1)
        if differ.any() and not count:
            first = int(differ.nonzero()[0])
            place = None if sharding is None else _place(start + first, sharding, wrong)
            values = [_plain(side[first].item()) for side in (expected, piece)]
        count += int(differ.sum())
    return [place, count, *values]


def _place(position: int, sharding: Sharding, rank: int) -> list[int] | None:
    """Where an element of a rank's shard is in the whole tensor; None in padding."""
    shard = sharding.of(rank)
    at = [int(index) for index in np.unravel_index(position, shard.shape)]
    for box, place in zip(shard.boxes, shard.places, strict=True):
        inside = [low + here - first for (low, _), here, first in zip(box, at, place, strict=True)]
        if all(low <= here < high for (low, high), here in zip(box, inside, strict=True)):
            return inside
    return None


def _plain(value: object) -> object:
    return [value.real, value.imag] if isinstance(value, complex) else value


def _called(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the quoted name of a tensor, with a note if it is the state of an optimizer."""
    return quoted(name) + (" (optimizer state)" if name in getattr(tensors, "states", ()) else "")


def sentence(values: Mapping[str, Any], wrong: Sequence[int], right: Sequence[int], also: Sequence[str]) -> str:
    """Describe the difference in one line, between the ranks of two sides. Of a tie, neither side is right.

    Values without ``got`` are of a comparison that finds where tensors differ, and perhaps the ``bit``.
    """
    since, odd, box, count, agree = (values[each] for each in ("since", "ranks", "box", "count", "agree"))
    before = "the ranks were never found equal" if since is None else f"they were equal at step {since}"
    start = f"{values['called']} differs within {values['group']} at step {values['step']}"
    start += f" and is equal within {agree}" if agree else ""
    if "got" in values and not count:
        return f"{start}, on {in_words(odd)}, and is equal again by now; {before}"
    where = "" if box is None else f" at [{', '.join(str(low) for low, _ in box)}]"
    where += "" if values.get("bit") is None else f" in bit {values['bit']}"
    many = (
        ""
        if not count or (box is None and count == 1)
        else f" ({count} element{'s differ' if count > 1 else ' differs'})"
    )
    tied = right[0] in odd
    wrong, right = (wrong, right) if agree else (wrong[:1], right[:1])
    more = f"; {in_words(odd)} differ" if not agree and len(odd) > (2 if tied else 1) else ""
    more += "; either may be wrong" if tied and not agree else ""
    more += f"; also {', '.join(also[:3])}" + (f" and {len(also) - 3} more" if len(also) > 3 else "") if also else ""
    if "got" in values:
        other = f"and {in_words(right)} {values['expected']}" if tied else f"where {values['expected']} is expected"
        got = f"{in_words(wrong)} {'has' if len(wrong) == 1 else 'have'} {values['got']} {other}"
    else:
        got = f"{in_words(wrong)} differs from {in_words(right)}" if tied else f"{in_words(wrong)} differs"
    return f"{start}: {got}{where}{many}{more}; {before}"
