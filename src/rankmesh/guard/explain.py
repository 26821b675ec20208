"""Explain: which tensor differs first, on which ranks, and where; every rank takes part and gets the same result.

Nothing of this runs as long as all is equal. One of the ranks that are right sends the tensor to one that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.core.boxes import Box
from rankmesh.core.sharding import Sharding
from rankmesh.errors import in_words, quoted
from rankmesh.guard.everyone import Everyone
from rankmesh.transfer.live.shards import local

__all__ = ["Difference", "explained", "minority"]

# Bytes that travel in one message.
_PIECE = 2**24


@dataclass(frozen=True)
class Difference:
    """The first difference: the tensor, the ranks that are in the minority, and the first element that differs.

    ``ranks`` are those of both sides where neither is larger, as ``tied`` says; ``rank`` is the one that ``got`` the
    element. ``tensors`` of this group differ, of which this is the first by name. ``box``, ``expected`` and ``got``
    are None where the tensors are equal again.
    """

    name: str
    ranks: tuple[int, ...]
    box: Box | None
    count: int
    expected: float | complex | None
    got: float | complex | None
    rank: int = -1
    tensors: int = 1
    tied: bool = False

    def sentence(self, group: str, step: int, since: int | None) -> str:
        """The difference in one line."""
        before = "the ranks were never found equal" if since is None else f"they were equal at step {since}"
        start = f"{quoted(self.name)} differs within {group} at step {step}"
        if self.got is None:
            return f"{start}, on {in_words(self.ranks)}, and is equal again by now; {before}"
        where = "" if self.box is None else f" at [{', '.join(str(low) for low, _ in self.box)}]"
        many = f" ({self.count} element{'s differ' if self.count > 1 else ' differs'})" if self.count else ""
        who = in_words([self.rank] if self.rank >= 0 else self.ranks)
        more = f"; {in_words(self.ranks)} differ" if len(self.ranks) > 1 and self.rank >= 0 else ""
        more += f"; it is the first of {self.tensors} tensors" if self.tensors > 1 else ""
        return f"{start}: {who} has {self.got} where {self.expected} is expected{where}{many}{more}; {before}"


def explained(
    everyone: Everyone,
    tensors: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    names: Sequence[str],
    ranks: Sequence[int],
    digests: Tensor | None,
) -> Difference:
    """Return the first difference in a kind of replicas, of which this rank has ``digests``, if it is a member."""
    count = len(names)
    mine = {} if digests is None else dict(enumerate(digests.tolist()))
    mine |= {count + number: ~value for number, value in mine.items()}
    found = everyone.reduce(2 * count, mine).values()
    differ = [number for number in range(count) if found[number] != ~found[count + number]]
    number = min(differ, key=lambda one: names[one])
    name = names[number]
    by_rank = everyone.gather(ranks, None if digests is None else int(digests[number]))
    odd, right, wrong = minority(dict(zip(ranks, by_rank, strict=True)))
    difference = Difference(name, odd, None, 0, None, None, rank=wrong, tensors=len(differ), tied=right in odd)
    tensor = tensors.get(name)
    if everyone.rank in (right, wrong) and tensor is not None:
        difference = _compared(everyone, difference, local(tensor), shardings[name], right)
    return _shared(everyone, difference, shardings[name], wrong)


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


def _compared(everyone: Everyone, difference: Difference, tensor: Tensor, sharding: Sharding, right: int) -> Difference:
    """On the rank that is wrong, the first element that differs from what the rank that is right sends."""
    flat = tensor.contiguous().reshape(-1)
    length = max(1, _PIECE // flat.element_size())
    for start in range(0, len(flat), length):
        piece = flat[start : start + length].to(everyone.device)
        if everyone.rank == right:
            dist.send(piece.view(torch.uint8), difference.rank, group=everyone.pg)
            continue
        expected = torch.empty_like(piece)
        dist.recv(expected.view(torch.uint8), right, group=everyone.pg)
        differ = (expected.view(torch.uint8) != piece.view(torch.uint8)).view(len(piece), -1).any(1)
        if differ.any():
            if difference.box is None:
                first = int(differ.nonzero()[0])
                difference = replace(
                    difference,
                    box=_box(start + first, sharding, everyone.rank),
                    expected=expected[first].item(),
                    got=piece[first].item(),
                )
            difference = replace(difference, count=difference.count + int(differ.sum()))
    return difference


def _box(position: int, sharding: Sharding, rank: int) -> Box | None:
    """Where an element of a rank's shard is in the whole tensor; None in padding."""
    shard = sharding.of(rank)
    at = []
    for length in reversed(shard.shape):
        at.append(position % length)
        position //= length
    at.reverse()
    for box, place in zip(shard.boxes, shard.places, strict=True):
        inside = [low + here - first for (low, _), here, first in zip(box, at, place, strict=True)]
        if all(low <= here < high for (low, high), here in zip(box, inside, strict=True)):
            return tuple((here, here + 1) for here in inside)
    return None


def _shared(everyone: Everyone, mine: Difference, sharding: Sharding, wrong: int) -> Difference:
    """Return on every rank the difference that the wrong rank has found."""
    dimensions = len(sharding.shape)
    given: dict[int, int] = {}
    if everyone.rank == wrong:
        place = [low for low, _ in mine.box] if mine.box is not None else [-1] * dimensions
        given = dict(enumerate([mine.count, *place, *_parts(mine.expected), *_parts(mine.got)]))
    count, *found = everyone.reduce(1 + dimensions + 4, given).values()
    if not count:
        return mine
    place = found[:dimensions]
    box = None if -1 in place else tuple((low, low + 1) for low in place)
    values = [_value(found[start : start + 2], sharding.dtype) for start in (dimensions, dimensions + 2)]
    return replace(mine, count=count, box=box, expected=values[0], got=values[1])


def _parts(value: complex | None) -> list[int]:
    """The bits of an element's real and imaginary parts, as 64-bit floats."""
    value = complex(0 if value is None else value)
    bits: list[int] = torch.tensor([value.real, value.imag], dtype=torch.float64).view(torch.int64).tolist()
    return bits


def _value(parts: Sequence[int], dtype: str) -> float | complex:
    real, imaginary = torch.tensor(parts, dtype=torch.int64).view(torch.float64).tolist()
    if dtype.startswith("complex"):
        return complex(real, imaginary)
    return float(real) if "float" in dtype else int(real)
