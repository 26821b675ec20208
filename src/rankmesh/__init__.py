"""Describe an N-D parallel layout once; rankmesh proves it, shows it, and turns it into live process groups.

>>> import rankmesh as rm
>>> mesh = rm.Mesh(tp=2, cp=2, dp=4, pp=2)
>>> plan = rm.Plan(mesh, [rm.GroupSpec("tp"), rm.GroupSpec("dp_cp", axes="dp-cp", timeout=600)])
>>> plan.of(13)["dp_cp"].ranks
(1, 3, 5, 7, 9, 11, 13, 15)

Planning needs numpy alone. Placements, transfers and recipes are loaded when they are first used, and so is
torch: by ``rm.connect`` and whatever else is live.
"""

from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

from rankmesh.core import Group, Groups, GroupSpec, Mesh, Options, Pick, Plan, ends, first, last, lazy
from rankmesh.errors import (
    AgreementError,
    ClusterError,
    ConnectError,
    Diverged,
    LayoutError,
    LostState,
    MissingExtra,
    NotAMember,
    PlacementError,
    PlanError,
    ProofError,
    RankmeshError,
    TransferError,
    UnknownAxis,
    UnknownGroup,
    extra,
)

if TYPE_CHECKING:
    from rankmesh.core import Job, Sharding, recipes
    from rankmesh.core.clusters.cluster import Cluster
    from rankmesh.core.source import read_plan as read
    from rankmesh.debug.verification.check import check
    from rankmesh.guard import Guard
    from rankmesh.placement import Placed, Traffic, place
    from rankmesh.runtime import LiveGroup, LiveGroups, LiveJob, close_all
    from rankmesh.runtime.connect import connect
    from rankmesh.runtime.discover import discover
    from rankmesh.runtime.init import LiveRank, init
    from rankmesh.survival import survive
    from rankmesh.transfer import Transfer
    from rankmesh.transfer.sync import Sync

__all__ = [
    "AgreementError",
    "Cluster",
    "ClusterError",
    "ConnectError",
    "Diverged",
    "Group",
    "GroupSpec",
    "Groups",
    "Guard",
    "Job",
    "LayoutError",
    "LiveGroup",
    "LiveGroups",
    "LiveJob",
    "LiveRank",
    "LostState",
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
    "Sync",
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
    "survive",
]

__version__ = "1.0.0rc1"


def _read_file(path: str | PathLike[str], world_size: int | None) -> Any:
    from rankmesh.readers.source import read

    return read(path, world_size=world_size)


def _watch(record: bool | str | PathLike[str]) -> Any:
    from rankmesh.debug.watch.switch import begin

    return begin(record)


# What the kernel has other parts do: read a layout from a file, and watch over a world that is recorded.
lazy.read_file, lazy.watch = _read_file, _watch

# Where each name is that is loaded when it is first used; of those below, torch is too.
_LAZY = {
    "Cluster": "rankmesh.core.clusters.cluster:Cluster",
    "Job": "rankmesh.core.job:Job",
    "Placed": "rankmesh.placement:Placed",
    "Sharding": "rankmesh.core.sharding:Sharding",
    "Traffic": "rankmesh.placement:Traffic",
    "Transfer": "rankmesh.transfer:Transfer",
    "place": "rankmesh.placement:place",
    "read": "rankmesh.core.source:read_plan",
    "recipes": "rankmesh.core.recipes",
}
_LIVE = {
    "Guard": "rankmesh.guard:Guard",
    "LiveGroup": "rankmesh.runtime:LiveGroup",
    "LiveGroups": "rankmesh.runtime:LiveGroups",
    "LiveJob": "rankmesh.runtime:LiveJob",
    "LiveRank": "rankmesh.runtime.init:LiveRank",
    "Sync": "rankmesh.transfer.sync:Sync",
    "check": "rankmesh.debug.verification.check:check",
    "close_all": "rankmesh.runtime:close_all",
    "connect": "rankmesh.runtime.connect:connect",
    "discover": "rankmesh.runtime.discover:discover",
    "init": "rankmesh.runtime.init:init",
    "survive": "rankmesh.survival:survive",
}


def __getattr__(name: str) -> Any:
    if name in _LIVE:
        with extra("torch"):
            return _loaded(_LIVE[name])
    if name in _LAZY:
        return _loaded(_LAZY[name])
    raise AttributeError(f"module 'rankmesh' has no attribute {name!r}")


def _loaded(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
