"""A placement in words: before, after, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rankmesh.core.lines import Lines
from rankmesh.errors import PlacementError
from rankmesh.placement.crossings import crossings
from rankmesh.placement.within import SEGMENTS

if TYPE_CHECKING:
    from rankmesh.placement.place import KindCost, Placed

__all__ = ["HOSTS", "by_host", "device_order", "duration", "hostfile", "lines", "report", "saving", "searched", "speed"]

# How many hosts are listed.
HOSTS = 16
# How many blocks of one host are described.
_BLOCKS = 4
# How many hosts are listed with their node rank.
_NODES = 8


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> duration(0.01234), duration(2.5e-5), duration(3.0), duration(0)
    ('12.3 ms', '25 µs', '3 s', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e6:.2g} µs"


def speed(value: float) -> str:
    """Bytes/s with four digits and a unit.

    >>> speed(4.5e11), speed(2.5e7), speed(12.0)
    ('450 GB/s', '25 MB/s', '12 B/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} B/s"


def report(placed: Placed) -> str:
    """Return lines for a person: the order, what it saves, each kind, and how to use it."""
    return Lines("\n".join([*lines(placed), *(f"note: {note}" for note in placed.notes)]))


def lines(placed: Placed, saved: str | None = None, hostfile: str | None = None) -> Iterator[str]:
    """Yield the lines of a report without its notes; ``saved`` and ``hostfile`` are files that were written."""
    yield f"{placed.order} on {placed.cluster}"
    yield saving(placed)
    for kind in sorted(placed.kinds, key=lambda kind: kind.cost - kind.before):
        yield f"  {kind.name}: {_why(kind)}"
    for name, level in placed.within.items():
        yield f"  {name} stays within {level}, as asked"
    holds, devices = by_host(placed, HOSTS + 1), device_order(placed)
    for host, text in list(holds.items())[:HOSTS]:
        order = devices[host]
        yield f"  {host}: {text}" + (f", on its devices {_values(list(order))}" if list(order) != sorted(order) else "")
    if len(holds) > HOSTS:
        yield "  ... by_host() and --json list all hosts"
    yield searched(placed)
    yield from _usage(placed, saved, hostfile)


def saving(placed: Placed) -> str:
    """Return the cost of a step's communication before and after, and the predicted step, in one sentence."""
    before, after = placed.before, placed.cost
    words = "predicted communication of a step: "
    if placed.step is not None and placed.step_before is not None:
        step = _change(placed.step_before.seconds, placed.step.seconds)
        words = f"predicted step: {step}; of which communication adds "
    if before == after:
        return f"{words}{duration(before)}; no other order is at least 0.5% cheaper"
    share = f"{abs(before - after) / before:.1%} {'less' if after < before else 'more'}"
    return f"{words}{_change(before, after)}, {share}"


def _change(before: float, after: float) -> str:
    return duration(after) if before == after else f"{duration(before)} before, {duration(after)} after"


def _usage(placed: Placed, saved: str | None, hostfile: str | None) -> Iterator[str]:
    """Yield lines on how to use a placement: as a plan, by the launcher's order of ranks, by the allocation."""
    plan = f'"{saved}"' if saved else '"placed.json"'
    if placed.unchanged:
        yield "use: start the ranks as now; the launcher's order is the placement"
    elif not _ENGINES.isdisjoint(placed.plan.mesh.views):
        yield from _engine(placed)
    else:
        add = "" if saved else " (add --save placed.json)"
        yield f"use: start the ranks as now, and rm.connect({plan}) on every rank{add}"
        try:
            order = _runs(placed.hostfile())
        except PlacementError:
            order = None
        if order is not None:
            given = f"SLURM_HOSTFILE={hostfile or 'placed.hosts'} srun --distribution=arbitrary"
            add = "" if hostfile else " (add --hostfile placed.hosts)"
            yield f"or without a rank map, as for Megatron: {given}{add}"
            if len(order) == len(set(order)):
                nodes = ", ".join(f"{name} {number}" for number, name in enumerate(order[:_NODES]))
                yield f"or the same by torchrun's --node-rank: {nodes}{', ...' if len(order) > _NODES else ''}"
    yield from _segment(placed)


# The views of plans of vLLM and SGLang, which read no rank map: a rank's device follows from its number.
_ENGINES = {"decode", "attention"}


def _engine(placed: Placed) -> Iterator[str]:
    """Yield how an engine gets the order: hosts by their node rank, and devices by what each host's process sees."""
    devices, hosts = device_order(placed), _runs(_hosts(placed))
    if len(hosts) > len(set(hosts)):
        yield "an engine fills one host after the other, so it cannot have this order; add --within tp=host"
        return
    if len(hosts) > 1:
        nodes = ", ".join(f"{name} {number}" for number, name in enumerate(hosts[:_NODES]))
        yield f"use: start the engine with these node ranks: {nodes}{', ...' if len(hosts) > _NODES else ''}"
    orders = {",".join(map(str, order)) for order in devices.values()}
    if len(orders) == 1:
        yield f"use: CUDA_VISIBLE_DEVICES={orders.pop()} on every host"
    else:
        listed = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))} on {name}" for name, order in devices.items()]
        yield f"use: {'; '.join(listed[:_NODES])}{'; ...' if len(listed) > _NODES else ''}"


def _hosts(placed: Placed) -> list[str]:
    numbers = placed.cluster.hosts_of(np.asarray(placed.rank_map))
    return [placed.cluster.hosts[number].name for number in numbers.tolist()]


