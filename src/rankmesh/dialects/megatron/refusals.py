"""Errors of the Megatron dialect: each is also the built-in that Megatron-Core raises in its place.

Megatron-Core checks by ``assert`` and ``RuntimeError``; code that catches either still does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankmesh.errors import LayoutError, NotAMember, NotInitialized, PlanError, UnknownAxis, UnknownGroup

__all__ = ["NotHere", "NotInitialized", "Refused", "UnknownName", "refusals"]


class NotHere(NotAMember, AssertionError):
    """The group exists, but this rank is not in it."""


class Refused(PlanError, AssertionError, RuntimeError):
    """Arguments from which no parallel state can be made."""


class UnknownName(Refused, KeyError):
    """A name of an axis or of a group that there is not."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors of a plan that are raised inside into Megatron's types, with the same message."""
    try:
        yield
    except Refused:
        raise
    except (UnknownAxis, UnknownGroup) as error:
        raise UnknownName(error.message, **error.values) from error
    except (LayoutError, PlanError) as error:
        raise Refused(error.message, **error.values) from error
