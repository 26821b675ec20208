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
from rankmesh.extras import extra
from rankmesh.layout import Group, Groups, Job, Mesh, Pick, Sharding, ends, first, last
from rankmesh.placement import Placed, Traffic, place
from rankmesh.plan import GroupSpec, Options, Plan, recipes
from rankmesh.topology import Cluster
from rankmesh.transfer import Transfer

if TYPE_CHECKING:
    from rankmesh.groups import LiveGroup, LiveGroups, LiveJob, close_all
    from rankmesh.groups.connect import connect
    from rankmesh.groups.discover import discover
    from rankmesh.launch.world import LiveRank
    from rankmesh.proof.check import check
    from rankmesh.readers.source import read_plan as read
    from rankmesh.watch.joined import init

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
    "LiveGroup": "rankmesh.groups",
    "LiveGroups": "rankmesh.groups",
    "LiveJob": "rankmesh.groups",
    "LiveRank": "rankmesh.launch.world",
    "check": "rankmesh.proof.check",
    "close_all": "rankmesh.groups",
    "connect": "rankmesh.groups.connect",
    "discover": "rankmesh.groups.discover",
    "init": "rankmesh.watch.joined",
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
