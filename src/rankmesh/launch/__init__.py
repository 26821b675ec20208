"""Launch: what started this process. No torch.

```
table      what each launcher sets, and where that is written down
started    the environment, as one value: who this process is
address    where the ranks meet, by a resolver or by Slurm
local      processes of this machine that are ranks
```
"""

from rankmesh.launch.started import Launch, started_by

__all__ = ["Launch", "started_by"]
