"""Live groups: the process groups of one rank, in a world that torch.distributed has initialised.

```
connect         plans -> LiveGroups, a view of the world
world           what all plans of this process share: store, order, devices, names
agreement       ranks agree before anything is made, and go on together
init, devices   from a launcher to an initialised world
schedule        whether the world can serve a plan, and what this rank does to make its groups, in the one order of all
connection      the process groups of one plan: the world makes and destroys them
live, handles   a view of them: the groups of this rank by name
naming          names as pure functions, and back
discover, measure   the cluster of the ranks, and what their collectives take
report          what exists, what is shared, what it cost
```
"""

from typing import TYPE_CHECKING

from rankmesh.core.lazy import loader
from rankmesh.errors import extra

with extra("torch"):
    import torch.distributed  # noqa: F401  - checked here once, for every module of this package

from rankmesh.runtime.connect import LiveJob, connect
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World, close_all

if TYPE_CHECKING:
    from rankmesh.runtime.report import GroupReport, Report

__all__ = [
    "GroupReport",
    "LiveGroup",
    "LiveGroups",
    "LiveJob",
    "Report",
    "World",
    "close_all",
    "connect",
]

__getattr__, __dir__ = loader(__name__, {"GroupReport": "report", "Report": "report"})
