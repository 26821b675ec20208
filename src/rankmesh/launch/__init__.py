"""Launch: what started this process, and how it joins the others.

```
table      what each launcher sets, and where that is written down          no torch
started    the environment, as one value: who this process is               no torch
store      where the ranks of a job meet
devices    what each rank could use, and what all of them therefore do
muster     all ranks come together, and agree on that
world      init(): from the launcher to an initialised world, and back
```
"""

from rankmesh.launch.started import Launch, started_by

__all__ = ["Launch", "started_by"]
