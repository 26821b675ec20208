import copy
import json
import pickle
import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from tests.plan.strategies import cases

from rankmesh import (
    GroupSpec,
    Job,
    LayoutError,
    Mesh,
    NotAMember,
    Options,
    Plan,
    PlanError,
    UnknownAxis,
    UnknownGroup,
    ends,
)

PIPE = Plan(Mesh(tp=2, pp=4), [GroupSpec("tp"), GroupSpec("pp"), GroupSpec("embd", axes="pp", pick=ends)])


@given(cases())
def test_kinds_equal_brute_force(case):
    """Every kind is the enumerated one, with the options of the nearest level; a rank has those that contain it."""
    assert list(case.plan.kinds) == list(case.expected)
    for name, expected in case.expected.items():
        assert case.plan.groups(name).tolist() == expected.groups
        assert case.plan.spec(name).options == expected.options
    plan = case.plan
    for rank in range(plan.world_size):
        mine = {
            name: next(group for group in kind.groups if rank in group)
            for name, kind in case.expected.items()
            if any(rank in group for group in kind.groups)
        }
        local = plan.of(rank)
        assert {name: list(group.ranks) for name, group in local.items()} == mine
        assert list(local) == list(mine)
        assert [group.rank for group in local.values()] == [group.index(rank) for group in mine.values()]


@given(cases())
def test_a_plan_that_is_read_or_copied_is_equal(case):
    """A plan from its own JSON is equal and writes the same text; pickle, copy and making it twice keep it, too."""
    text = case.plan.to_json()
    other = Plan.from_json(text)
    assert other == case.plan
    assert other.digest == case.plan.digest
    assert other.to_json() == text
    assert other.specs == case.plan.specs
    assert other.mesh == case.plan.mesh
    assert (other.world_size, other.name) == (case.plan.world_size, case.plan.name)
    for other in (
        pickle.loads(pickle.dumps(case.plan)),  # noqa: S301
        copy.deepcopy(case.plan),
        Plan(**case.arguments),
    ):
        assert (other, hash(other), other.digest) == (case.plan, hash(case.plan), case.plan.digest)


KINDS = [
    {"axes": "tp-dp"}, {"pick": ends}, {"pick": [0]}, {"levels": (2, 2), "level": 0}, {"levels": (2, 2), "level": 1},
    {"backend": "gloo"}, {"timeout": 5}, {"share": False}, {"overlap": "x"}, {"lazy": True}, {"sharp": True},
    {"high_priority": True}, {"nccl": {"a": 1}}, {"nccl": {"a": 2}}, {"nccl": {}},
]  # fmt: skip


def variants():
    """Plans that each differ from all others in one thing that matters."""
    mesh, spec, tp = Mesh(tp=2, dp=4), GroupSpec("dp"), GroupSpec("tp")
    for specs in ([spec], [], [tp], [spec, tp], [tp, spec], [GroupSpec("other", axes="dp")]):
        yield Plan(mesh, specs)
    for kind in KINDS:
        yield Plan(mesh, [GroupSpec("dp", **kind)])
    for world in ({"world_size": 8}, {"world_size": 9}, {"name": "llm"}):
        yield Plan(mesh, [spec], **world)
    yield Plan(Mesh(tp=2, dp=4, offset=1), [spec])
    yield Plan(Mesh(dp=4, tp=2), [spec])
    yield Plan(Mesh(tp=4, dp=2), [spec])
    yield Plan(Mesh(tp=2, dp=4, rank_map=[1, 0, 2, 3, 4, 5, 6, 7]), [spec])
    for sizes in ({"x": 2, "y": 4}, {"x": 4, "y": 2}):
        yield Plan(mesh.with_view("a", **sizes).with_view("b", z=8), [spec])
    yield Plan(Mesh(tp=2, one=2, two=2), [])
    yield Plan(mesh.split("dp", one=2, two=2), [])


def test_plans_that_differ_have_other_digests():
    """Each thing that a plan says is in its digest."""
    for one, other in combinations(variants(), 2):
        assert one != other
        assert one.digest != other.digest


