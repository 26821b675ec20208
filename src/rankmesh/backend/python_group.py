"""A process group that is written in Python: the private methods by which torch calls one, in words of its own.

```
torch                                     a subclass
_allgather_base, _reduce_scatter_base     all_gather_single, reduce_scatter_single
_start_coalescing, _end_coalescing        start_together, end_together
_get_backend, _device_types               itself, for tensors of the processor
_get_sequence_number_for_group            calls_made
_source_rank                              source_rank, of the work that a call returns
group_name, group_desc                    given by whoever registers it
```
"""

# torch's stubs lack these private parts.
# mypy: disable-error-code="attr-defined,no-any-return,override"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PythonGroup", "PythonWork"]


class PythonGroup(dist.ProcessGroup):
    """The group of ``size`` ranks in which this one is at ``position``; a subclass has the methods on the right."""

    supports_coalescing = True

    def __init__(self, position: int, size: int) -> None:
        super().__init__(position, size)  # type: ignore[call-arg]  # the stubs lack this overload
        self._name = self._desc = ""

    # -- how torch asks for it ----------------------------------------------------------------------------------

    def _allgather_base(self, *given: Any, **named: Any) -> dist.Work:
        return self.all_gather_single(*given, **named)

    def _reduce_scatter_base(self, *given: Any, **named: Any) -> dist.Work:
        return self.reduce_scatter_single(*given, **named)

    def _start_coalescing(self, device: object = None) -> None:
        self.start_together()

    def _end_coalescing(self, device: object = None) -> dist.Work:
        return self.end_together()

    def _set_sequence_number_for_group(self) -> None:
        """Ignore torch's sequence number: the number in the recorder counts the calls of this rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls_made

    # Torch asks a group for its backend on a device: this one is its own, for tensors of the processor.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PythonGroup:
        return self

    # Torch keeps name and description in the backends that are not there.

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that its maker gave."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802  - as torch's C++ asks
        """Return the registered name to C++."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802  - as torch's C++ asks
        """Return the description to C++."""
        return self._desc


class PythonWork(dist.Work):
    """The work of a call on such a group; ``source_rank`` is the position of the sender of a received tensor."""

    def _source_rank(self) -> int:
        return self.source_rank()
