"""Random shardings, and random pairs of layouts with tensors that lie on both."""

from hypothesis import strategies as st

from rankmesh.core.sharding import Sharding
from rankmesh.testing.strategies import meshes, views

DTYPES = ("float32", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn")


@st.composite
def layouts(draw, max_size=12, max_offset=6):
    """A mesh with a view or without, an axis of it split or not, its ranks in any order."""
    limits = {"max_size": max_size, "max_offset": max_offset, "shuffled": draw(st.booleans())}
    mesh = draw(st.one_of(meshes(**limits), views(**limits)))
    wide = [name for name, size in mesh.axes.items() if size >= 4 and size % 2 == 0]
    if wide and draw(st.booleans()):
        mesh = mesh.split(wide[0], inner=2, outer=...)
    return mesh


@st.composite
def shardings(draw, mesh, shape, dtype="float32"):
    """A sharding of a tensor on a mesh: some axes cut, some are fixed, some hold copies."""
    view = draw(st.sampled_from([None, *mesh.views]))
    names = [*mesh.view(view).axes]
    for split, leaves in mesh.view(view).parts.items():
        if draw(st.booleans()):
            names = [name for name in names if name not in leaves] + [split]
    cut, at = [[] for _ in shape], {}
    for name in draw(st.permutations(names)):
        use = draw(st.sampled_from(["cut", "copies", "at"] if shape else ["copies", "at"]))
        if use == "cut":
            cut[draw(st.integers(0, len(shape) - 1))].append(name)
        elif use == "at":
            size = mesh.groups(name, view=view).size
            at[name] = tuple(draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=1)))
    parts, padded = {}, {}
    for dim, length in enumerate(shape):
        how = draw(st.sampled_from(["plain", "plain", "parts", "padded"]))
        if how == "parts" and length >= 3:
            first = draw(st.integers(1, length - 2))
            parts[dim] = (first, length - first - 1, 1)
        elif how == "padded":
            padded[dim] = length + draw(st.integers(0, 5))
    return Sharding(mesh, tuple("-".join(axes) or None for axes in cut), shape, dtype, at, view, parts, padded)


@st.composite
def one(draw):
    """One sharding on a mesh of its own."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return draw(shardings(draw(layouts()), shape))


@st.composite
def pairs(draw, max_names=4, least=1, **limits):
    """Shardings by name of source and target, on two meshes that are disjoint, overlap or are one."""
    source = draw(layouts(**limits))
    target = draw(st.one_of(st.just(source), layouts(**limits)))
    left, right = {}, {}
    for number in range(draw(st.integers(1, max_names))):
        shape = tuple(draw(st.lists(st.integers(least, 9), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        left[f"w{number}"] = draw(shardings(source, shape, dtype))
        right[f"w{number}"] = draw(shardings(target, shape, dtype))
    return left, right


def world_of(*sides):
    """One past the last rank of any mesh."""
    return max(sharding.mesh.rank_range.stop for side in sides for sharding in side.values())
