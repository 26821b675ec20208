"""Real text, byte by byte: the language reference that ships with Python (``pydoc_data.topics``, licence PSF-2.0).

The batch is a pure function of the seed and the step, so every layout sees the same one; a rank takes the rows of its
replica and the columns of its place in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 256


def read() -> Tensor:
    """All topics, about 460,000 bytes, as uint8."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@dataclass(frozen=True)
class Microbatch:
    """What one pass through the pipeline reads and must predict: two int64 tensors, (rows, places)."""

    tokens: Tensor
    targets: Tensor


def batch(text: Tensor, seed: int, step: int, rows: int, length: int) -> Tensor:
    """The whole batch of one step: windows of the text, int64 (rows, length + 1)."""
    place = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (rows, 1), generator=place)
    return text[starts + torch.arange(length + 1)].long()


def microbatches(whole: Tensor, replica: int, replicas: int, count: int, places: Tensor) -> list[Microbatch]:
    """This rank's share of a batch, cut into ``count`` equal parts, at these places of the sequence."""
    parts = whole.chunk(replicas)[replica].chunk(count)
    return [Microbatch(part[:, places], part[:, places + 1]) for part in parts]
