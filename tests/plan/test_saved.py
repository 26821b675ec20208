import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import GroupSpec, Mesh, Options, Plan, PlanError, RankmeshError, ends

PLAN = Plan(
    Mesh(tp=2, pp=4).with_view("expert", ep=2, pp=4).split("tp", a=1, b=2),
    [GroupSpec("embd", "pp", pick=ends, timeout=5, nccl={"max_ctas": 4}), GroupSpec("ep", view="expert")],
    world_size=9,
    name="llm",
)
DATA = json.loads(PLAN.to_json())


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000, "tp=2,dp=4", b"\xff", None])
def test_text_that_is_not_json(text):
    """A text that is no JSON is refused as such."""
    with pytest.raises(PlanError, match="the saved plan is"):
        Plan.from_json(text)


OF_ANOTHER_KIND = [(text, None) for text in ("[]", "3", '"tp"', "null", "{}")]
OF_NO_SCHEMA = [(json.dumps({**DATA, "schema": schema}), schema) for schema in (None, "1", 0, -1, 1.0, True, [])]


@pytest.mark.parametrize(("text", "schema"), OF_ANOTHER_KIND + OF_NO_SCHEMA)
def test_schemas(text, schema):
    """A saved plan says its schema, a whole number from 1; JSON of another kind has none."""
    with pytest.raises(PlanError, match=r"this JSON has the schema .*, but a saved plan has one from 1 to 1") as caught:
        Plan.from_json(text)
    assert caught.value.schema == schema


def test_a_newer_schema():
    """A plan of a newer schema is not guessed at; the remedy is to upgrade."""
    with pytest.raises(PlanError, match="this plan has schema 2, but this version of rankmesh reads up to 1") as caught:
        Plan.from_json(json.dumps({**DATA, "schema": 2}))
    assert (caught.value.schema, caught.value.newest) == (2, 1)


def changed(path, value):
    """The JSON of the plan with one value replaced."""
    data = json.loads(PLAN.to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


# Values of the wrong type that a schema does not refuse; what a schema refuses is in tests/cli/test_schema.py.
WRONG = [
    (("groups", 0, "level"), 0),
    (("groups", 0, "options", "timeout"), 10**400),
    (("groups", 0, "options", "nccl"), [1]),
    (("groups", 0, "options", "speed"), 1),
]
PATHS = [
    *(path for path, _ in WRONG), ("mesh",), ("groups",), ("name",), ("world_size",), ("groups", 0),
    *(("mesh", name) for name in ("axes", "rank_map", "views", "parts")), ("mesh", "axes", 0),
    *(("groups", 0, name) for name in ("name", "axes", "pick", "levels", "view", "options")),
    ("mesh", "views", "expert"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_wrong_types(path, value):
    """A value of the wrong type is refused with an error of ours."""
    with pytest.raises(RankmeshError):
        Plan.from_json(changed(path, value))


@pytest.mark.parametrize("key", ["mesh", "groups"])
def test_missing_parts(key):
    """A plan without mesh or groups is no saved plan."""
    with pytest.raises(PlanError, match=r"the saved plan has no '(mesh|groups)'"):
        Plan.from_json(json.dumps({name: value for name, value in DATA.items() if name != key}))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["tp", "pp", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tp", "axes", "name"]), inner),
    max_leaves=4,
)


@given(st.sampled_from(PATHS), PLAIN)
def test_any_damage_is_a_plan_or_an_error_of_ours(path, value):
    """Whatever stands in a saved plan, reading it gives a plan that works or an error of ours."""
    try:
        plan = Plan.from_json(changed(path, value))
    except RankmeshError:
        return
    assert Plan.from_json(plan.to_json()).digest == plan.digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": "600"}, "timeout is '600'"),
        ({"timeout": True}, "timeout is True"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"backend": ""}, "backend is ''"),
        ({"backend": 3}, "backend is 3"),
        ({"share": 1}, "share is 1"),
        ({"overlap": False}, "overlap is False"),
        ({"nccl": 8}, "nccl is 8"),
        ({"nccl": {"max_ctas": None}}, r"nccl is \{'max_ctas': None\}"),
        ({"nccl": {8: 8}}, r"nccl is \{8: 8\}"),
        ({"nccl": {"x": float("nan")}}, r"nccl is \{'x': nan\}"),
        ({"nccl": {"x": float("inf")}}, "nccl is {'x': inf}"),
        ({"nccl": {"x": 2.0**63}}, "nccl is {'x': 9.2"),
    ],
)
def test_options(options, message):
    """An option has a value of its kind."""
    with pytest.raises(PlanError, match=message) as caught:
        Options(**options)
    assert caught.value.option == next(iter(options))
