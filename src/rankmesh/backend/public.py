"""Groups made through torch's public API alone: for a torch whose private pieces are missing or behave otherwise.

``new_group`` is called by every rank of the world for every group of every kind, in one order: so a group costs the
world what it costs elsewhere only its members, lazy groups are made with the others, a group of one rank is torch's,
and torch names the groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from rankmesh.backend.options import check_backend, nccl_options
from rankmesh.backend.protocol import GroupRequest, Kind
from rankmesh.errors import ConnectError

__all__ = ["PublicBackend"]


class PublicBackend:
    """The groups of one world, each made by all of its ranks together."""

    collective = True

    def create(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        """Not here: every rank takes part in every group."""
        raise ConnectError(
            f"group {request.desc!r} cannot be made by its members alone with this torch; remove lazy from its options"
        )

    def split(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        """The group that this rank is in, of all groups of its kind."""
        found = self._each(request.kind, tuple(request.ranks), request.desc)
        if found is None:
            raise ConnectError(f"this rank is in no group of kind {request.kind.name!r}; this is a fault of rankmesh")
        return found

    def decline(self, kind: Kind) -> None:
        """Take part in making all groups of a kind."""
        self._each(kind, None, kind.name)

    def _each(self, kind: Kind, own: tuple[int, ...] | None, desc: str) -> dist.ProcessGroup | None:
        check_backend(kind.backend)
        found = None
        for ranks in kind:
            made = dist.new_group(
                list(ranks),
                timeout=kind.timeout,
                backend=kind.backend,
                pg_options=nccl_options(kind.options, kind.backend),
                group_desc=desc if ranks == own else kind.name,
                sort_ranks=False,
            )
            if ranks == own:
                found = made
        return found

    def local(self, request: GroupRequest) -> dist.ProcessGroup:
        """Not here: torch's own group of one rank is made by all."""
        return self.create(request, 0.0)

    def destroy(self, pg: dist.ProcessGroup) -> None:
        """Destroy a group, if its world has not taken it along."""
        if dist.is_initialized():
            dist.destroy_process_group(pg)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort each group; gloo's then still wait for their timeout."""
        for pg in groups:
            pg.abort()

    def release(self) -> None:
        """Nothing is kept."""
