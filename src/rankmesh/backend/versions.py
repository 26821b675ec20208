"""Versions: the releases of torch whose private pieces are known, and the oldest that rankmesh runs on.

>>> check_torch("2.15.0+cu132", distributed=True)
>>> check_torch("2.7.1", distributed=True)
Traceback (most recent call last):
rankmesh.errors.ConnectError: torch 2.7.1 is installed, and rankmesh needs 2.8 or newer; pip install 'torch>=2.8'
"""

from __future__ import annotations

from rankmesh.errors import ConnectError

__all__ = ["KNOWN", "MINIMUM", "check_torch", "minor"]

MINIMUM = (2, 8)
KNOWN = tuple((2, second) for second in range(8, 16))


def minor(version: str) -> tuple[int, int]:
    """Return the release of a version of torch: ``2.14.1+cpu`` is of (2, 14)."""
    major, second = version.split(".")[:2]
    return int(major), int("".join(letter for letter in second if letter.isdigit()) or 0)


def check_torch(version: str, *, distributed: bool) -> None:
    """Refuse a torch that is too old, or was built without ``torch.distributed`` (``ConnectError``)."""
    if minor(version) < MINIMUM:
        needed = ".".join(map(str, MINIMUM))
        raise ConnectError(
            f"torch {version} is installed, and rankmesh needs {needed} or newer; pip install 'torch>={needed}'",
            installed=version,
            minimum=needed,
        )
    if not distributed:
        raise ConnectError(
            f"torch {version} was built without torch.distributed, in which groups are made; "
            "pip install --force-reinstall torch, whose wheels have it",
            installed=version,
        )
