"""The overview of a plan: the facts that text and JSON show alike.

>>> from rankmesh.readers.source import read
>>> facts = overview(read("tp=2,dp=2"), gpus_per_node=2)
>>> [(kind.name, kind.count, kind.size, kind.stride, kind.examples[0]) for kind in facts.kinds]
[('tp', 2, 2, '2x1', (0, 1)), ('dp', 2, 2, '2x2', (0, 2))]
>>> facts.communicators_least, facts.nodes, facts.kinds[1].crossings.crossing
(2, 2, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from rankmesh.core.axes import integer
from rankmesh.core.communicators import Communicators, KindUse, Unshared, communicators, unshared
from rankmesh.core.groups import Groups
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.core.strided import Strided
from rankmesh.readers.source import Source

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster
    from rankmesh.placement import Crossings

__all__ = ["AxisRow", "KindRow", "LayoutRow", "Origin", "Overview", "nodes_text", "overview"]

_EXAMPLES = 8


@dataclass(frozen=True)
class Origin:
    """Origin of a plan: ``kind`` is axes, recipe, preset, file or config; presets have the rest."""

    spec: str
    kind: str
    title: str | None
    source: str | None
    note: str | None


@dataclass(frozen=True)
class AxisRow:
    """One axis; ``shared``: the mesh and the view have the same groups along it."""

    name: str
    size: int
    stride: int
    shared: bool


@dataclass(frozen=True)
class LayoutRow:
    """The mesh (``view`` None) or one of its views."""

    view: str | None
    axes: tuple[AxisRow, ...]


@dataclass(frozen=True)
class KindRow:
    """One kind of group.

    ``stride``     the pattern of a group's members, sizes x strides in positions
    ``part``       what narrows the groups: a pick, a level of a hierarchy; None for whole groups
    ``examples``   the first members of the first groups
    ``crossings``  None unless the cluster is known
    ``level``      the innermost level that holds each group, where a cluster was given
    ``crossing``   how many groups cross each level, but for hosts and the outermost, where a cluster was given
    """

    name: str
    axes: tuple[str, ...]
    view: str | None
    part: str | None
    count: int
    size: int
    stride: str
    examples: tuple[tuple[int, ...], ...]
    options: Mapping[str, object]
    communicator: KindUse
    crossings: Crossings | None
    level: str | None
    crossing: dict[str, int]


@dataclass(frozen=True)
class Overview:
    """A plan at a glance; ranks ``first`` to ``last`` are in the mesh.

    ``nodes`` hosts of the ``cluster`` hold its world, each with up to ``gpus_per_node`` devices; None without one.
    """

    origin: Origin
    world_size: int
    first: int
    last: int
    digest: str
    gpus_per_node: int | None
    nodes: int | None
    cluster: Cluster | None
    layouts: tuple[LayoutRow, ...]
    kinds: tuple[KindRow, ...]
    communicators_least: int
    communicators_most: int
    communicators_total: int
    unshared: tuple[Unshared, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data with stable keys; the words for each kind's communicator come along."""
        data = asdict(replace(self, cluster=None))
        del data["cluster"]
        for row, kind in zip(data["kinds"], self.kinds, strict=True):
            row["communicator"]["words"] = str(kind.communicator)
            if kind.level is None:
                del row["level"], row["crossing"]
        return data


def overview(
    source: Source,
    *,
    cluster: Cluster | None = None,
    gpus_per_node: int | None = None,
    members: int = 8,
    kinds: Sequence[str] | None = None,
) -> Overview:
    """Return the overview of a plan; ``kinds`` keeps these rows, ``members`` limits the ranks listed of a group.

    Without a ``cluster``, ``gpus_per_node`` makes one of equal hosts; without both a preset's own is used, and other
    plans have no crossings. Communicators are always counted for the whole plan.
    """
    plan, preset = source.plan, source.preset
    if gpus_per_node is None and preset is not None:
        gpus_per_node = preset.gpus_per_node
    given = cluster is not None
    if cluster is None and gpus_per_node is not None:
        from rankmesh.core.clusters.cluster import Cluster

        cluster = Cluster.of_nodes(gpus_per_node, plan.world_size)
    integer(members, "members", least=1)
    chosen = [plan.spec(name) for name in kinds] if kinds else list(plan.specs)
    use = communicators(plan)
    return Overview(
        origin=_origin(source),
        world_size=plan.world_size,
        first=plan.mesh.offset,
        last=plan.mesh.rank_range.stop - 1,
        digest=plan.digest,
        gpus_per_node=None if cluster is None else max(cluster.host_sizes),
        nodes=None if cluster is None else len(cluster.filling(cluster.host_level, plan.world_size)),
        cluster=cluster,
        layouts=tuple(_layout(plan.mesh, view) for view in (None, *plan.mesh.views)),
        kinds=tuple(_kind(plan, spec, use, members, cluster, given) for spec in chosen),
        communicators_least=use.least,
        communicators_most=use.most,
        communicators_total=use.total,
        unshared=unshared(plan),
    )