def test_equal_contents_have_equal_digests():
    """Spellings that mean the same give one digest: inheritance, order of views and options, picks."""
    mesh = Mesh(tp=2, dp=4)
    plain, inherited = GroupSpec("dp"), Options(timeout=5.0)
    first_last = GroupSpec("dp", pick=lambda ranks: (ranks[0], ranks[-1]))
    nccl = [GroupSpec("dp", nccl=config) for config in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    forward = mesh.with_view("a", x=2, y=4).with_view("b", z=8)
    backward = mesh.with_view("b", z=8).with_view("a", x=2, y=4)
    ones = [Plan(mesh, [GroupSpec("dp", nccl={"blocking": one})]) for one in (1, True, 1.0)]
    same = [
        *combinations(ones, 2),
        (Plan(mesh, [GroupSpec("dp", timeout=5)]), Plan(mesh, [plain], options=inherited)),
        (Plan(mesh, [GroupSpec("dp", pick=[0, 3])]), Plan(mesh, [first_last])),
        (Plan(mesh, [nccl[0]]), Plan(mesh, [nccl[1]])),
        (Plan(forward, [plain]), Plan(backward, [plain])),
    ]
    assert (forward, hash(forward)) == (backward, hash(backward))
    for one, other in same:
        assert one == other
        assert one.digest == other.digest


def test_saved_schema():
    """The JSON names its schema and holds mesh and groups as plain data; a digest is 64 hexadecimal digits."""
    assert re.fullmatch("[0-9a-f]{64}", PIPE.digest)
    data = json.loads(PIPE.to_json())
    assert data == {
        "schema": 1,
        "mesh": {"axes": [["tp", 2], ["pp", 4]], "offset": 0},
        "groups": [
            {"name": "tp", "axes": ["tp"]},
            {"name": "pp", "axes": ["pp"]},
            {"name": "embd", "axes": ["pp"], "pick": [0, -1]},
        ],
    }


def test_get_as_mappings_do():
    """get(name) is None or the default for a group of others, never for a name that is not in the plan."""
    local = PIPE.of(3)
    assert local.get("tp") is local["tp"]
    assert local.get("tp", None) is local["tp"]
    assert local.get("embd") is None
    assert "embd" not in local
    with pytest.raises(NotAMember, match=r"its members here are \[1, 7\]") as caught:
        local["embd"]
    assert (caught.value.group, caught.value.rank, isinstance(caught.value, KeyError)) == ("embd", 3, True)
    assert local.get("embd", default=5) == 5
    for default in ((), (None,)):
        with pytest.raises(UnknownGroup, match="unknown group 'emb'"):
            local.get("emb", *default)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TP", "did you mean 'tp'"),
        ("t-p", "did you mean 'tp'"),
        ("tp,pp", r"GroupSpec\('tp_pp', axes='tp-pp'\)"),
        ("pp-tp", r"GroupSpec\('pp_tp', axes='pp-tp'\)"),
    ],
)
def test_what_an_unknown_group_meant(name, message):
    """A kind in other letters is recognised, and several kinds in one name are told how a kind of both is written."""
    with pytest.raises(UnknownGroup, match=message):
        PIPE.groups(name)


def test_unknown_groups():
    """A kind that the plan does not have is named with those it has."""
    for query in (PIPE.of(0).__getitem__, PIPE.groups, PIPE.spec):
        with pytest.raises(UnknownGroup, match="unknown group 'emb': this plan has the groups tp, pp, embd") as caught:
            query("emb")
        assert (caught.value.name, caught.value.known) == ("emb", ("tp", "pp", "embd"))
        assert isinstance(caught.value, KeyError)


def test_ranks_of_the_world_outside_the_mesh():
    """An idle rank is in no group and is told why; a rank beyond the world is refused."""
    plan = Plan(Mesh(dp=4, offset=2), [GroupSpec("dp")], world_size=8)
    assert [len(plan.of(rank)) for rank in range(8)] == [0, 0, 1, 1, 1, 1, 0, 0]
    with pytest.raises(NotAMember, match="rank 7 is not in group 'dp': the plan covers ranks 2 to 5"):
        plan.of(7)["dp"]
    with pytest.raises(LayoutError, match="rank 8 is outside this mesh"):
        plan.of(8)
    with pytest.raises(LayoutError, match="rank is -1"):
        plan.of(-1)


def test_plans_of_a_job():
    """Each mesh of a job gets a plan of its own name for the whole world."""
    job = Job(world_size=6, encoder=Mesh(dp=2), llm=Mesh(tp=2, dp=2, offset=2))
    plans = Plan.of_job(job, {"encoder": [GroupSpec("dp")], "llm": [GroupSpec("tp")]})
    assert [(plan.name, plan.world_size) for plan in plans.values()] == [("encoder", 6), ("llm", 6)]
    assert plans["llm"].of(4)["tp"].ranks == (4, 5)
    assert plans["llm"].of(0) == {}


def test_frozen_views_of_a_plan():
    """Changing what a plan hands out does not change the plan."""
    PIPE.kinds.clear()
    assert list(PIPE.kinds) == ["tp", "pp", "embd"]


