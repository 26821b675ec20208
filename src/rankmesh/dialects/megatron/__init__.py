"""Megatron-Core's process-group modules as drop-ins.

```
parallel_state           megatron.core.parallel_state; ParallelState("name") makes further, independent ones
hyper_comm_grid          megatron.core.hyper_comm_grid
process_groups_config    megatron.core.process_groups_config
install(), uninstall()   put these in place of Megatron's own, in a program that stays as it is
```

``table.py`` has the groups and globals as data, ``getters.py`` the rules that make functions of a line;
``model_groups.py`` and ``data_groups.py`` have these lines, and what no rule makes; ``state.py`` lays them over the
globals of a state, ``lifecycle.py`` begins and ends one. ``releases.py`` has what differs by release.
"""

# The default state first: it gives every ParallelState its functions.
from rankmesh.dialects.megatron import parallel_state as _default  # noqa: F401
from rankmesh.dialects.megatron.installing import global_reads, install, uninstall
from rankmesh.dialects.megatron.state import ParallelState
from rankmesh.dialects.megatron.strict import GlobalRead

__all__ = ["GlobalRead", "ParallelState", "global_reads", "install", "uninstall"]
