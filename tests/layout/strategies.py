"""Random meshes and random kinds of group, each kind with its dumb answer."""

from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st
from tests.layout import brute

from rankmesh import Groups, Mesh

EITHER = st.booleans()
NAMES = ("tp", "cp", "dp", "pp", "ep")


@st.composite
def sizes(draw, most_axes=4, most=4):
    """Sizes of one to ``most_axes`` axes with names in any order, at most 96 ranks in all."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=most_axes, unique=True))
    chosen = {}
    for name in names:
        chosen[name] = draw(st.integers(1, min(most, 96 // prod(chosen.values()))))
    return chosen


@st.composite
def meshes(draw, mapped=EITHER, **limits):
    """A mesh with an offset and, if ``mapped`` says so, a rank map."""
    axes = draw(sizes(**limits))
    offset, size = draw(st.integers(0, 9)), prod(axes.values())
    ranks = list(range(offset, offset + size))
    if draw(mapped):
        draw(st.randoms(use_true_random=False)).shuffle(ranks)
    return Mesh(offset=offset, rank_map=ranks, **axes)


@st.composite
def factors(draw, total):
    """Integers whose product is ``total``, ones among them."""
    parts = []
    while total > 1:
        part = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        parts.append(part)
        total //= part
        if len(parts) == 4:
            parts[-1] *= total
            break
    return tuple(parts) or (1,)


@st.composite
def axes_of(draw, mesh):
    """Some axes of a mesh in any order; sometimes none at all."""
    return tuple(draw(st.lists(st.sampled_from(list(mesh.axes)), unique=True)))


@dataclass(frozen=True)
class Kind:
    """One kind of group and the lists that it must equal; ``whole`` are the lists before the pick."""

    groups: Groups
    expected: list
    whole: list


@st.composite
def kinds(draw, mesh, *, ordered=EITHER, levels=EITHER, picks=EITHER):
    """A random kind of group of ``mesh``, narrowed or not."""
    axes, order = draw(axes_of(mesh)), draw(ordered)
    found = mesh.groups(axes, ordered=order)
    listed = brute.groups(mesh.axes, axes, offset=mesh.offset, rank_map=mesh.rank_map, ordered=order)
    if draw(levels):
        widths = draw(factors(len(listed[0])))
        chosen = draw(st.integers(0, len(widths) - 1))
        found = found.level_of(widths, chosen)
        listed = [piece for group in listed for piece in brute.level(group, widths, chosen)]
    whole = listed
    if draw(picks):
        size = len(listed[0])
        positions = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=4))
        found, listed = found.pick(positions), [brute.pick(group, positions) for group in listed]
    return Kind(found, listed, whole)
