"""Live groups: the only layer that imports torch.

```
connect        plan + world -> LiveGroups: check, agree, create
agree          one meeting of all ranks before anything is created
naming         names as pure functions
limits         how long a call may wait
alone          groups of one rank, without a communicator
live, handles  the groups of this rank; who made them destroys them
report         what exists, what is shared, what it cost
torch_private  every private torch call, and the versions it is known on
torch_threads  those by which many ranks live in one process
```
"""

from rankmesh.extras import extra

with extra("torch"):
    import torch.distributed  # noqa: F401  - said here once, for every module of this package

from rankmesh.groups.connect import connect
from rankmesh.groups.handles import LiveGroup
from rankmesh.groups.live import LiveGroups
from rankmesh.groups.report import GroupReport, Report

__all__ = ["GroupReport", "LiveGroup", "LiveGroups", "Report", "connect"]
