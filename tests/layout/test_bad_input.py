"""Each bad input: the error's type, and the values received as its attributes."""

import pickle

import numpy as np
import pytest

from rankmesh import (
    Cluster,
    ClusterError,
    GroupSpec,
    Job,
    LayoutError,
    Mesh,
    Pick,
    PlacementError,
    Plan,
    PlanError,
    UnknownAxis,
    UnknownGroup,
    place,
    recipes,
)

LINE = Mesh(tp=2, dp=4)
GROUPS = LINE.groups("dp")
PLAN = Plan(LINE, [GroupSpec("tp"), GroupSpec("dp")])
SHIFTED = Mesh(dp=4, offset=4)


def test_errors_print_their_sentence_and_survive_pickle():
    """A KeyError prints its sentence, not a repr, and values survive a trip between processes."""
    error = UnknownAxis("dpp", known=("tp", "dp"))
    assert str(error) == "unknown axis 'dpp': this mesh has the axes tp, dp; did you mean 'dp'?"
    other = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(other), str(other), other.values) == (UnknownAxis, str(error), error.values)
    with pytest.raises(AttributeError, match="UnknownAxis has no attribute 'rank'"):
        _ = error.rank


DP, TP = "size of axis 'dp'", "size of axis 'tp'"
REFUSED = [
    # sizes, offsets, names and maps of a mesh
    *(
        (lambda size=size: Mesh(tp=2, dp=size), {"received": size, "what": DP, "least": 1})
        for size in (0, -2, 2.0, 2.5, "2", None, True)
    ),
    *((lambda o=o: Mesh(dp=2, offset=o), {"received": o, "what": "offset", "least": 0}) for o in (-1, 1.0, "0", None)),
    *(
        (lambda name=name: Mesh(**{name: 2}), {"received": name})
        for name in ("data-parallel", "2d", "", "view", "shared", "a b")
    ),
    (lambda: Mesh(), {}),
    (lambda: Mesh.of({}), {}),
    (lambda: Mesh.of({3: 2}), {"received": 3}),
    (lambda: Mesh.of("tp=2"), {"received": "tp=2"}),
    (lambda: Mesh(tp=2, rank_map=5), {"received": 5}),
    *(
        (lambda ranks=ranks: Mesh(tp=2, dp=2, rank_map=ranks), {"received": tuple(ranks), "offset": 0, "size": 4})
        for ranks in ([0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0], ["a"] * 4, [], [[0], [1, 2]])
    ),
    # texts
    *(
        (lambda text=text: Mesh.parse(text), {"received": text})
        for text in ("tp", "", "tp=2,", "tp=", "tp=two", "tp=2.0", "tp=2;dp=2")
    ),
    (lambda: Mesh.parse("tp=2,tp=2"), {"received": "tp=2,tp=2", "axis": "tp"}),
    (lambda: Mesh.parse("tp=0"), {"received": 0, "what": TP, "least": 1}),
    (lambda: Mesh.parse("tp=-4"), {"received": -4, "what": TP, "least": 1}),
    (lambda: Mesh.parse("tp=*,dp=*"), {"axes": ["tp", "dp"]}),
    (lambda: Mesh.parse("tp=*"), {"axes": ["tp"]}),
    (lambda: Mesh.parse(5), {"received": 5}),
    (lambda: Mesh.parse("tp=4,dp=*", world_size=10), {"total": 10, "product": 4}),
    *(
        (lambda world=world: Mesh.parse("tp=2,dp=4", world_size=world), {"total": world, "product": 8})
        for world in (4, 16)
    ),
    (
        lambda: Mesh.parse("dp=*", world_size=4, offset=4),
        {"received": 0, "what": "world_size minus offset", "least": 1},
    ),
    # axes and positions
    *(
        (lambda axes=axes: LINE.groups(axes), {"received": axes, "axis": "tp"})
        for axes in ("tp-tp-dp", ("tp", "tp", "dp"))
    ),
    *((lambda axes=axes: LINE.groups(axes), {"received": axes}) for axes in ("", "tp-", "-tp", ("tp", 2), ("tp", ""))),
    *(
        (lambda rank=rank: SHIFTED.coordinate(rank), {"received": rank, "what": "rank", "least": 0})
        for rank in (-1, 5.0, "5", None, True)
    ),
    (lambda: LINE.rank(tp=0), {"missing": "dp"}),
    (lambda: LINE.rank(tp=0, dp=4), {"axis": "dp", "received": 4, "size": 4}),
    (lambda: LINE.rank(tp=-1, dp=0), {"received": -1, "what": "position along axis 'tp'", "least": 0}),
    (lambda: LINE.split("dp"), {"axis": "dp"}),
    (lambda: LINE.split("dp", a=3, b=...), {"total": 4, "product": 3}),
    (lambda: LINE.split("dp", a=3, b=2), {"total": 4, "product": 6}),
    (lambda: LINE.split("dp", a=..., b=...), {"axes": ["a", "b"]}),
    (lambda: LINE.split("dp", a=0, b=...), {"received": 0, "what": "size of axis 'a'", "least": 1}),
    (lambda: LINE.split("dp", tp=2, b=2), {"axis": "dp"}),
    (lambda: LINE.split("dp", dp=4), {"axis": "dp"}),
    (lambda: Mesh(tp=2, dp=4).split("dp", a=2, b=2).rename(tp="dp"), {"axis": "dp"}),
    (lambda: Mesh(tp=2, dp=2, pp=1).reorder("tp-pp"), {"order": ("tp", "pp"), "missing": ["dp"]}),
    (lambda: Mesh(cp=4).split("cp", a=2, b=2).groups("cp-a"), {"received": ["a", "b", "a"], "axis": "a"}),
    # levels and picks of groups
    (lambda: GROUPS.level_of((3, 2), 0), {"sizes": (3, 2), "size": 4}),
    (lambda: GROUPS.level_of((2, 2), 2), {"level": 2}),
    (lambda: GROUPS.level_of((2, 2), -1), {"received": -1, "what": "level", "least": 0}),
    (lambda: GROUPS.level_of((0, 4), 0), {"received": 0, "what": "size of a level", "least": 1}),
    (lambda: GROUPS.level_of((4.0,), 0), {"received": 4.0, "what": "size of a level", "least": 1}),
    (lambda: GROUPS.pick([4]), {"position": 4, "size": 4}),
    (lambda: GROUPS.pick([-5]), {"position": -5, "size": 4}),
    (lambda: GROUPS.pick(lambda ranks: [len(ranks)]), {"position": 4, "size": 4}),
    (lambda: GROUPS.pick([]), {"received": []}),
    (lambda: GROUPS.pick([1.5]), {"received": [1.5]}),
    (lambda: GROUPS.pick(3), {"received": 3}),
    (lambda: GROUPS.pick(lambda ranks: None), {"received": None}),
    *((lambda positions=positions: Pick(positions), {"received": positions}) for positions in ((), (1.5,), ("a",), 3)),
    # jobs
    (lambda: Job(world_size=8), {}),
    (lambda: Job(world_size=0, a=Mesh(dp=1)), {"received": 0, "what": "world_size", "least": 1}),
    (lambda: Job(world_size=8, a="dp=8"), {"name": "a", "received": "dp=8"}),
    (lambda: Job(world_size=8, a=Mesh(dp=8, offset=4)), {"name": "a", "last": 11, "world_size": 8}),
    (lambda: Job(world_size=8, a=Mesh(dp=8)).of(8), {"rank": 8, "world_size": 8}),
    (lambda: Job(world_size=8, a=Mesh(dp=8)).of(-1), {"received": -1, "what": "rank", "least": 0}),
    # saved meshes
    *((lambda data=data: Mesh.from_dict(data), {"received": data}) for data in ({}, 5, {"axes": 3, "offset": 0})),
]


