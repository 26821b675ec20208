"""Many ranks in one process: real collective semantics, exact results, and divergence found at once.

```
run          a function on every rank, one thread each; what each returned
scheduler    one rank runs at a time: which is next, and what each waits for
channel      the calls of one group's members, matched and compared; what looks at them, and may change them
compute      what each collective gives
group        a process group as torch.distributed calls it; works, store: what it returns, what it waits at
process      random numbers, environment and module globals, for each rank its own
watchdog     ranks that make no progress; when torch.distributed answers threads that are ranks
comparison   the same numbers under every layout, and which group would have made them so
failures     the errors and their messages
```

>>> from rankmesh import sim
>>> def backwards(groups):
...     import torch, torch.distributed as dist
...     names = ["dp", "tp"] if dist.get_rank() in (0, 3) else ["tp", "dp"]
...     for name in names:
...         dist.all_reduce(torch.ones(1), group=groups[name].pg)
>>> try:
...     sim.run(backwards, "tp=2,dp=2")
... except sim.RanksFailed as error:
...     print(error.failures[0].kind, error.failures[0].group)
deadlock dp@tp0
"""

from rankmesh.errors import extra

with extra("torch"):
    import torch.distributed  # noqa: F401  - checked here once, for every module of this package

from rankmesh.sim.comparison.compare import compare
from rankmesh.sim.comparison.result import Comparison, Difference
from rankmesh.sim.comparison.seen import random, see, see_activations, shard
from rankmesh.sim.failures import DivergenceError, HungRank, RanksFailed
from rankmesh.sim.run import run

__all__ = [
    "Comparison",
    "Difference",
    "DivergenceError",
    "HungRank",
    "RanksFailed",
    "compare",
    "random",
    "run",
    "see",
    "see_activations",
    "shard",
]
