"""torchtitan's ``ParallelDims``: its degrees, and the device meshes over them; no process group twice.

```
dataloading   pp  batch         .       cp   tp           batch  = dp_replicate x dp_shard
dense         pp  dp_replicate  dp_shard cp  tp           loss   = batch x cp
              pp  dp_replicate  fsdp         tp           fsdp   = dp_shard x cp            (partial_dtensor)
              pp  dp            .       cp   tp           dp     = batch                    (spmd_types)
sparse        pp  dp_replicate  efsdp        ep           efsdp  = dp_shard x cp x tp / ep
```

```python
from rankmesh.dialects.torchtitan import ParallelDims      # instead of torchtitan.distributed
dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=8)
fully_shard(model, mesh=dims.get_mesh("fsdp"))
```

What differs: torchtitan makes process groups for each of its meshes, most of them several times; here each set of ranks
has one, after the ranks have agreed on the degrees, and ``close`` destroys them. Degrees that it asserts on are a
``SizesError``, which is an ``AssertionError`` too. Source: torchtitan 0.3.0, ``torchtitan.distributed.parallel_dims``;
where a newer one is installed, or sources without ``full_dtensor`` and ``spmd_meshes``, a ``UserWarning`` says so.
"""

from rankmesh.dialects.torchtitan.dims import ParallelDims

__all__ = ["ParallelDims"]
