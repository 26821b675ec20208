"""Megatron-Core's process-group modules as drop-ins.

```
parallel_state           megatron.core.parallel_state; ParallelState("name") makes further, independent ones
hyper_comm_grid          megatron.core.hyper_comm_grid
process_groups_config    megatron.core.process_groups_config
install(), uninstall()   put these in place of Megatron's own, in a program that stays as it is
```

``table.py`` is the interface as data, ``groups_of.py`` the rules that make functions of it; ``data_parallel.py`` and
``stages.py`` hold what no rule makes, ``lifecycle.py`` begins and ends a state.
"""

from rankmesh.dialects.megatron.installing import install, uninstall
from rankmesh.dialects.megatron.state import ParallelState

__all__ = ["ParallelState", "install", "uninstall"]
