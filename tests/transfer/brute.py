"""The dumb answers: tensors of element numbers, cut by hand, and linear programs over single elements."""

from collections import defaultdict

import numpy as np


def pieces(numbers, size):
    """A list cut as ``torch.chunk`` does: each piece ⌈n / size⌉ long, the last ones shorter or empty."""
    each = -(-len(numbers) // size)
    return [numbers[i * each : (i + 1) * each] for i in range(size)]


def indices(length, parts, padded, cuts):
    """The indices along one dimension that the rank at these (size, position) has stored; -1 for padding."""
    kept, start = [], 0
    for part in parts or [length]:
        numbers = list(range(start, start + part))
        if not parts and padded:
            numbers += [-1] * (padded - length)
        for size, position in cuts:
            numbers = pieces(numbers, size)[position]
        kept += numbers
        start += part
    return kept


def leaves(mesh, name):
    """(axis, size) of a name, outermost first; a split axis is its sub-axes, the first of which is innermost."""
    if name in mesh.parts:
        return [leaf for part in reversed(mesh.parts[name]) for leaf in leaves(mesh, part)]
    return [(name, mesh.axes[name])]


def local(sharding, rank):
    """The local tensor of a rank: the number of each element in the whole tensor, -1 for padding; None for none."""
    mesh = sharding.mesh.view(sharding.view)
    if rank not in mesh:
        return None
    mine = mesh.coordinate(rank)
    for name, places in (sharding.at or {}).items():
        position, size = 0, 1
        for axis, each in leaves(mesh, name):
            position, size = position * each + mine[axis], size * each
        if position not in [place % size for place in places]:
            return None
    taken = []
    for dim, length in enumerate(sharding.shape):
        names = (sharding.cut[dim] or "").split("-") if sharding.cut[dim] else []
        cuts = [(size, mine[axis]) for name in names for axis, size in leaves(mesh, name)]
        parts = (sharding.parts or {}).get(dim)
        taken.append(indices(length, parts, (sharding.padded or {}).get(dim), cuts))
    numbers = np.arange(int(np.prod(sharding.shape))).reshape(sharding.shape)
    if not taken:
        return numbers
    grid = np.ix_(*[np.array(part, dtype=int).clip(0) for part in taken])
    return np.where(_outside(taken), -1, numbers[grid] if numbers.size else -1)


def _outside(taken):
    outside = np.zeros([len(part) for part in taken], dtype=bool)
    for dim, part in enumerate(taken):
        shape = [1] * len(taken)
        shape[dim] = -1
        outside |= (np.array(part, dtype=int) < 0).reshape(shape)
    return outside


def kept(sharding, rank):
    """The set of elements that a rank holds."""
    mine = local(sharding, rank)
    return set() if mine is None else {int(n) for n in mine.reshape(-1) if n >= 0}


def level(cluster, one, other):
    """How far apart two ranks are; all are equally far without a cluster."""
    if cluster is None:
        return 0
    return next(n for n, units in enumerate(cluster.units) if units[one] == units[other])


def requested(source, target, world, cluster=None):
    """What must travel: bytes by the set of ranks that may send them, and bytes by level."""
    sets, levels = defaultdict(int), defaultdict(int)
    for name, theirs in target.items():
        holders = defaultdict(list)
        for rank in range(world):
            for element in kept(source[name], rank):
                holders[element].append(rank)
        for rank in range(world):
            for element in kept(theirs, rank):
                if rank in holders[element]:
                    continue
                near = min(level(cluster, rank, other) for other in holders[element])
                members = frozenset(o for o in holders[element] if level(cluster, rank, o) == near)
                sets[members] += theirs.itemsize
                levels[near] += theirs.itemsize
    return sets, levels


def least_busiest(sets):
    """The least that the busiest sender can send: a linear program over shares of each set."""
    from scipy.optimize import linprog

    if not sets:
        return 0.0
    ranks = sorted(set().union(*sets))
    shares = [(index, rank) for index, members in enumerate(sets) for rank in sorted(members)]
    goal = [0.0] * len(shares) + [1.0]
    totals = np.zeros((len(sets), len(goal)))
    loads = np.zeros((len(ranks), len(goal)))
    for column, (index, rank) in enumerate(shares):
        totals[index, column] = loads[ranks.index(rank), column] = 1.0
    loads[:, -1] = -1.0
    solved = linprog(goal, A_ub=loads, b_ub=[0] * len(ranks), A_eq=totals, b_eq=list(sets.values()))
    return float(solved.fun)
