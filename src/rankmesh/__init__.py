"""Describe an N-D parallel layout once; rankmesh proves it, shows it, and turns it into live process groups.

>>> import rankmesh as rm
>>> mesh = rm.Mesh(tp=2, cp=2, dp=4, pp=2)
>>> plan = rm.Plan(mesh, [rm.GroupSpec("tp"), rm.GroupSpec("dp_cp", axes="dp-cp", timeout=600)])
>>> plan.of(13)["dp_cp"].ranks
(1, 3, 5, 7, 9, 11, 13, 15)

Planning needs numpy alone; ``rm.connect`` loads torch when it is first used.
"""

from typing import TYPE_CHECKING, Any

from rankmesh.errors import (
    AgreementError,
    ConnectError,
    LayoutError,
    NotAMember,
    PlanError,
    ProofError,
    RankmeshError,
    UnknownAxis,
    UnknownGroup,
)
from rankmesh.layout import Group, Groups, Job, Mesh, Pick, ends, first, last
from rankmesh.plan import GroupSpec, Options, Plan, recipes

if TYPE_CHECKING:
    from rankmesh.groups import LiveGroup, LiveGroups, LiveJob, close_all
    from rankmesh.groups.connect import connect

__all__ = [
    "AgreementError",
    "ConnectError",
    "Group",
    "GroupSpec",
    "Groups",
    "Job",
    "LayoutError",
    "LiveGroup",
    "LiveGroups",
    "LiveJob",
    "Mesh",
    "NotAMember",
    "Options",
    "Pick",
    "Plan",
    "PlanError",
    "ProofError",
    "RankmeshError",
    "UnknownAxis",
    "UnknownGroup",
    "close_all",
    "connect",
    "ends",
    "first",
    "last",
    "recipes",
]

__version__ = "0.1.0"

_LIVE = frozenset({"LiveGroup", "LiveGroups", "LiveJob", "close_all", "connect"})


def __getattr__(name: str) -> Any:
    if name in _LIVE:
        from rankmesh import groups

        return getattr(groups, name)
    raise AttributeError(f"module 'rankmesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE})
