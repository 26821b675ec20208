"""Layouts and plans: which ranks are in which groups, before anything is live. Needs numpy alone."""

from typing import TYPE_CHECKING

from rankmesh.core.groups import Group, Groups
from rankmesh.core.lazy import loader
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.picks import Pick, ends, first, last
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec

if TYPE_CHECKING:
    from rankmesh.core.job import Job
    from rankmesh.core.nccl_config import with_nccl_config
    from rankmesh.core.sharding import Shard, Sharding

__all__ = [
    "Group",
    "GroupSpec",
    "Groups",
    "Job",
    "LocalGroup",
    "LocalGroups",
    "Mesh",
    "Options",
    "Pick",
    "Plan",
    "Shard",
    "Sharding",
    "ends",
    "first",
    "last",
    "with_nccl_config",
]

# What a plan does not need.
__getattr__, __dir__ = loader(
    __name__, {"Job": "job", "Shard": "sharding", "Sharding": "sharding", "with_nccl_config": "nccl_config"}
)
