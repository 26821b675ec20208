"""Layouts and plans: what ranks are in which groups, before anything is live. Needs numpy alone.

```
strided         the (size, stride) patterns that everything is made of
axes            names, sizes and order strings
rank_range      the ranks of a mesh and their order
mesh            coordinates, groups, views, splits
groups          one group, and all groups of one kind
picks           a choice of positions inside each group
job             several meshes in one world
sharding        how one tensor is sharded on a mesh: cuts of each dimension, shard maps, boxes
options         how a group's process group is made, and inheritance; time limits
spec            one kind of group
plan            the ordered kinds over a mesh; digest, of(rank)
local           one rank's part of a plan, and which of its groups share a communicator
saved           plans as JSON, and their digest
explain         one rank in words
lazy            names that are loaded when they are first used
recipes         the layouts of Megatron-Core, nanotron, ezpz, torchtitan, three_d, accelerate, deepspeed
presets         published layouts of real runs
nccl_config     a Megatron-style file of NCCL options
difference      what differs between two plans, rank by rank
communicators   which groups of a plan use one communicator, drawn and counted
documents       files and texts from outside, read within limits
lines           text that a prompt shows as lines
```
"""

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
