"""The weights of one rank of an engine: of one version whole, whatever arrives.

```
update="copy"   the tensors stay the same ones; what arrives waits in staging (gloo) or in the trainer's files
update="swap"   two sets of tensors: one in use, one that is written; a version that is there makes them change places
```

Memory besides the tensors in use: of ``swap``, as much again. Of ``copy``, as much again with gloo, nothing with files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rankmesh.transfer.live.shards import local
from rankmesh.transfer.live.stream import Slices
from rankmesh.transfer.sync.delta import Delta, merged

__all__ = ["Weights"]


class Weights:
    """The ``tensors`` in use, of ``version``; ``lock`` is held while tensors in use change.

    What arrives is ``staged`` where it may stop halfway, over a group; files of a version are there whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, swaps: bool, staged: bool) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.version: int | None = None
        self.lock = threading.RLock()
        self._swaps, self._in_place = swaps, not swaps and not staged
        self._other: dict[str, Tensor] | None = None
        # What the other set lacks of the version in use.
        self._behind: Delta | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors, or the current GPU if it has none."""
        known = next((local(tensor).device for tensor in self.tensors.values()), None)
        if known is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return known or torch.device("cpu")

    def writing(self) -> AbstractContextManager[object]:
        """Return what to hold while the tensors of ``begin`` are written."""
        return self.lock if self._in_place else nullcontext()

    def begin(self, delta: Delta | None) -> dict[str, Tensor]:
        """Return where the next version is written: the tensors in use, or others beside them."""
        if self._in_place:
            return {name: local(tensor) for name, tensor in self.tensors.items()}
        if self._other is None:
            self._other = {name: torch.empty_like(local(tensor)) for name, tensor in self.tensors.items()}
        other = self._other
        if self._swaps and delta is not None:
            behind = dict.fromkeys(self.tensors) if self._behind is None else self._behind
            for name in behind.keys() & other.keys():
                if name not in delta or delta[name] is not None:
                    other[name].copy_(local(self.tensors[name]))
            self._behind = {}
        # Until this version is there, what it writes of them may be anything.
        self._behind = merged(self._behind, delta)
        return other

    def commit(self, version: int, delta: Delta | None, written: Iterable[tuple[str, Slices]] = ()) -> None:
        """Change to the version that was begun: ``written`` are the boxes of it."""
        with self.lock:
            if self._other is not None and self._swaps:
                self.tensors, self._other = self._other, {n: local(t) for n, t in self.tensors.items()}
                self._behind = delta
            elif self._other is not None:
                for name, where in written:
                    local(self.tensors[name])[where].copy_(self._other[name][where])
            self.version = version
        if any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()
