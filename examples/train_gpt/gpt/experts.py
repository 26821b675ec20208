"""Expert parallelism: a router sends each token to its best experts, wherever over ep they live, and none is dropped.

```
tokens ─ router ─ sort by expert ─ all-to-all ─ sort by expert ─ experts ─ unsort ─ all-to-all ─ unsort ─ weigh, add
```

The hidden units of an expert are split over ep_tp, as those of other layers are over tp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .collectives import copied, exchange, exchanged, summed
from .weights import Weights


class Experts(nn.Module):
    """Feed-forward layers of which each token uses the ``top`` best, weighted by the router."""

    def __init__(
        self, name: str, hidden: int, units: int, count: int, top: int, scale: float, weights: Weights
    ) -> None:
        super().__init__()
        self.count, self.top, self.groups = count, top, weights.groups
        self.router = weights.dense(f"{name}.router", count, hidden, scale=hidden**-0.5)
        self.up = weights.expert(f"{name}.up", count, units, hidden, scale=hidden**-0.5)
        self.down = weights.expert(f"{name}.down", count, units, hidden, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, places, hidden) to the same."""
        tokens = x.flatten(0, 1)
        shares, chosen = F.softmax(tokens @ self.router.T, dim=-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)
        done = self._visit(tokens[order // self.top], chosen.flatten().bincount(minlength=self.count))
        answers = done[order.argsort()].view(*chosen.shape, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        return (answers * shares[..., None]).sum(1).view_as(x)

    def _visit(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, ``counts`` of them for each, to their experts and back."""
        ep = self.groups.ep
        every = [1] * ep.size()
        leaving = counts.view(ep.size(), -1)
        arriving = exchange(leaving, every, every, ep)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        return exchanged(self._apply_part(exchanged(rows, sent, received, ep), arriving), received, sent, ep)

    def _apply_part(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts of this rank on rows sorted by sender, then expert; ``counts`` is (senders, experts here)."""
        expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
        order = expert.repeat_interleave(counts.flatten()).argsort(stable=True)
        sorted_rows = copied(rows, self.groups.ep_tp)[order]
        done = [
            F.gelu(part @ up.T) @ down
            for part, up, down in zip(sorted_rows.split(counts.sum(0).tolist()), self.up, self.down, strict=True)
        ]
        return summed(torch.cat(done)[order.argsort()], self.groups.ep_tp)