@pytest.mark.parametrize(("make", "values"), REFUSED)
def test_what_was_received_is_in_the_error(make, values):
    """An input that does not fit is refused, and the error has what was given and what would fit."""
    with pytest.raises(LayoutError) as caught:
        make()
    assert caught.value.values == values
    assert type(caught.value.values.get("received")) is type(values.get("received"))


@pytest.mark.parametrize(
    "query",
    [
        lambda name: LINE.groups(name),
        lambda name: LINE.groups(f"tp-{name}"),
        lambda name: LINE[name, 0],
        lambda name: LINE.flatten("tp", name),
        lambda name: LINE.rename(**{name: "x"}),
        lambda name: LINE.rank(tp=0, dp=0, **{name: 0}),
        lambda name: LINE.split(name, one=1),
        lambda name: LINE.reorder(f"tp-dp-{name}"),
    ],
)
def test_unknown_axes(query):
    """An axis that the mesh does not have is named, with the axes it has and the nearest one."""
    with pytest.raises(UnknownAxis, match="unknown axis 'dpp': this mesh has the axes tp, dp") as e:
        query("dpp")
    assert (e.value.name, e.value.known) == ("dpp", ("tp", "dp"))


@pytest.mark.parametrize("query", [SHIFTED.coordinate, SHIFTED.groups("dp").of, SHIFTED.groups("dp").index_of])
@pytest.mark.parametrize("rank", [0, 3, 8, 10**6])
def test_ranks_outside(query, rank):
    """A rank outside the range is refused with the range."""
    with pytest.raises(LayoutError, match=f"rank {rank} is outside this mesh, which covers ranks 4 to 7") as caught:
        query(rank)
    assert (caught.value.rank, caught.value.first, caught.value.last) == (rank, 4, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"axes": [["tp", 2], ["tp", 4]]}, {"axes": [["tp", 0]]}, {"views": 3}, {"parts": {"cp": ["inner"]}},
        {"views": {"expert": {"axes": [["ep", 3]]}}}, {"parts": {"tp": ["dp"]}}, {"parts": {"cp": []}},
        {"rank_map": [0, 0]}, {"offset": -1},
    ],
)  # fmt: skip
def test_saved_meshes_are_checked(change):
    """Plain data that is no mesh is refused as the constructor would."""
    with pytest.raises(LayoutError):
        Mesh.from_dict({**LINE.to_dict(), **change})


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (LayoutError, lambda: Mesh(tp=np.array([1, 2]))),
        (LayoutError, lambda: Mesh(tp=2, rank_map=np.array(2))),
        (LayoutError, lambda: LINE.split("dp", inner=np.array([1, 2]), outer=2)),
        (UnknownAxis, lambda: LINE.split(np.array(["dp", "tp"]), inner=2, outer=2)),
        (LayoutError, lambda: LINE.groups(np.array("tp"))),
        (PlanError, lambda: Plan(LINE, np.array(2))),
        (UnknownGroup, lambda: PLAN.groups(["tp"])),
        (UnknownGroup, lambda: PLAN.spec({})),
        (PlanError, lambda: recipes.megatron(world_size=8, cp=4, hierarchical_cp=4)),
        (LayoutError, lambda: recipes.megatron(world_size=8, tp=np.array([1, 2]))),
        (PlanError, lambda: recipes.megatron(world_size=8, order=np.array([1, 2]))),
        (ClusterError, lambda: place(PLAN, Cluster.parse("host=8"), within={"tp": ["host"]})),
        (PlacementError, lambda: place(PLAN, {"host": 8})),
    ],
)
def test_values_of_another_kind(error, call):
    """Arrays as sizes and names, lists as names, a number for a list: an error of ours, none of Python or numpy."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error


def test_levels_of_an_array():
    """What numpy holds is as good as a list."""
    listed, array = (recipes.megatron(world_size=8, cp=4, hierarchical_cp=one) for one in ((2, 2), np.array([2, 2])))
    assert listed.digest == array.digest
