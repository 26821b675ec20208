"""Describe an N-D parallel layout once; rankmesh proves it, shows it, and turns it into live process groups.

>>> import rankmesh as rm
>>> mesh = rm.Mesh(tp=2, cp=2, dp=4, pp=2)
>>> plan = rm.Plan(mesh, [rm.GroupSpec("tp"), rm.GroupSpec("dp_cp", axes="dp-cp", timeout=600)])
>>> plan.of(13)["dp_cp"].ranks
(1, 3, 5, 7, 9, 11, 13, 15)

Planning needs numpy alone; ``rm.connect`` loads torch when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankmesh.core import Group, Groups, GroupSpec, Job, Mesh, Options, Pick, Plan, Sharding, ends, first, last, recipes
from rankmesh.core.extras import extra
from rankmesh.errors import (
    AgreementError,
    ClusterError,
    ConnectError,
    LayoutError,
    MissingExtra,
    NotAMember,
    PlacementError,
    PlanError,
    ProofError,
    RankmeshError,
    TransferError,
    UnknownAxis,
    UnknownGroup,
)
from rankmesh.placement import Cluster, Placed, Traffic, place
from rankmesh.transfer import Transfer

if TYPE_CHECKING:
    from rankmesh.debug.verification.check import check
    from rankmesh.debug.watch.joined import init
    from rankmesh.readers.source import read_plan as read
    from rankmesh.runtime import LiveGroup, LiveGroups, LiveJob, close_all
    from rankmesh.runtime.connect import connect
    from rankmesh.runtime.discover import discover
    from rankmesh.runtime.init import LiveRank

__all__ = [
    "AgreementError",
    "Cluster",
    "ClusterError",
    "ConnectError",
    "Group",
    "GroupSpec",
    "Groups",
    "Job",
    "LayoutError",
    "LiveGroup",
    "LiveGroups",
    "LiveJob",
    "LiveRank",
    "Mesh",
    "MissingExtra",
    "NotAMember",
    "Options",
    "Pick",
    "Placed",
    "PlacementError",
    "Plan",
    "PlanError",
    "ProofError",
    "RankmeshError",
    "Sharding",
    "Traffic",
    "Transfer",
    "TransferError",
    "UnknownAxis",
    "UnknownGroup",
    "check",
    "close_all",
    "connect",
    "discover",
    "ends",
    "first",
    "init",
    "last",
    "place",
    "read",
    "recipes",
]

__version__ = "0.1.0"

# Where each name is that loads torch when it is first used.
_LIVE = {
    "LiveGroup": "rankmesh.runtime",
    "LiveGroups": "rankmesh.runtime",
    "LiveJob": "rankmesh.runtime",
    "LiveRank": "rankmesh.runtime.init",
    "check": "rankmesh.debug.verification.check",
    "close_all": "rankmesh.runtime",
    "connect": "rankmesh.runtime.connect",
    "discover": "rankmesh.runtime.discover",
    "init": "rankmesh.debug.watch.joined",
}


def __getattr__(name: str) -> Any:
    if name == "read":
        from rankmesh.readers.source import read_plan

        return read_plan
    if name in _LIVE:
        with extra("torch"):
            return getattr(import_module(_LIVE[name]), name)
    raise AttributeError(f"module 'rankmesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE, "read"})
