"""Random plans: a mesh, perhaps with a view, and kinds of group with picks, levels and options."""

from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st
from tests.layout import brute
from tests.layout.strategies import axes_of, factors, meshes

from rankmesh import GroupSpec, Options, Plan

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from(["gloo", "nccl"]),
        "timeout": st.sampled_from([30, 600.5]),
        "nccl": st.dictionaries(st.sampled_from(["min_ctas", "max_ctas"]), st.integers(1, 2), max_size=2),
        "high_priority": st.booleans(),
        "share": st.booleans(),
        "overlap": st.sampled_from(["gather", "pipe"]),
    },
)
FEW_OPTIONS = st.one_of(st.just({}), OPTIONS)


DEFAULTS = [("share", True), ("lazy", False), ("high_priority", False)]


@dataclass(frozen=True)
class Expected:
    """What a plan must say of one kind: its options after inheritance, and its groups by enumeration."""

    options: Options
    groups: list


@dataclass(frozen=True)
class Case:
    """A plan, its arguments, and the dumb answer for each kind by name."""

    plan: Plan
    arguments: dict
    expected: dict


@st.composite
def cases(draw, options=FEW_OPTIONS):
    """A random plan of two to six kinds over at most 27 ranks."""
    mesh = draw(meshes(most_axes=3, most=3))
    if draw(st.booleans()):
        parts = draw(factors(mesh.size))
        mesh = mesh.with_view("expert", **dict(zip(("xtp", "xep", "xdp", "xpp"), parts, strict=False)))
    base, by_view = draw(options), draw(options)
    specs, expected = [], {}
    for number in range(draw(st.integers(2, 6))):
        spec, answer = _kind(draw, mesh, f"kind{number}", draw(options), base, by_view)
        specs.append(spec)
        expected[spec.name] = answer
    arguments = {
        "mesh": mesh,
        "specs": specs,
        "world_size": draw(st.sampled_from([None, mesh.rank_range.stop, mesh.rank_range.stop + 3])),
        "options": Options(**base),
        "view_options": {"expert": Options(**by_view)} if mesh.views else {},
        "name": draw(st.sampled_from(["", "llm"])),
    }
    return Case(Plan(**arguments), arguments, expected)


def _kind(draw, mesh, name, local, base, by_view):
    view = draw(st.sampled_from([None, *mesh.views]))
    axes = draw(axes_of(mesh.view(view)))
    groups = brute.groups(mesh.view(view).axes, axes, offset=mesh.offset, rank_map=mesh.rank_map)
    size, narrowed = len(groups[0]), {}
    if draw(st.booleans()):
        widths = draw(factors(size))
        narrowed = {"levels": widths, "level": draw(st.integers(0, len(widths) - 1))}
        groups = [piece for group in groups for piece in brute.level(group, widths, narrowed["level"])]
        size = widths[narrowed["level"]]
    if draw(st.booleans()):
        positions = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=3))
        narrowed["pick"] = positions
        groups = [brute.pick(group, positions) for group in groups]
    options = {**base, **(by_view if view else {}), **local}
    # A plan keeps no option that is the default anyway: groups that behave alike have equal options.
    options = {key: value for key, value in options.items() if (key, value) not in DEFAULTS}
    assert prod((len(groups), len(groups[0]))) > 0
    return GroupSpec(name, axes, view=view, **narrowed, **local), Expected(Options(**options), groups)