def device_order(placed: Placed) -> dict[str, tuple[int, ...]]:
    """Return the devices of each host in the order of the positions on it, numbered as the host numbers them."""
    cluster, ranks = placed.cluster, np.asarray(placed.rank_map)
    device = np.argsort(cluster.ranks)
    found: dict[str, tuple[int, ...]] = {}
    numbers = cluster.hosts_of(ranks)
    for number in dict.fromkeys(numbers.tolist()):
        before = sum(host.devices for host in cluster.hosts[:number])
        found[cluster.hosts[number].name] = tuple((device[ranks[numbers == number]] - before).tolist())
    return found


def hostfile(placed: Placed) -> tuple[str, ...]:
    """Return the host of each position; see ``Placed.hostfile``."""
    cluster, ranks = placed.cluster, np.asarray(placed.rank_map)
    if len(ranks) < placed.plan.world_size:
        raise PlacementError(
            f"the mesh has {len(ranks)} of the {placed.plan.world_size} ranks, so it decides no order of all of them; "
            "use the plan with its rank map"
        )
    hosts = cluster.hosts_of(ranks)
    device = np.argsort(cluster.ranks)
    for host in np.unique(hosts) if cluster.host_level else ():
        if (np.diff(device[ranks[hosts == host]]) < 0).any():
            raise PlacementError(
                f"on {cluster.hosts[host].name} the order of devices counts, too, as there are levels inside hosts; "
                "use the plan with its rank map",
                host=cluster.hosts[host].name,
            )
    return tuple(cluster.hosts[host].name for host in hosts.tolist())


def _runs(hosts: Iterable[str]) -> list[str]:
    return [name for name, _ in groupby(hosts)]


def _segment(placed: Placed) -> Iterator[str]:
    """Yield how many hosts to ask for in one block of Slurm: the most of a group within a block, unless that is 1."""
    cluster = placed.cluster
    within = [kind.name for kind in placed.kinds if kind.level == SEGMENTS]
    if not within or cluster.level(SEGMENTS) <= cluster.host_level:
        return
    most = max(crossings(placed.plan.groups(name), cluster).nodes for name in within)
    hosts = len(np.unique(cluster.hosts_of(np.asarray(placed.rank_map))))
    if most > 1 and hosts % most == 0:
        yield f"ask Slurm for whole sets of hosts: sbatch --nodes={hosts} --segment={most}"


def searched(placed: Placed) -> str:
    """Return the number of placements that were compared, in words."""
    tried = "all placements" if placed.exact else f"the {placed.tried:,} placements tried"
    return f"the cheapest of {tried}; predicted, not measured (rankmesh measure)"


def by_host(placed: Placed, count: int | None = None) -> dict[str, str]:
    """Return the coordinates that each host, or each of the first ``count`` hosts, holds; see ``Placed.by_host``."""
    mesh = placed.plan.mesh
    axes = {name: size for name, size in mesh.axes.items() if size > 1}
    hosts = placed.cluster.hosts_of(np.asarray(placed.rank_map))
    positions = np.argsort(hosts, kind="stable")
    numbers, starts = np.unique(hosts[positions], return_index=True)
    found = {}
    for number, here in zip(numbers[:count].tolist(), np.split(positions, starts[1:])[:count], strict=True):
        at = {name: (here // mesh.strides[name] % size).tolist() for name, size in axes.items()}
        rows = [dict(zip(axes, map(frozenset, zip(row)), strict=True)) for row in zip(*at.values(), strict=True)]
        blocks = _merged(rows, axes)
        texts = [_block(block, axes) for block in blocks[:_BLOCKS]]
        more = [f"and {len(blocks) - _BLOCKS} more blocks"] if len(blocks) > _BLOCKS else []
        found[placed.cluster.hosts[number].name] = "; ".join(texts + more)
    return found


Block = Mapping[str, frozenset[int]]


def _merged(rows: Iterable[Block], axes: Iterable[str]) -> list[Block]:
    """Return the fewest blocks that are found by joining, axis by axis, blocks that are equal along all others."""
    blocks = list(rows)
    for axis in axes:
        joined: dict[tuple[tuple[str, frozenset[int]], ...], Block] = {}
        for block in blocks:
            rest = tuple((name, values) for name, values in block.items() if name != axis)
            values = block[axis] | joined[rest][axis] if rest in joined else block[axis]
            joined[rest] = {**block, axis: values}
        blocks = list(joined.values())
    return blocks


def _block(block: Block, axes: Mapping[str, int]) -> str:
    """Return a block in words, what varies in it first: ``tp 0-7 of dp 0``."""
    if all(len(values) == axes[name] for name, values in block.items()):
        return "all ranks"
    varies = [f"{name} {_values(sorted(values))}" for name, values in block.items() if len(values) > 1]
    fixed = [f"{name} {min(values)}" for name, values in block.items() if len(values) == 1]
    return " of ".join(", ".join(part) for part in (varies, fixed) if part)


def _values(values: list[int]) -> str:
    """Return ``0-7`` for values without a gap, else each value; long lists are cut."""
    if values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ",".join(map(str, values[:8])) + (",..." if len(values) > 8 else "")


def _why(kind: KindCost) -> str:
    where = (
        f"within {kind.level}" if kind.level == kind.level_before else f"within {kind.level}, was {kind.level_before}"
    )
    if abs(kind.cost - kind.before) <= 1e-9 * max(kind.cost, kind.before):
        return f"{where}, {duration(kind.cost)} as before"
    word = "saves" if kind.cost < kind.before else "costs"
    return f"{where}, {duration(kind.before)} -> {duration(kind.cost)}: {word} {duration(abs(kind.before - kind.cost))}"
