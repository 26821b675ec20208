"""Errors of a side channel, and the bytes that are read from it."""

from __future__ import annotations

from rankmesh.errors import AgreementError

__all__ = ["LARGEST", "LARGEST_EACH", "LARGEST_LIST", "PATIENCE", "ChannelLost", "foreign"]

# Bytes of one value: a store with libuv takes no more at once. Of the texts of all ranks under one key: of a world of
# any size, or for each rank where that is more.
LARGEST, LARGEST_LIST, LARGEST_EACH = 2**23, 2**25, 2**11
# Seconds that a store may take to answer before it counts as gone.
PATIENCE = 5.0


class ChannelLost(RuntimeError):
    """The channel does not answer: whoever serves it is gone, or the way to it is cut."""


def foreign(key: str, what: str) -> AgreementError:
    """Return the error for a value that no rank has written."""
    return AgreementError(
        f"{key!r} holds {what}; another program writes under rankmesh's keys; give the job a store of its own", key=key
    )
