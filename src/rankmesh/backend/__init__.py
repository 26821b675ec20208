"""Backend: everything of torch's process groups behind one protocol, and everything private of torch.

```
protocol       create, decline, destroy, abort; the request for a group
releases       which class implements it, by release and by a probe
  members      groups made by their members alone; over gloo.py
  public       groups made through torch's public API, where a private piece is missing
  torch_threads   groups of simulated ranks, threads of one process
  single_rank  a group of one rank, without a communicator
default        the world that was initialised        registries   what torch has registered
options        backends and NCCL's options           meshes       DeviceMesh over groups that exist
recorder       flight recorders, counters, frames    versions     the releases that are known, the oldest one
tracing        operators, backward pass, frames
```

No other package of rankmesh touches what is private in torch: tests/groups/test_private.py finds every use.
"""

import torch

from rankmesh.backend.versions import check_torch

check_torch(torch.__version__, distributed=torch.distributed.is_available())
