"""nanotron's ``ParallelContext``: of its sources (``ParallelContext``), and of its release 0.4 (``ParallelContext04``).

```
                      axes                parameters after data_parallel_size                    matrix
ParallelContext       ep pp dp cp tp      context_parallel_size, expert_parallel_size, backend   5 dimensions
ParallelContext04     ep pp dp tp         expert_parallel_size, backend                          4 dimensions
```
"""

from rankmesh.dialects.nanotron.context import ParallelContext
from rankmesh.dialects.nanotron.release_0_4 import ParallelContext04

__all__ = ["ParallelContext", "ParallelContext04"]
