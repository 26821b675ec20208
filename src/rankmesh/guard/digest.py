"""Digests of tensors: 64 bits by which two ranks compare what they hold, computed where the tensor is.

A tensor is read as words of 64 bits, in blocks of rows, which are summed modulo 2^64 in both directions:

```
word 0     word 1     ... ─> sum of row 0        a block of 128 rows of 1024 words, which fits a core's cache
word 1024  word 1025  ... ─> sum of row 1
  │          │
sum of     sum of                                the words after the last whole row count as sums themselves
column 0   column 1
```

The digest is the sum of a hash of each of these sums and its place (splitmix64). All bits count: the payload of a NaN,
the sign of a zero, and where a word is. A difference in one word, or in a few, is missed with a probability of 2^-64.
Changes that leave the sum of each row and column are not seen: at least four words, at the corners of a rectangle in a
block, changed by the same number with alternating signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rankmesh.core.grouped import grouped
from rankmesh.transfer.live.shards import flat

__all__ = ["combined", "digest", "digests", "digests_of", "first_difference", "summed"]

# Words of a row, and rows of a block: what a core's cache holds, and what keeps a GPU busy.
_ROW, _CPU, _GPU = 2**10, 2**7, 2**13
# Of a generator whose outputs look random (splitmix64): its step, and what it multiplies by, as signed numbers.
_STEP, _FIRST, _SECOND = (one - 2**64 for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor of any dtype, a scalar int64 tensor on its device. Nothing is copied to the host.

    >>> one = torch.tensor([0.0, 1.0])
    >>> bool(digest(one) == digest(torch.tensor([-0.0, 1.0]))), bool(digest(one) == digest(one.clone()))
    (False, True)
    """
    return digests([tensor], tensor.device)[0]


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the digest of each tensor, as one int64 tensor on ``device``."""
    return digests_of(summed(tensors), device)


def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of each tensor, on its device: a hundredth of its size, which tells where tensors differ."""
    found: dict[int, Tensor] = {}
    for numbers in grouped((tensor.device, number) for number, tensor in enumerate(tensors)).values():
        parts = [list(_sums(tensors[number].detach())) for number in numbers]
        each = torch.cat([part for one in parts for part in one]).split([sum(map(len, one)) for one in parts])
        found |= dict(zip(numbers, each, strict=True))
    return [found[number] for number in range(len(tensors))]


def digests_of(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the digest of each tensor, of which these are the sums, as one int64 tensor on ``device``."""
    found = torch.zeros(len(sums), dtype=torch.int64, device=device)
    for there, numbers in grouped((one.device, number) for number, one in enumerate(sums)).items():
        counts = [len(sums[number]) for number in numbers]
        values = torch.cat([sums[number] for number in numbers])
        owners = torch.arange(len(counts), device=there)
        owners = owners.repeat_interleave(torch.tensor(counts, device=there), output_size=len(values))
        places = torch.cat([torch.arange(1, count + 1, device=there) for count in counts])
        each = torch.zeros(len(counts), dtype=torch.int64, device=there)
        found[numbers] = each.scatter_add_(0, owners, _hashed(values, places)).to(device)
    return found


def first_difference(sums: Tensor, others: Tensor, nbytes: int, device: str) -> tuple[int, int, bool]:
    """Return where a tensor of ``nbytes`` on a kind of device first differs from another one, by the sums of both.

    The byte; the change of its word modulo 2^64; and whether no other word differs. If one does, the byte is in the
    first row that differs, or in its block.
    """
    size, rows = _CPU if device == "cpu" else _GPU, nbytes // (8 * _ROW)
    differ = torch.nonzero(sums != others).flatten()
    place, last = int(differ[0]), rows + -(-rows // size) * _ROW
    if place >= last:
        word, single = rows * _ROW + place - last, len(differ) == 1
    else:
        block, row = divmod(place, size + _ROW)
        height, inside = min(size, rows - block * size), differ - block * (size + _ROW)
        columns = inside[(inside >= height) & (inside < height + _ROW)] - height
        word = (block * size + min(row, height - 1)) * _ROW + (int(columns[0]) if len(columns) else 0)
        single = len(differ) == 2
    change = (int(sums[place]) - int(others[place])) % 2**64
    return word * 8 + ((change & -change).bit_length() - 1) // 8, change, single


def combined(parts: Sequence[Tensor] | Tensor, device: torch.device) -> Tensor:
    """Return one digest of several, whose order counts."""
    if not len(parts):
        return torch.zeros((), dtype=torch.int64, device=device)
    stacked = parts if isinstance(parts, Tensor) else torch.stack(tuple(parts))
    return torch.sum(_hashed(stacked, torch.arange(1, len(stacked) + 1, device=device)))


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Return the sums of a tensor's rows and columns, and the words after its last row."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    content = flat(tensor.resolve_neg().contiguous()).view(torch.uint8)
    rows, size = len(content) // (8 * _ROW), _CPU if tensor.device.type == "cpu" else _GPU
    for start in range(0, rows, size):
        block = _as_words(content[start * 8 * _ROW : min(start + size, rows) * 8 * _ROW]).view(-1, _ROW)
        # Rows first, which brings the block into the cache: columns alone are read at half the speed.
        yield from (torch.sum(block, 1), torch.sum(block, 0))
    yield _as_words(content[rows * 8 * _ROW :])


def _as_words(content: Tensor) -> Tensor:
    """Return bytes as words of 64 bits, the last one filled with zeros."""
    if missing := -len(content) % 8:
        content = torch.nn.functional.pad(content, (0, missing))
    return (content.clone() if content.storage_offset() % 8 else content).view(torch.int64)


def _hashed(values: Tensor, places: Tensor) -> Tensor:
    """Return 64 bits that look random for each value and its place."""
    x = places.mul_(_STEP).add_(values)
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        x = x.bitwise_xor_(_shifted(x, bits)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, as of numbers without a sign."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)