NO_VIEW = {"name": "x", "known": (), "what": "view"}
OF_A_LEVEL = {"what": "size of a level", "least": 1}
VIEWED = Mesh(dp=2).with_view("x", ep=2)
REFUSED = [
    (lambda: Plan("tp=2", []), PlanError, {}),
    (lambda: Plan(Mesh(dp=2), GroupSpec("dp")), PlanError, {"received": GroupSpec("dp")}),
    (lambda: Plan(Mesh(dp=2), [], options={"timeout": 5}), PlanError, {"received": {"timeout": 5}}),
    (lambda: Plan(VIEWED, [], view_options={"x": 5}), PlanError, {"received": 5}),
    (lambda: Plan(Mesh(dp=2), ["dp"]), PlanError, {"received": "dp"}),
    (lambda: Plan(Mesh(dp=2), [GroupSpec("dp")] * 2), PlanError, {"group": "dp"}),
    (lambda: Plan(Mesh(dp=2), [], world_size=1), PlanError, {"world_size": 1, "stop": 2}),
    (lambda: Plan(Mesh(dp=2), [], world_size=0), LayoutError, {"received": 0, "what": "world_size", "least": 1}),
    (lambda: Plan(Mesh(dp=2), [], name=3), PlanError, {"received": 3}),
    (lambda: Plan(Mesh(dp=2), [GroupSpec("tp")]), UnknownAxis, {"name": "tp", "known": ("dp",), "what": "axis"}),
    (lambda: Plan(Mesh(dp=2), [GroupSpec("dp", view="x")]), UnknownAxis, NO_VIEW),
    (lambda: Plan(Mesh(dp=2), [], view_options={"x": Options()}), UnknownAxis, NO_VIEW),
    (lambda: Plan(Mesh(dp=2), [GroupSpec("dp", pick=[2])]), LayoutError, {"position": 2, "size": 2}),
    (lambda: Plan(Mesh(dp=4), [GroupSpec("dp", levels=(3,), level=0)]), LayoutError, {"sizes": (3,), "size": 4}),
    *((lambda name=name: GroupSpec(name), PlanError, {"received": name}) for name in ("a b", "", 3)),
    (lambda: GroupSpec("dp", axes="dp-dp"), LayoutError, {"received": "dp-dp", "axis": "dp"}),
    *((lambda axes=axes: GroupSpec("x", axes=axes), LayoutError, {"received": axes}) for axes in (5, ["dp", 5])),
    (lambda: GroupSpec("x", view=5), PlanError, {"received": 5}),
    *((lambda pick=pick: GroupSpec("x", pick=pick), LayoutError, {"received": pick}) for pick in (5, [True, False])),
    (lambda: GroupSpec("x", levels=5, level=0), PlanError, {"group": "x", "received": 5}),
    (lambda: GroupSpec("x", levels="22", level=0), PlanError, {"group": "x", "received": "22"}),
    (lambda: GroupSpec("x", levels=(2, 2.5), level=0), LayoutError, {"received": 2.5, **OF_A_LEVEL}),
    (lambda: GroupSpec("x", levels=(2, 2), level="0"), LayoutError, {"received": "0", "what": "level", "least": 0}),
    (lambda: GroupSpec("dp", levels=(2, 2)), PlanError, {"group": "dp"}),
    (lambda: GroupSpec("dp", level=0), PlanError, {"group": "dp"}),
]


@pytest.mark.parametrize(("make", "error", "values"), REFUSED)
def test_bad_plans(make, error, values):
    """What cannot be a plan is refused where it is said, not at its first use."""
    with pytest.raises(error) as caught:
        make()
    assert caught.value.values == values


def test_specs_are_normalised():
    """Spellings of one spec are equal and plain data: numpy's integers, lists, and iterators that are read once."""
    levels = GroupSpec("dp", levels=np.array([2, 2]), level=np.int64(1))
    assert levels == GroupSpec("dp", levels=[2, 2], level=1)
    assert Plan(Mesh(dp=4), [levels]).digest == Plan(Mesh(dp=4), [GroupSpec("dp", levels=[2, 2], level=1)]).digest
    picked = GroupSpec("dp", pick=iter([0, -1]))
    assert picked == GroupSpec("dp", pick=ends)
    assert Plan(Mesh(dp=4), [picked]).groups("dp").tolist() == [[0, 3]]


def test_picks_are_asked_by_position():
    """A callable that chooses by position becomes plain data, on a mesh with a rank map too."""

    def middle(ranks):
        return [ranks[0], ranks[len(ranks) // 2]]

    plan = Plan(Mesh(tp=2, pp=4, rank_map=range(7, -1, -1)), [GroupSpec("embd", "pp", pick=middle)])
    assert plan.spec("embd").pick.positions == (0, 2)
    assert plan.groups("embd").tolist() == [[7, 3], [6, 2]]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("pick", [lambda r: [x for x in r if x < 4], lambda r: [min(r)], lambda r: [max(r)]])
def test_picks_by_value_are_refused(pick):
    """A callable that looks at rank numbers would choose otherwise in another group: refused."""
    mesh = Mesh(tp=2, pp=4, rank_map=range(7, -1, -1))
    with pytest.raises(PlanError, match="so that it chooses the same positions in every group") as caught:
        Plan(mesh, [GroupSpec("embd", "pp", pick=pick)])
    assert caught.value.group == "embd"
