"""Worlds of one process: torch's fake backend stands for the other ranks, so that code runs as any of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.meshes import forget_meshes
from rankmesh.errors import ConnectError

__all__ = ["fake_world"]

_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list")


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be this rank of a world of this size: collectives of any group return at once, and change nothing.

    Raises ``ConnectError`` inside a job, whose default group this would replace.
    """
    if dist.is_initialized():
        raise ConnectError(
            "this process is part of a job already, and a layout is read by acting as every rank in turn; call it "
            "before init_process_group(), or in a process of its own"
        )
    new_group = dist.new_group

    def fake_group(*given: Any, **options: Any) -> Any:
        return new_group(*given, **{**options, "backend": "fake", "pg_options": None, "device_id": None})

    # A receiver of objects would make memory of a size that nobody sent, and unpickle what was there before.
    replaced: dict[str, Any] = {"new_group": fake_group, **dict.fromkeys(_OF_OBJECTS, _nothing)}
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with mock.patch.multiple(dist, **replaced):
            yield
    finally:
        if dist.is_initialized():  # what ran may have ended it
            dist.destroy_process_group()
        forget_meshes()


def _nothing(*_given: object, **_options: object) -> None:
    pass
