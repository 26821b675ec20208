"""Megatron-Core's process-group modules as drop-ins.

```
parallel_state           megatron.core.parallel_state; ParallelState makes further, independent ones
hyper_comm_grid          megatron.core.hyper_comm_grid
process_groups_config    megatron.core.process_groups_config
install(), uninstall()   put these in place of Megatron's own, in a program that stays as it is
```
"""

from rankmesh.dialects.megatron.state import ParallelState

__all__ = ["ParallelState"]
