"""The weights of one rank of an engine: of one version whole, whatever arrives.

The tensors stay the same objects, as engines need them. A version that arrives waits in staging (over a group: as much
memory again) or in the trainer's files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rankmesh.transfer.live.shards import local
from rankmesh.transfer.live.stream import Slices

__all__ = ["Weights"]


class Weights:
    """The ``tensors`` in use, of ``version``; ``lock`` is held while tensors in use change.

    A version is ``staged`` where it may stop halfway, over a group; files of a version are there whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, staged: bool) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.version: int | None = None
        self.lock = threading.RLock()
        self._staged = staged
        self._staging: dict[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors, or the current GPU if it has none."""
        known = next((local(tensor).device for tensor in self.tensors.values()), None)
        if known is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return known or torch.device("cpu")

    def writing(self) -> AbstractContextManager[object]:
        """Return what to hold while the tensors of ``begin`` are written."""
        return nullcontext() if self._staged else self.lock

    def begin(self) -> dict[str, Tensor]:
        """Return where the next version is written: the tensors in use, or others beside them."""
        if not self._staged:
            return {name: local(tensor) for name, tensor in self.tensors.items()}
        if self._staging is None:
            self._staging = {name: torch.empty_like(local(tensor)) for name, tensor in self.tensors.items()}
        return self._staging

    def commit(self, version: int, written: Iterable[tuple[str, Slices]] = ()) -> None:
        """Change to the version that was begun: ``written`` are the boxes of it that are staged."""
        with self.lock:
            for name, where in written:
                local(self.tensors[name])[where].copy_(self.begin()[name][where])
            self.version = version
        if any(tensor.is_cuda for tensor in self.tensors.values()):
            torch.cuda.synchronize()