def nodes_text(facts: Overview) -> str:
    """Count the nodes of the world, the ranks of a node, and the ranks of the last one if it is not full.

    >>> from rankmesh.core.clusters.cluster import Cluster
    >>> from rankmesh.readers.source import read
    >>> nodes_text(overview(read("dp=20"), gpus_per_node=8))
    '3 nodes of 8, the last with 4'
    >>> nodes_text(overview(read("dp=16"), cluster=Cluster.parse("board=4,host=2,leaf=2")))
    '2 nodes of 8, board: 4 of 4'
    """
    words = f"{facts.nodes:,} node{'' if facts.nodes == 1 else 's'} of {facts.gpus_per_node}"
    if facts.cluster is None:
        return words
    counts = facts.cluster.filling(facts.cluster.host_level, facts.world_size)
    if len(counts) > 1 and (counts[:-1] == facts.gpus_per_node).all() and counts[-1] < counts[0]:
        words += f", the last with {counts[-1]}"
    for number in range(facts.cluster.host_level):
        counts = facts.cluster.filling(number, facts.world_size)
        words += f", {facts.cluster.levels[number].name}: {len(counts):,} of {counts.max()}"
    return words


def _origin(source: Source) -> Origin:
    preset = source.preset
    if preset is None:
        return Origin(source.text, source.kind, None, None, None)
    return Origin(source.text, source.kind, preset.title, preset.source, preset.note or None)


def _layout(mesh: Mesh, view: str | None) -> LayoutRow:
    layout = mesh.view(view)
    return LayoutRow(
        view,
        tuple(
            AxisRow(name, size, layout.strides[name], view is not None and _shared(mesh, view, name))
            for name, size in layout.axes.items()
        ),
    )


def _shared(mesh: Mesh, view: str, axis: str) -> bool:
    return axis in mesh.axes and mesh.groups(axis).partition == mesh.groups(axis, view=view).partition


def _kind(
    plan: Plan, spec: GroupSpec, use: Communicators, members: int, cluster: Cluster | None, given: bool
) -> KindRow:
    groups = plan.groups(spec.name)
    crossed, level, crossing = None, None, {}
    if cluster is not None:
        from rankmesh.placement import crossings, widest

        crossed = crossings(groups, cluster)
        if given:
            others = [each.name for number, each in enumerate(cluster.levels[:-1]) if number != cluster.host_level]
            level = widest(groups, cluster).name
            crossing = {name: crossings(groups, cluster, name).crossing for name in others}
    return KindRow(
        name=spec.name,
        axes=spec.axes,
        view=spec.view,
        part=_part(spec),
        count=len(groups),
        size=groups.size,
        stride=_stride(groups),
        examples=tuple(group[:members] for group in groups[:_EXAMPLES]),
        options=spec.options.to_dict(),
        communicator=use.kinds[spec.name],
        crossings=crossed,
        level=level,
        crossing=crossing,
    )


def _part(spec: GroupSpec) -> str | None:
    words = []
    if spec.levels is not None and spec.level is not None and prod(spec.levels) > spec.levels[spec.level]:
        words.append(f"level {spec.level}")
    if spec.pick is not None:
        words.append(str(spec.pick))
    return ", ".join(words) or None


def _stride(groups: Groups) -> str:
    pattern = groups.partition[1]
    if groups.picked is None:
        return str(pattern) if isinstance(pattern, Strided) else "uneven"
    if groups.level is not None:
        return "picked"
    values = [groups.members.value(position) for position in groups.picked]
    steps = {after - before for before, after in pairwise(values)}
    if len(steps) > 1:
        return "picked"
    return f"{len(values)}x{steps.pop()}" if steps else "1"
