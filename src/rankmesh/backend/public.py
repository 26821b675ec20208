"""Groups made through torch's public API alone: for a torch whose private pieces are missing or behave otherwise.

```
split_group    one call for a kind: its NCCL groups, where the world is bound to a device
new_group      one call for each group of any other kind
```

Every rank of the world makes every call, in one order. So a group costs the whole world what a private backend costs
its members. Lazy groups are made with the others, torch makes groups of one rank, too, and names all groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.nccl import abort_together
from rankmesh.backend.options import check_backend, kinds_of, nccl_options
from rankmesh.backend.protocol import Backend, GroupRequest, Kind
from rankmesh.errors import ConnectError, listed

__all__ = ["PublicBackend"]


class PublicBackend(Backend):
    """The groups of one world, each made by all of its ranks together."""

    collective = True

    def __init__(self, default: DefaultGroup) -> None:
        self._default = default

    def check(self, kind: Kind) -> None:
        """Raise ``PlanError`` or ``ConnectError`` for a backend, option or order of members that this torch lacks."""
        check_backend(kind.backend)
        nccl_options(kind.options, kind.backend)
        odd = next((ranks for ranks in kind if list(ranks) != sorted(ranks)), None)
        if odd is not None and not _keeps_order():
            raise ConnectError(
                f"the members of {kind.name!r} are not in ascending order ({listed(odd)}), and new_group of torch "
                f"{torch.__version__} sorts them; pip install 'torch>=2.13'",
                group=kind.name,
                ranks=odd,
            )

    def create(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        """Return the group that this rank is in, of all groups of its kind."""
        found = self._made(request.kind, tuple(request.ranks), request.desc)
        if found is None:
            raise ConnectError(f"this rank is in no group of kind {request.kind.name!r}; this is a fault of rankmesh")
        return found

    def decline(self, kind: Kind) -> None:
        """Take part in making all groups of a kind."""
        self._made(kind, None, kind.name)

    def _made(self, kind: Kind, local: tuple[int, ...] | None, desc: str) -> dist.ProcessGroup | None:
        """All groups of a kind; the one of these ranks."""
        groups, options = [list(ranks) for ranks in kind], nccl_options(kind.options, kind.backend)
        if self._splits(kind, groups):
            return dist.split_group(split_ranks=groups, timeout=kind.timeout, pg_options=options, group_desc=desc)
        found = None
        for ranks in groups:
            here = tuple(ranks) == local
            order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
            made = dist.new_group(
                ranks,
                timeout=kind.timeout,
                backend=kind.backend,
                pg_options=options,
                group_desc=desc if here else kind.name,
                **order,
            )
            found = made if here else found
        return found

    def _splits(self, kind: Kind, groups: Iterable[list[int]]) -> bool:
        """Return whether torch can split the kind from the world: it keeps the world's backend and sorts members."""
        return (
            hasattr(dist, "split_group")
            and self._default.splits
            and kind.backend == self._default.backend
            and kinds_of(kind.backend) == {"nccl"}
            and all(ranks == sorted(ranks) for ranks in groups)
        )

    def destroy(self, pg: dist.ProcessGroup, *, connected: bool = True) -> None:
        """Destroy a group, if its world has not taken it along."""
        if dist.is_initialized():
            dist.destroy_process_group(pg)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort each group; gloo's then still wait for their timeout."""
        abort_together(groups)

    def release(self) -> None:
        """Do nothing: nothing is kept."""


def _keeps_order() -> bool:
    """Return whether ``new_group`` can keep the order of the members; before torch 2.13 it sorts them."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters
