"""The dumb answers: every coordinate is enumerated, every group is found by looking at all of them."""

from itertools import product


def places(sizes, offset=0, rank_map=None):
    """[(coordinate, rank)] of a whole mesh, the first axis varying fastest."""
    digits = product(*(range(size) for size in reversed(list(sizes.values()))))
    coordinates = [dict(zip(sizes, reversed(digit), strict=True)) for digit in digits]
    ranks = range(offset, offset + len(coordinates)) if rank_map is None else rank_map
    return list(zip(coordinates, ranks, strict=True))


def groups(sizes, axes, *, offset=0, rank_map=None, ordered=False):
    """The groups along ``axes`` as lists of ranks, in the order in which the mesh first meets them."""
    found = {}
    for coordinate, rank in places(sizes, offset, rank_map):
        fixed = tuple(position for axis, position in coordinate.items() if axis not in axes)
        inside = tuple(coordinate[axis] for axis in reversed(axes))
        found.setdefault(fixed, []).append((inside, rank))
    listed = found.values()
    return [[rank for _, rank in (sorted(group) if ordered else group)] for group in listed]


def level(group, widths, chosen):
    """One group cut into the pieces whose positions differ in digit ``chosen`` of ``widths`` only."""
    pieces = {}
    for position, digit in enumerate(product(*(range(width) for width in reversed(widths)))):
        rest = tuple(value for place, value in enumerate(reversed(digit)) if place != chosen)
        pieces.setdefault(rest, []).append(group[position])
    return list(pieces.values())


def pick(group, positions):
    """The ranks at some positions, each once, in the order of choice."""
    return list(dict.fromkeys(group[position] for position in positions))
