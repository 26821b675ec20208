"""Errors of the Megatron dialect: each is also the built-in that Megatron-Core raises in its place.

Megatron-Core checks by ``assert`` and ``RuntimeError``; code that catches either still does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankmesh.errors import LayoutError, NotAMember, NotInitialized, PlanError, UnknownAxis, UnknownGroup

__all__ = [
    "NotHere",
    "NotInitialized",
    "Refused",
    "UnknownName",
    "no_stage_named",
    "refusals",
    "unknown_group_size",
]


class NotHere(NotAMember, AssertionError):
    """The group exists, but this rank is not in it."""


class Refused(PlanError, AssertionError, RuntimeError):
    """Arguments from which no parallel state can be made."""


class UnknownName(Refused, KeyError):
    """A name of an axis or of a group that there is not."""


@contextmanager
def refusals() -> Iterator[None]:
    """Whatever the plan refuses is refused with Megatron's types, in the plan's words."""
    try:
        yield
    except Refused:
        raise
    except (UnknownAxis, UnknownGroup) as error:
        raise UnknownName(error.message, **error.values) from error
    except (LayoutError, PlanError) as error:
        raise Refused(error.message, **error.values) from error


def no_stage_named() -> NotInitialized:
    """Return the error of a question about an interleaved pipeline without the virtual stage."""
    return NotInitialized("vp_stage is not given in an interleaved pipeline; name the virtual stage: vp_stage=0")


def unknown_group_size(received: object, known: list[int]) -> UnknownName:
    """Return the error of a size that no hybrid group of this rank has."""
    return UnknownName(
        f"group_size is {received!r}, but the hybrid groups of this rank have {known} ranks; use one of these, and "
        "hybrid_context_parallel=True at initialisation",
        received=received,
        known=known,
    )
