"""Digests of tensors: 64 bits by which two ranks compare what they hold, computed where the tensor is.

A digest is a sum of the tensor's 32-bit words, each times an odd number of its own, modulo 2^64:

```
word 0 · c0 + word 1 · c1 + ...          a piece of at most 2^16 words (on a CPU)
piece 0 · d0 + piece 1 · d1 + ...        a tensor of several; tensors make one digest in the same way
```

Odd numbers have an inverse modulo 2^64, so a difference in one word always shows, whichever bits of it differ; one in
several words is missed with a probability of about 2^-32. All bits count: the payload of a NaN, the sign of a zero, and
where a word is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from rankmesh.transfer.live.shards import flat

__all__ = ["combined", "digest", "digests"]

# Words of a piece: what a core's cache holds, and what keeps a GPU busy.
_CPU, _GPU = 2**16, 2**22
# Of a generator whose outputs look random (splitmix64): its step, and what it multiplies by, as signed numbers.
_STEP, _FIRST, _SECOND = (one - 2**64 for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor of any dtype, a scalar int64 tensor on its device. Nothing is copied to the host.

    >>> one = torch.tensor([0.0, 1.0])
    >>> bool(digest(one) == digest(torch.tensor([-0.0, 1.0]))), bool(digest(one) == digest(one.clone()))
    (False, True)
    """
    size = _CPU if tensor.device.type == "cpu" else _GPU
    numbers = _numbers(size, tensor.device)
    product = torch.empty(min(size, -(-tensor.nbytes // 4)), dtype=torch.int64, device=tensor.device)
    parts = []
    for words in _pieces(tensor.detach(), 4 * size):
        count = len(words)
        parts.append(torch.sum(torch.mul(words, numbers[:count], out=product[:count])))
    return parts[0] if len(parts) == 1 else combined(parts, tensor.device)


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the digest of each tensor, as one int64 tensor on ``device``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(tensor).to(device) for tensor in tensors])


def combined(parts: Sequence[Tensor] | Tensor, device: torch.device) -> Tensor:
    """Return one digest of several, whose order counts."""
    if not len(parts):
        return torch.zeros((), dtype=torch.int64, device=device)
    stacked = parts if isinstance(parts, Tensor) else torch.stack(tuple(parts))
    return torch.sum(stacked * _numbers(2 ** (len(stacked) - 1).bit_length(), device)[: len(stacked)])


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Return the tensor as words of 32 bits, in pieces of bounded size that depend on its shape alone."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    row = prod(tensor.shape[1:]) * tensor.element_size()
    if not tensor.numel():
        return
    if tensor.dim() == 0 or row * len(tensor) <= limit:
        yield _words(tensor)
    elif row > limit:
        for part in tensor:
            yield from _pieces(part, limit)
    else:
        for part in tensor.split(limit // row):
            yield _words(part)


def _words(piece: Tensor) -> Tensor:
    found = flat(piece.contiguous()).view(torch.uint8)
    left = -len(found) % 4
    if left:
        found = torch.nn.functional.pad(found, (0, left))
    elif found.storage_offset() % 4:
        found = found.clone()
    return found.view(torch.int32)


@lru_cache(maxsize=32)
def _numbers(count: int, device: torch.device) -> Tensor:
    """So many odd numbers, the same on every rank."""
    x = torch.arange(1, count + 1, device=device) * _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    found: Tensor = (x ^ _shifted(x, 31)) | 1
    return found


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, as of numbers without a sign."""
    found: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return found
