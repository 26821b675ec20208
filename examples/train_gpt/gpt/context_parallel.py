"""Context parallelism: a sequence is split over cp, and attention gathers the keys and values of all of it.

```
cp=2, sequence of 8      places 0 1 2 3 4 5 6 7      rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5
```

A place attends to those before it, so early places have little to do and late ones much: each rank takes one chunk
from the front and the matching one from the back, and all have the same work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import gathered


def chunks(cp: ProcessGroup) -> tuple[int, int]:
    """Which two of the 2·cp chunks of a sequence this rank holds."""
    return cp.rank(), 2 * cp.size() - 1 - cp.rank()


def places(length: int, cp: ProcessGroup) -> Tensor:
    """Where in the sequence this rank's tokens are, (length / cp,)."""
    every = torch.arange(length).chunk(2 * cp.size())
    return torch.cat([every[chunk] for chunk in chunks(cp)])


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, cp: ProcessGroup) -> Tensor:
    """Each place attends to itself and all before it; tensors are (batch, heads, places, width)."""
    keys, values = in_order(gathered(torch.stack([keys, values]), cp))
    size = queries.shape[2] // 2
    parts = []
    for query, chunk in zip(queries.split(size, dim=2), chunks(cp), strict=True):
        seen = (chunk + 1) * size
        mask = torch.ones(size, seen, dtype=torch.bool, device=query.device).tril(chunk * size)
        parts.append(F.scaled_dot_product_attention(query, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask))
    return torch.cat(parts, dim=2)


def in_order(parts: Tensor) -> Tensor:
    """The parts of all ranks, (cp, ..., places, width), as one sequence."""
    front, back = parts.chunk(2, dim=-2)
    return torch.cat([*front, *back.flip(0)], dim=-2)
