"""The recorder and the watch: what a hung job leaves behind, and a diagnosis before the backend ends it.

```
recorder   calls with frames, kept by torch in a ring buffer ──> this rank's recording
stacks     the place of each thread, its call and its peer
watch      a thread: a call lasts too long, another rank asks, or SIGUSR1  ──> a dump request
requests   every rank writes its recording; rank 0, or the lowest responsive rank, diagnoses: log and folder
```
"""

from typing import TYPE_CHECKING

from rankmesh.core.lazy import loader

if TYPE_CHECKING:
    from rankmesh.debug.watch.watch import Watch, slow, start

__all__ = ["Watch", "slow", "start"]

# The command that sets the variable of a watch needs no torch.
__getattr__, __dir__ = loader(__name__, dict.fromkeys(__all__, "watch"))
