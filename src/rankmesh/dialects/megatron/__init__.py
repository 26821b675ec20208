"""Megatron-Core's process-group modules as drop-ins.

```
parallel_state           megatron.core.parallel_state; ParallelState("name") makes further, independent ones
hyper_comm_grid          megatron.core.hyper_comm_grid
process_groups_config    megatron.core.process_groups_config, for programs without Megatron
install(), uninstall()   put the first two in place of Megatron's own, in a program that stays as it is
```

``parallel_state.py`` has the functions of a state, ``table.py`` its globals, ``getters.py`` makes those that are alike,
``lifecycle.py`` begins and ends a state, ``releases.py`` has what differs by release.
"""

from rankmesh.dialects.megatron.installing import install, uninstall
from rankmesh.dialects.megatron.state import ParallelState

__all__ = ["ParallelState", "install", "uninstall"]
