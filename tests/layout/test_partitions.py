"""Which kinds are the same groups: every kind of many factorisations of 24 ranks, by their lists."""

from collections import defaultdict
from itertools import permutations

from rankmesh import Mesh

FACTORISATIONS = [(24,), (2, 12), (12, 2), (4, 6), (3, 8), (2, 3, 4), (4, 3, 2), (2, 2, 6), (2, 2, 2, 3)]


def factorisations(total):
    """All ways to write a number as an ordered product of numbers from 2."""
    if total == 1:
        yield ()
    for factor in range(2, total + 1):
        if total % factor == 0:
            for rest in factorisations(total // factor):
                yield (factor, *rest)


def every_kind():
    """(partition, groups as a sorted list of tuples) of each kind, whole and at each level of each hierarchy."""
    for sizes in FACTORISATIONS:
        mesh = Mesh(**dict(zip("abcd", sizes, strict=False)))
        for count in range(len(sizes) + 1):
            for axes in permutations(mesh.axes, count):
                whole = mesh.groups(axes, ordered=True)
                levels = [(w, i) for w in factorisations(whole.size) for i in range(len(w))]
                for kind in (whole, *(whole.level_of(*level) for level in levels)):
                    yield kind.partition, tuple(sorted(map(tuple, kind.tolist())))


def is_one_pattern(groups):
    """Whether all groups are one pattern, shifted."""
    return len({tuple(rank - group[0] for rank in group) for group in groups}) == 1


def test_tiles():
    """Equal partitions are the same groups, and the same groups of one pattern have equal partitions."""
    groups_of, partitions_of = defaultdict(set), defaultdict(set)
    for partition, groups in every_kind():
        groups_of[partition].add(groups)
        partitions_of[groups].add(partition)
    assert len(partitions_of) > 100
    assert all(len(groups) == 1 for groups in groups_of.values())
    assert all(len(partitions) == 1 for groups, partitions in partitions_of.items() if is_one_pattern(groups))
