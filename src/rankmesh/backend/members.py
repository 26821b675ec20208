"""Groups that their members make by themselves, with private pieces of torch.

``torch.distributed.new_group`` sorts the ranks, names the group by a counter that differs between ranks, and connects
every pair of members at once. The pieces that it is made of do none of this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend import registries
from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.gloo import GlooDevices, delete_address, put_gloo_under
from rankmesh.backend.options import check_backend, config, kinds_of, nccl_options
from rankmesh.backend.protocol import Backend, GroupRequest, Kind
from rankmesh.backend.single_rank import fake_backend, put_under, single_rank_group
from rankmesh.backend.versions import minor

__all__ = ["MemberBackend", "destroy"]


class MemberBackend(Backend):
    """The groups of one world, made by their members alone under rankmesh's own names."""

    def __init__(self, default: DefaultGroup) -> None:
        self._default = default
        self._devices = GlooDevices()

    # -- making ---------------------------------------------------------------------------------------------------

    def check(self, kind: Kind) -> None:
        """Raise ``PlanError`` or ``ConnectError`` for a backend or an option that this torch does not have."""
        check_backend(kind.backend)
        nccl_options(kind.options, kind.backend)

    def create(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        """Return the group, registered with torch; ``NotJoined`` where a member does not join.

        A group of one rank answers each collective at once. Torch splits another one from the communicator of a world
        that is bound to a device.
        """
        if len(request.ranks) == 1:
            return single_rank_group(
                rank=self._default.rank, name=request.name, desc=request.desc, backend=request.kind.backend
            )
        check_backend(request.kind.backend)
        kinds = kinds_of(request.kind.backend)
        if kinds == {"fake"}:
            return self._dry(request)
        return self._gloo(request, deadline) if kinds == {"gloo"} else self._other(request)

    def _dry(self, request: GroupRequest) -> dist.ProcessGroup:
        store = PrefixStore(f"{request.name}/", self._default.store)
        pg = dist.ProcessGroup(store, request.rank, len(request.ranks))
        put_under(pg, fake_backend(request.rank, len(request.ranks)), config(request.kind.backend)[0])
        return self._registered(pg, request, store)

    def _gloo(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        store = PrefixStore(f"{request.name}/", self._default.store)
        pg = dist.ProcessGroup(store, request.rank, len(request.ranks))
        made = put_gloo_under(
            pg,
            self._devices,
            store,
            ranks=request.ranks,
            rank=request.rank,
            name=request.name,
            timeout=request.kind.timeout,
            # Torch takes zero for no limit.
            within=timedelta(seconds=max(deadline - time.monotonic(), 0.01)),
            eager_size=self.eager_size,
            lazy=request.lazy,
            device_types=list(config(request.kind.backend)[0]),
        )
        if minor(torch.__version__) < (2, 14):  # later ones count from zero by themselves
            made._set_sequence_number_for_group()
        return self._registered(pg, request, store)

    @staticmethod
    def _registered(pg: dist.ProcessGroup, request: GroupRequest, store: Store) -> dist.ProcessGroup:
        positions = registries.Positions(request.ranks)
        registries.register(pg, request.kind.backend, store, request.name, request.desc, positions)
        return pg

    def _other(self, request: GroupRequest) -> dist.ProcessGroup:
        helper: Any = c10d._new_process_group_helper
        pg: dist.ProcessGroup = helper(
            len(request.ranks),
            request.rank,
            list(request.ranks),
            c10d.Backend(request.kind.backend),
            self._default.store,
            request.name,
            backend_options=nccl_options(request.kind.options, request.kind.backend),
            timeout=request.kind.timeout,
            device_id=c10d._get_default_group().bound_device_id,
            group_desc=request.desc,
        )[0]
        registries.set_positions(pg, request.ranks)
        return pg

    def decline(self, kind: Kind) -> None:
        """Take part in a split of the world's communicator as a rank that is in none of the new groups."""
        split_source: Any = c10d._get_split_source
        # Until torch 2.15 it depends on no backend.
        given = (kind.backend,) if minor(torch.__version__) >= (2, 15) else ()
        source = split_source(c10d._get_default_group(), *given)
        if source is not None:  # torch splits nothing
            source.perform_nocolor_split(self._default.bound_device)

    # -- the end --------------------------------------------------------------------------------------------------

    def destroy(self, pg: dist.ProcessGroup, *, connected: bool = True) -> None:
        """Destroy a group, leaving torch's registries and the store as they were.

        But for its address in the store where members may be about to read it: gloo crashes on one that is gone.
        """
        self._devices.finish_cut()
        # A store that does not answer is not waited for again, group by group.
        self.store_lost |= not destroy(pg, addresses=connected and not self.store_lost)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Cut the connections of gloo's groups, on all devices of this world; abort the others' communicators together.

        gloo's own ``abort`` does nothing, and an error does not spread by itself: every surviving rank aborts.
        """
        self._devices.drain = self.drain or self._devices.drain
        self._devices.cut()
        known = [(pg, registries.place_of(pg)) for pg in groups if pg.size() > 1]
        others = [pg for pg, place in known if place is not None and not kinds_of(place[0]) <= {"gloo", "fake"}]
        if others:
            from rankmesh.backend.nccl import abort_together

            abort_together(others)

    def release(self) -> None:
        """Keep no gloo device: no group is left."""
        self._devices.release()


def destroy(pg: dist.ProcessGroup, *, addresses: bool = True) -> bool:
    """Destroy a group that was made from private pieces; a world that was destroyed before took it along already.

    ``addresses``: delete gloo's from the store, too. Returns whether the store answered, where it was needed.
    """
    known = registries.place_of(pg)
    if known is None:
        return True
    position, size = pg.rank(), pg.size()
    registries.unregister(pg)
    here = addresses and size > 1 and kinds_of(known[0]) == {"gloo"}
    return not here or delete_address(known[1], position)
