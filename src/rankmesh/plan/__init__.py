"""Plans: the named groups that a job wants, the same on every rank. No torch.

```
options   how a group's process group is made, and inheritance
spec      one kind of group
plan      the ordered kinds over a mesh; digest, JSON, of(rank)
own       one rank's part of a plan
sharing   which groups use one communicator
explain   one rank in words
recipes   the layouts of Megatron-Core, nanotron, ezpz, torchtitan, three_d, accelerate, deepspeed
presets   published layouts of real runs
nccl_config  a Megatron-style file of NCCL options
difference    what differs between two plans, rank by rank
communicators which groups of a plan use one communicator, drawn and counted
```
"""

from rankmesh.plan.nccl_config import with_nccl_config
from rankmesh.plan.options import Options
from rankmesh.plan.own import OwnGroup, OwnGroups
from rankmesh.plan.plan import Plan
from rankmesh.plan.spec import GroupSpec

__all__ = ["GroupSpec", "Options", "OwnGroup", "OwnGroups", "Plan", "with_nccl_config"]
