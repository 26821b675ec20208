"""torch's ``DeviceMesh``: a plan from one, and live groups from one; never a new process group.

```
DeviceMesh(mesh, ("pp", "dp", "tp"))      first dimension slowest     ──plan_of──>   Mesh(tp, dp, pp)
                                          its process groups          ──adopt────>   LiveGroups
```

The other way is `LiveGroups.device_mesh`.

What differs from building a ``DeviceMesh`` with torch: a group that spans the world is a group like any other, not the
world itself, so destroying it destroys nothing else; ranks that have another mesh get an error when the plan is
connected instead of hanging; a one-rank axis costs nothing; timeouts are the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankmesh.core import GroupSpec, Mesh, Options, Plan
from rankmesh.core.axes import axis_name, axis_names
from rankmesh.core.local import LocalGroup
from rankmesh.errors import ConnectError, LayoutError, listed
from rankmesh.runtime.connection import Connection
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["adopt", "plan_of"]


def plan_of(device_mesh: DeviceMesh, *, names: Sequence[str] | None = None, options: Options | None = None) -> Plan:
    """Return the plan of a ``DeviceMesh``: an axis and a group for each of its dimensions, the last dimension adjacent.

    ``names`` are for a mesh without dimension names. The plan is for the world that is initialised, or for one that
    ends with the last rank of the mesh. Raises ``LayoutError`` for a mesh without names, and for one whose ranks are
    not contiguous: a slice; its root has them all.
    """
    given = names if names is not None else device_mesh.mesh_dim_names
    sizes = tuple(device_mesh.mesh.shape)
    if given is None or len(given) != len(sizes):
        raise LayoutError(
            f"this DeviceMesh of {len(sizes)} dimensions has the names {given}; each dimension is an axis with "
            "a name; make it with mesh_dim_names, or pass names",
            names=given,
            shape=sizes,
        )
    ranks = device_mesh.mesh.flatten().tolist()
    if len(ranks) != max(ranks) - min(ranks) + 1:
        raise LayoutError(
            f"this DeviceMesh of the ranks {ranks[:16]} along {tuple(given)} leaves some out: a slice of a "
            f"larger mesh; a layout covers the ranks from its first to its last; give the root mesh that it was "
            "taken from",
            names=tuple(given),
            ranks=tuple(ranks),
        )
    axes = {axis_name(name): size for name, size in zip(axis_names(given), sizes, strict=True)}
    mesh = Mesh(offset=min(ranks), rank_map=ranks, **dict(reversed(axes.items())))
    world = dist.get_world_size() if dist.is_initialized() else mesh.rank_range.stop
    return Plan(mesh, [GroupSpec(name) for name in mesh.axes], world_size=world, options=options)


class _Adopted(Connection):
    """The process groups of a ``DeviceMesh``, which it still owns: ``close`` only forgets them."""

    def __init__(self, device_mesh: DeviceMesh, plan: Plan, world: World) -> None:
        super().__init__(world, plan, plan.of(world.default.rank))
        self._device_mesh = device_mesh

    def open(self, name: str) -> ProcessGroup:
        self.check_open()
        if name not in self.made:
            self.made[name] = self._found(self.local[name])
        return self.made[name]

    def _found(self, local: LocalGroup) -> ProcessGroup:
        pg = self._device_mesh.get_group(tuple(self.plan.mesh.axes)[::-1].index(local.name))
        ranks = tuple(dist.get_process_group_ranks(pg))
        if ranks != local.ranks:
            raise ConnectError(
                f"this DeviceMesh's process group along {local.name!r} has the ranks {listed(ranks)}, in this "
                f"order, where the mesh has {list(local.ranks)}; a rank's place in the group must be its place in the "
                "mesh; make the groups with rankmesh.connect(plan_of(mesh)), which keeps the order",
                axis=local.name,
                group_ranks=ranks,
                mesh_ranks=local.ranks,
            )
        return pg

    def close(self) -> None:
        self.made.clear()
        super().close()


def adopt(device_mesh: DeviceMesh, *, names: Sequence[str] | None = None) -> LiveGroups:
    """Return live groups over the process groups that a ``DeviceMesh`` has: no new one, nothing to agree on.

    The owner of the mesh destroys them; ``close`` only forgets them.

    Raises ``ConnectError`` where a process group lists its members in another order than the mesh, as torch's do on a
    mesh of permuted ranks, and ``LayoutError`` as ``plan_of``.
    """
    # Two dimensions with the same ranks may have two process groups; each handle has its own dimension's.
    plan, world = plan_of(device_mesh, names=names, options=Options(share=False)), World.current()
    groups = LiveGroups(_Adopted(device_mesh, plan, world), {})
    for group in groups.values():
        group.pg  # noqa: B018  - compared now, not at its first use
    return groups
