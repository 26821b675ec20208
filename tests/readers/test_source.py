import pytest

import rankmesh
from rankmesh import LayoutError, Mesh, PlanError, RankmeshError
from rankmesh.core import recipes
from rankmesh.readers import source

VIEWS = Mesh(tp=2, dp=4, pp=2).with_view("expert", ep=8, pp=2)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        (" tp=2,dp=4 ", recipes.axes(Mesh(tp=2, dp=4))),
        ("tp=2,dp=4,pp=2/expert:ep=8,pp=*", recipes.axes(VIEWS)),
        ("megatron:world=64,tp=2,pp=2,ep=4", recipes.megatron(64, tp=2, pp=2, ep=4)),
        ("megatron:world_size=64, tp=2", recipes.megatron(64, tp=2)),
        ("megatron:dp=4,tp=2,order=tp-dp", recipes.megatron(dp=4, tp=2, order="tp-dp")),
        ("megatron:world=16,cp=4,hierarchical_cp=2x2", recipes.megatron(16, cp=4, hierarchical_cp=(2, 2))),
        ("megatron:world=16,gloo=yes,all_gather=false", recipes.megatron(16, gloo=True)),
        ("megatron:world=16,timeout=2.5,pp_backend=gloo", recipes.megatron(16, timeout=2.5, pp_backend="gloo")),
        ("nanotron:tp=2,dp=2,ep=2", recipes.nanotron(tp=2, dp=2, ep=2)),
        ("ezpz:world=16,tp=2,cp=2", recipes.ezpz(16, tp=2, cp=2)),
        ("three_d:tp=2,pp=2,dp=2", recipes.three_d(tp=2, pp=2, dp=2)),
        ("torchtitan:world=16,tp=2,ep=4", recipes.torchtitan(16, tp=2, ep=4)),
    ],
)  # fmt: skip
def test_specs(text, plan):
    """Axes with views; a recipe's arguments as what they are: whole numbers, seconds, words, flags, sizes."""
    found = source.read(text)
    kind = "recipe" if text.partition(":")[0] in source.RECIPES else "axes"
    assert (found.kind, found.text.strip(), found.plan) == (kind, text.strip(), plan)


def test_what_the_world_size_fills():
    """A star, or the world of a recipe; a preset has its own, and keeps its source."""
    assert source.read("tp=2,dp=*", world_size=8).plan == recipes.axes(Mesh(tp=2, dp=4))
    assert source.read("megatron:tp=2", world_size=8).plan == recipes.megatron(8, tp=2)
    found = source.read("llama3-405b")
    assert (found.kind, found.plan.world_size) == ("preset", 16_384)
    assert "2407.21783" in found.preset.source


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", PlanError, "unknown layout ''; write an axis string"),
        ("nonsense", PlanError, "unknown layout 'nonsense'; write"),
        ("llama3-405", PlanError, "did you mean 'llama3-405b"),
        ("megatrn:world=8", PlanError, "did you mean 'megatron'"),
        ("foo:tp=2", PlanError, "unknown layout 'foo:tp=2'"),
        ("x" * 5000, PlanError, r"unknown layout 'x{75}\.\.\.'; "),
        ("tp=2," * 100, LayoutError, "names axis 'tp' twice"),
        ("tp=2,dp=*", LayoutError, "without world_size"),
        ("tp=2,dp=0", LayoutError, "size of axis 'dp' is 0"),
        ("tp=2,,dp=2", LayoutError, "is not an axis; write name=size"),
        ("tp=2/expert", PlanError, "view 'expert' has no colon"),
        ("tp=2/expert:ep=4", LayoutError, "set ep=2"),
        ("tp=2,pp=2/expert:pp=4", LayoutError, "its groups differ"),
        ("tp=2,pp=2/expert:ep=4/expert:ep=4", LayoutError, "has a view 'expert' already"),
        ("megatron:", PlanError, "neither world_size nor dp"),
        ("megatron:world=8,tpp=2", PlanError,
         "'tpp=2' is not an argument of recipe 'megatron'; write name=value, where name is one of world, tp"),
        ("megatron:world=8,tp", PlanError, "'tp' is not an argument of recipe 'megatron'"),
        ("megatron:world=8,tp=2,tp=2", PlanError, "recipe 'megatron' has 'tp' twice"),
        ("megatron:world=8,world_size=8", PlanError, "twice"),
        ("megatron:world=8,tp=two", PlanError, "tp is 'two' .* a whole number"),
        ("megatron:world=8,gloo=maybe", PlanError, "gloo is 'maybe' .* true or false"),
        ("megatron:world=8,timeout=soon", PlanError, "timeout is 'soon' .* seconds"),
        ("megatron:world=8,hierarchical_cp=2-2", PlanError, "sizes joined by x"),
        ("megatron:world=8,embedding=ends", PlanError, "'embedding=ends' is not an argument"),
        ("megatron:world=10,tp=4", PlanError, "world_size is 10"),
        ("missing.json", PlanError, "the path 'missing.json' cannot be read"),
    ],
)  # fmt: skip
def test_bad_texts(text, error, message):
    """Each mistake is named, with the form that would be right."""
    with pytest.raises(error, match=message):
        source.read(text)


@pytest.mark.parametrize("text", ["tp=2,dp=4", "megatron:world=8,tp=2", "llama3-405b"])
def test_a_plan_for_another_world(text):
    """A spec that makes another world than the one asked for is refused with both sizes."""
    with pytest.raises(RankmeshError, match="16"):
        source.read(text, world_size=16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"", "an empty file"),
        (b'{"schema": 99}', "has schema 99, but .* upgrade rankmesh"),
        (b'{"schema": 1, "mesh": {"axes": [["tp", 0]], "offset": 0}, "groups": []}', "size of axis 'tp' is 0"),
        (b'{"schema": 1, "mesh": {"axes": [["tp", 2]], "offset": 0}, "groups": [{"name": "x"}]}', "'axes'"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, content, message):
    """A file that holds no plan is refused with its path and the reason."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        source.read(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


def test_read_takes_what_names_a_plan(tmp_path):
    """A SPEC, a path, a mesh and a plan are all read as a plan, which must fit the world size that is given."""
    plan = recipes.axes(Mesh(tp=2, dp=2))
    path = tmp_path / "saved"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert (source.read(path).kind, source.read(path).plan) == ("file", plan)
    for spec in ("tp=2,dp=2", "tp=2,dp=*", path, str(path), Mesh(tp=2, dp=2), plan):
        assert rankmesh.read(spec, world_size=4) == plan
    for spec in (path, Mesh(tp=2, dp=2), plan):
        with pytest.raises(PlanError, match="is a layout of 4 ranks, but the world size is 8"):
            rankmesh.read(spec, world_size=8)


@pytest.mark.parametrize("spec", [None, 5, ["tp=2"], {"tp": 2}])
def test_what_is_no_spec(spec):
    """Anything else is refused in words."""
    for reading in (source.read, rankmesh.read):
        with pytest.raises(PlanError, match="write an axis string"):
            reading(spec)


def test_axes_in_a_larger_world():
    """The recipe of plain axes takes the size of a world that is larger than its mesh, and no text."""
    plan = recipes.axes(Mesh(tp=2, dp=2), world_size=8)
    assert (plan.world_size, plan.fixed_world, dict(plan.of(7))) == (8, True, {})
    with pytest.raises(PlanError, match=r"read a text with rankmesh\.read"):
        recipes.axes("tp=2")
    with pytest.raises(PlanError, match="more than a world of 2 has"):
        recipes.axes(Mesh(tp=4), world_size=2)
