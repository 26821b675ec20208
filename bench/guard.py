"""What a guard costs: a digest beside one read of the memory, and a check of 100 million parameters beside their steps.

```
read, digest, read, digest, ...        nanoseconds of the processor for each byte, the least of each
steps, check, steps, check, ...        the check's share of the steps between two of them, processor and wall
```

`python -m bench.guard` prints both. A step has a batch of 256 tokens: a larger one makes the share smaller.
"""

from __future__ import annotations

import json
import sys

import torch

from bench.results import taken
from rankmesh.guard.digest import digest, digests_of, summed
from rankmesh.guard.observe import Program

__all__ = ["measured"]

_EVERY, _ROUNDS, _STEPS = 100, 4, 2


def measured() -> dict[str, float]:
    """Return nanoseconds for each byte, and the share of a training step at a check every 100 steps."""
    tensor = torch.randn(2**25)
    words = tensor.view(torch.int64)
    pairs = [(taken(words.sum), taken(lambda: digest(tensor))) for _ in range(9)]
    read, digested = (
        min(each["processor"] for each in side) / tensor.nbytes * 1e9 for side in zip(*pairs, strict=True)
    )

    program = Program()
    layers = [torch.nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True) for _ in range(14)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    program.number(optimizer)
    inputs = torch.randn(1, 256, 768)

    def train() -> None:
        for _ in range(_STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    def check() -> None:
        with torch.no_grad():
            digests_of(summed([*program.tensors()[0].values()]), torch.device("cpu"))

    train()
    check()
    rounds = [(taken(train), taken(check)) for _ in range(_ROUNDS)]

    def share(clock: str) -> float:
        return sum(one[clock] for _, one in rounds) / sum(one[clock] for one, _ in rounds) * _STEPS / _EVERY

    return {
        "read_ns_per_byte": read,
        "digest_ns_per_byte": digested,
        "parameters": sum(one.numel() for one in model.parameters()),
        "share_of_processor": share("processor"),
        "share_of_wall": share("wall"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(measured(), indent=2) + "\n")
