"""DeepSpeed's ``mpu`` over live groups, which is also the grid of its ``PipelineModule``.

```
mpu     Mpu, plan          what ``deepspeed.initialize(mpu=...)`` asks
grid    Grid, Topology     what ``PipelineModule`` and its engine ask; ``mpu.as_grid()`` puts it in place of DeepSpeed's
```
"""

from rankmesh.dialects.deepspeed.grid import Topology
from rankmesh.dialects.deepspeed.mpu import Mpu, plan

__all__ = ["Mpu", "Topology", "plan"]
