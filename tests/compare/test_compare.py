"""sim.compare and sim.see: what is compared, with what, and how near it must be."""

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compare.parallel import copied, pg, reduce_, summed, weight
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh import sim
from rankmesh.errors import LayoutError
from rankmesh.sim.comparison.layouts import layouts_of, reference_of
from rankmesh.sim.comparison.repairs import factor_of
from rankmesh.sim.comparison.result import Difference

# -- layouts ----------------------------------------------------------------------------------------------------------


def test_missing_axes_have_size_one():
    """Every layout has the axes and kinds of all; the reference has them with one rank."""
    layouts = layouts_of(["tp=2", rm.Mesh(dp=2, cp=2), "pp=2"])
    assert [layout.mesh.size for layout in layouts] == [2, 4, 2]
    assert all(set(layout.mesh.axes) == {"tp", "dp", "cp", "pp"} for layout in layouts)
    assert len({frozenset(layout.plan.kinds) for layout in layouts}) == 1
    single = reference_of(layouts[1])
    assert single.plan.world_size == 1
    assert set(single.plan.kinds) == set(layouts[0].plan.kinds) >= {"dp_cp", "embd"}


def test_plans_with_views_picks_and_levels():
    """The reference of a plan keeps its kinds, views and picks, of one rank each."""
    plan = rm.recipes.megatron(16, tp=2, cp=2, pp=2, ep=2)
    single = reference_of(layouts_of([plan])[0])
    assert list(single.plan.kinds) == list(plan.kinds)
    assert all(groups.size == 1 for groups in single.plan.kinds.values())
    leveled = rm.Plan(rm.Mesh(dp=4), [rm.GroupSpec("inner", "dp", levels=(2, 2), level=0)])
    assert reference_of(layouts_of([leveled])[0]).plan.groups("inner").size == 1


@pytest.mark.parametrize(
    ("layouts", "word"),
    [
        ([], "no layouts"),
        ([3], "not a layout"),
        ([rm.recipes.megatron(2, tp=2), "tp=2"], "same kinds"),
        ([rm.Mesh(tp=2, offset=2)], "covers 2 of 4"),
        (["tp=2", "dp=2/expert:ep=2"], "view 'expert'"),
    ],
)
def test_layouts_that_do_not_go_together(layouts, word):
    """Refused, with the layouts and what is wrong."""
    with pytest.raises((LayoutError, rm.PlanError), match=word):
        layouts_of(layouts)


# -- what is seen -----------------------------------------------------------------------------------------------------


def first(program, *layouts, **options):
    """The first difference."""
    return sim.compare(program, list(layouts), **options).first


def test_see_outside_a_comparison_does_nothing():
    """Neither outside ranks nor on ranks that are not compared, even with what cannot be compared."""
    sim.see("x", object(), ("nothing",))
    sim.run(lambda groups: sim.see("x", object()), "tp=2")


@pytest.mark.few(3)
@pytest.mark.parametrize("value", [1, 2.5, True, np.arange(3.0), torch.arange(3), torch.tensor(1 + 2j)])
def test_kinds_of_values(value):
    """Numbers, arrays and tensors of any dtype are compared."""
    assert first(lambda groups: sim.see("x", value), "tp=2") is None
    different = first(lambda groups: sim.see("x", value if groups["tp"].rank == 0 else value * 0), "tp=2")
    assert (different.name, different.ranks) == ("x", (1,))


def test_numbers_are_given_as_numbers():
    """expected and got of a number are floats, of a tensor the shard of the first rank that differs."""
    found = first(lambda groups: sim.see("x", 1.0 + groups["tp"].size), "tp=4")
    assert (found.expected, found.got, found.ranks) == (2.0, 5.0, (0, 1, 2, 3))
    whole = torch.arange(4.0)
    found = first(lambda groups: sim.see("x", sim.shard(groups, whole, ("tp",)) + groups["tp"].rank, ("tp",)), "tp=2")
    assert found.ranks == (1,)
    assert found.expected.tolist() == [2.0, 3.0]
    assert found.got.tolist() == [3.0, 4.0]


def test_not_a_number_equals_itself_only():
    """NaN on both sides is the same; on one it is not."""
    assert first(lambda groups: sim.see("x", float("nan")), "tp=2") is None
    assert first(lambda groups: sim.see("x", 1.0 if groups["tp"].size == 1 else float("nan")), "tp=2").name == "x"
    assert first(lambda groups: sim.see("x", float("inf")), "tp=2") is None


CUTS = {
    "rows": ((6, 4), ("tp", None), {}),
    "uneven": ((5, 3), ("tp", None), {}),
    "two axes": ((8, 4), ("dp-tp", None), {}),
    "strided": ((8, 4), ("tp-dp", None), {}),
    "two dimensions": ((4, 4), ("tp", "dp"), {}),
    "fused": ((12, 2), ("tp", None), {"parts": (8, 4)}),
    "a view": ((8, 2), ("ep", None), {"view": "expert"}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CUTS)
def test_cuts_are_those_of_shardings(case):
    """A shard is compared with its own elements; one that holds others differs."""
    shape, cut, options = CUTS[case]
    whole = torch.randn(shape, dtype=torch.float64)
    layout = "tp=2,dp=2/expert:ep=4,edp=1"
    assert first(lambda groups: sim.see("x", sim.shard(groups, whole, cut, **options), cut, **options), layout) is None
    other = whole.flip(0)

    def wrong(groups):
        sim.see("x", sim.shard(groups, whole if groups["tp"].size == 1 else other, cut, **options), cut, **options)

    assert first(wrong, layout).name == "x"


def test_at_says_where_a_value_is():
    """Ranks elsewhere do not count; along an axis of size 1 everything is at one place."""

    def program(groups):
        pp = groups["pp"]
        sim.see("last", 1.0 if pp.rank == pp.size - 1 else 5.0, at={"pp": -1})
        sim.see("second", 1.0 if pp.size == 1 or pp.rank == 1 else 5.0, at={"pp": 1})

    assert first(program, "pp=2", "pp=4", "tp=2") is None


def test_a_part_that_nobody_sees_differs():
    """All elements must be seen by some rank; a value that one process does not see differs, too."""
    whole = torch.arange(4.0)

    def half(groups):
        if groups["tp"].rank == 0:
            sim.see("x", sim.shard(groups, whole, ("tp",)), ("tp",))

    found = first(half, "tp=2")
    assert (found.name, found.ranks, found.why) == ("x", (1,), "unseen")

    def extra(groups):
        sim.see("x", 1.0)
        if groups["tp"].size > 1:
            sim.see("y", 1.0)

    assert first(extra, "tp=2").why == "extra"

    def fewer(groups):
        for _ in range(4 // groups["tp"].size):
            sim.see("x", 1.0)

    found = first(fewer, "tp=2")
    assert (found.why, found.number) == ("unseen", 2)


def test_a_wrong_shape_differs():
    """A shard of another shape than its cut gives, with both shapes in the report."""
    result = sim.compare(lambda groups: sim.see("x", torch.ones(4), ("tp",)), ["tp=2"])
    assert result.first.why == "shape"
    assert "shape [4] where its cut gives [2]" in result.report()


def test_values_of_one_name_are_counted():
    """The n-th value of a name is compared with the n-th of the reference."""

    def program(groups):
        for step in range(3):
            sim.see("loss", step + (step == 1) * (groups["tp"].size - 1.0))

    found = first(program, "tp=2")
    assert (found.name, found.number, found.expected, found.got) == ("loss", 1, 1.0, 2.0)
    assert "loss (its value 1)" in str(found)


def test_first_is_first_in_the_order_of_the_program():
    """Of what differs under several layouts, what the program sees first; of these the layout that is listed first."""

    def program(groups):
        sim.see("a", 1.0 if groups["dp"].size == 1 else 2.0)
        sim.see("b", 1.0 if groups["tp"].size == 1 else 2.0)

    result = sim.compare(program, ["tp=2", "dp=2", "dp=2,tp=2"])
    assert (result.first.name, result.first.layout) == ("a", "dp=2")
    assert result.differing == {"tp=2": ["b"], "dp=2": ["a"], "dp=2,tp=2": ["a", "b"]}
    assert not result


def test_what_cannot_be_compared_is_refused():
    """A value that is no tensor, an unknown axis, a program that sees nothing."""
    for value, cut, word in ((object(), None, "cannot be compared"), (torch.ones(2), ("up",), "unknown axis 'up'")):
        with pytest.raises(sim.RanksFailed, match=word):
            sim.compare(lambda groups, value=value, cut=cut: sim.see("x", value, cut), ["tp=2"])
    with pytest.raises(LayoutError, match="sees nothing"):
        sim.compare(lambda groups: None, ["tp=2"])
    with pytest.raises(LayoutError, match="not a program"):
        sim.compare(None, ["tp=2"])
    with pytest.raises(LayoutError, match="tolerance"):
        sim.compare(lambda groups: sim.see("x", 1.0), ["tp=2"], tolerance=float("nan"))


def test_a_comparison_inside_another_is_refused():
    """torch's default dtype is the process's; the next comparison runs."""
    one = ["dp=2"]
    with pytest.raises(sim.RanksFailed, match="another comparison runs in this process"):
        sim.compare(lambda groups: sim.compare(lambda inner: sim.see("x", torch.ones(1)), one), one)
    result = sim.compare(lambda groups: sim.see("x", torch.ones(1)), "dp=2")  # a SPEC in place of a list of them
    assert (result.same, result.layouts) == (True, ("dp=2",))


def test_a_failing_program_names_its_layout():
    """An error under one layout is that error, with the layout in front."""

    def program(groups):
        sim.see("x", 1.0)
        if groups["tp"].rank == 1:
            raise ZeroDivisionError("here")

    with pytest.raises(sim.RanksFailed, match=r"under tp=2: rank 1 of 2 failed: ZeroDivisionError"):
        sim.compare(program, ["dp=2", "tp=2"])


@pytest.mark.parametrize(
    ("operation", "word"),
    [
        (lambda pg: dist.all_reduce(torch.eye(4).to_sparse(), group=pg), "all_reduce cannot move a tensor of layout"),
        (lambda pg: dist.all_gather([torch.ones(2)], torch.ones(2, 2).T[0], group=pg), "moves one block of memory"),
        (lambda pg: pg.split_group([0, 1]), "a simulation does not carry split_group"),
    ],
    ids=["sparse", "strided", "split_group"],
)
def test_what_the_simulator_does_not_carry_is_named(operation, word):
    """The operation and the line that makes it, under the layout."""

    def program(groups):
        if groups["tp"].size > 1:
            operation(groups["tp"].pg)
        sim.see("x", 1.0)

    with pytest.raises(sim.RanksFailed, match=rf"(?s)under tp=2: .*{word}.*test_compare\.py:{line_of(operation)}\b"):
        sim.compare(program, ["tp=2"])


def line_of(function):
    """The line of a function."""
    return function.__code__.co_firstlineno


def test_distributed_tensors():
    """The placements of a DTensor are its cut; partial sums are refused."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    whole = torch.arange(32.0).reshape(8, 4)

    def program(groups):
        mesh = groups.device_mesh("dp", "tp")
        for placements in ([Replicate(), Shard(1)], [Shard(0), Shard(0)], [Shard(0), Replicate()]):
            cut = [[], []]
            for axis, placement in zip(("dp", "tp"), placements, strict=True):
                if placement.is_shard():
                    cut[placement.dim].append(axis)
            local = sim.shard(groups, whole, tuple("-".join(axes) or None for axes in cut))
            sim.see("x", DTensor.from_local(local, mesh, placements))
            sim.see("wrong", DTensor.from_local(local * groups["tp"].size, mesh, placements))

    assert first(program, "tp=2,dp=2").name == "wrong"

    def partial(groups):
        sim.see("x", DTensor.from_local(whole, groups.device_mesh("tp"), [Partial()]))

    with pytest.raises(sim.RanksFailed, match="partial sums"):
        sim.compare(partial, ["tp=2"])


# -- modules ----------------------------------------------------------------------------------------------------------


def trained(groups, factor=1.0):
    """A step of a column-parallel layer, seen as a module with its optimizer and activations."""
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.weight = weight(groups, "w", (8, 4), ("tp", None))
    model = torch.nn.Sequential(layer, torch.nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with sim.see_activations(model, {"*": ("dp", "tp"), "": rm.Sharding(groups.plan.mesh, ("dp", "tp"), (8, 8))}):
        model(sim.random(groups, "x", (8, 4), ("dp", None))).sum().backward()
    reduce_(layer.weight.grad, pg(groups, "dp")).mul_(factor)
    optimizer.step()
    sim.see("model", module=model, optimizer=optimizer, table={"0.*": ("tp", None)})


def test_module_and_optimizer():
    """Parameters, gradients and moments by name, cut as the table says; outputs of parts at hooks."""
    result = sim.compare(trained, ["tp=2", "dp=2", "tp=2,dp=2"])
    assert result.same, result.report()
    names = set(result.errors["tp=2"])
    assert names == {
        "0", "1", "output", "model.0.weight", "model.0.weight.grad", "model.0.weight.exp_avg",
        "model.0.weight.exp_avg_sq", "model.0.weight.step",
    }  # fmt: skip
    wrong = sim.compare(lambda groups: trained(groups, groups["dp"].size), ["tp=2", "dp=2"])
    assert wrong.first.name == "model.0.weight.grad"
    assert wrong.first.layout == "dp=2"


def test_random_numbers_are_those_of_one_process():
    """Every shard of a random tensor has the elements of the whole; another name gives others."""
    whole = sim.run(lambda groups: sim.random(groups, "w", (8, 4), dtype=torch.float64), "tp=1,dp=1")[0]
    parts = sim.run(lambda groups: sim.random(groups, "w", (8, 4), ("tp", "dp"), dtype=torch.float64), "tp=2,dp=2")
    assert torch.equal(torch.cat([torch.cat(parts[:2]), torch.cat(parts[2:])], dim=1), whole)
    other = sim.run(lambda groups: sim.random(groups, "v", (8, 4), dtype=torch.float64), "tp=1,dp=1")[0]
    assert not torch.equal(other, whole)
    drawn = sim.run(lambda groups: sim.random(groups, "w", (99,), draw=torch.rand), "tp=1,dp=1")[0]
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_ranks_draw_a_tensor_once():
    """Ranks that run one after another share the whole tensor; another shape of the same name is another tensor."""
    made = []

    def draw(shape, **options):
        made.append(shape)
        return torch.randn(shape, **options)

    def program(groups, rows):
        return sim.random(groups, "w", (rows(groups.rank), 4), ("dp", None), draw=draw)

    parts = sim.run(program, "dp=4", lambda rank: 8)
    assert torch.equal(torch.cat(parts), sim.run(program, "dp=1", lambda rank: 8)[0])
    assert made == [(8, 4)] * 2
    sim.run(program, "dp=4", lambda rank: 8 + rank // 2 * 4)
    assert sorted(made[2:]) == [(8, 4), (12, 4)]


# -- noise ------------------------------------------------------------------------------------------------------------


def test_runs_are_in_float64_where_the_program_allows():
    """The default dtype is float64 in the program, and what it was after it; a program that fails so runs as it is."""
    seen = []
    result = sim.compare(lambda groups: (seen.append(torch.ones(1).dtype), sim.see("x", 1.0)), ["tp=2"])
    assert set(seen) == {torch.float64}
    assert result.dtype == "float64"
    assert torch.get_default_dtype() == torch.float32

    def single(groups):
        sim.see("x", torch.nn.Linear(2, 2)(torch.ones(2, dtype=torch.float32)))

    result = sim.compare(single, ["tp=2"])
    assert result.dtype == "float32"
    assert "with float64 as default dtype the program fails (mat1 and mat2 must have the same dtype" in result.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference(dtype):
    """Sums in another order differ by more than the tolerance in a low precision, and are the same; a size is not."""

    def program(groups, wrong=1.0):
        w = sim.random(groups, "w", (64, 512), (None, "tp"), dtype=dtype)
        x = sim.random(groups, "x", (512,), ("tp",), dtype=dtype)
        y = w @ x
        dist.all_reduce(y, group=groups["tp"].pg)
        sim.see("y", y * (1 if groups["tp"].size == 1 else wrong))

    result = sim.compare(program, ["tp=2", "tp=8"], tolerance=1e-9)
    assert result.same
    assert result.raised["y"] > 1e-9
    assert "y" in result.report().partition("allowed more: ")[2]
    assert not sim.compare(lambda groups: program(groups, 1.2), ["tp=2"], tolerance=1e-9).same


def test_small_differences_are_found_in_float64():
    """One part in 1e5 is more than the tolerance; one in 1e8 is not, unless a smaller tolerance is asked for."""

    def program(error):
        def inner(groups):
            sim.see("x", torch.arange(1.0, 9.0) * (1 + error * (groups["tp"].size - 1)))

        return inner

    assert not sim.compare(program(1e-5), ["tp=2"]).same
    assert sim.compare(program(1e-8), ["tp=2"]).same
    assert not sim.compare(program(1e-8), ["tp=2"], tolerance=1e-10).same


# -- laws -------------------------------------------------------------------------------------------------------------

LAYOUTS = ["tp=2", "dp=2", "cp=2", "tp=2,dp=2", "tp=2,dp=2,cp=2"]
AXES = st.sets(st.sampled_from(["tp", "dp", "cp"]), min_size=1)
KINDS = {frozenset({"tp"}): "tp", frozenset({"dp"}): "dp", frozenset({"cp"}): "cp", frozenset({"dp", "cp"}): "dp_cp"}


@settings(max_examples=10 if ALL else 3)
@given(cut=AXES, used=st.sampled_from(sorted(KINDS.values())))
def test_a_sum_is_right_over_the_axes_that_cut_it_only(cut, used):
    """A sum of shards is the same exactly when its group spans the axes that cut it: the repair."""

    def program(groups):
        x = sim.random(groups, "x", (8, 3), ("-".join(sorted(cut)), None))
        total = x.sum(0)
        dist.all_reduce(total, group=groups[used].pg)
        sim.see("total", total)

    result = sim.compare(program, LAYOUTS)
    right = KINDS.get(frozenset(cut))
    assert result.same == (right == used)
    if not result.same:
        assert (result.first.operation, result.first.group) in {("all-reduce", used), (None, None)}
        if right is not None:
            assert result.first.repair == ("group", right)
            assert result.first.settles


def test_second_defect_does_not_hide_the_repair_of_the_first():
    """With two defects the first is repaired, and the report says that other values still differ."""

    def program(groups):
        x = sim.random(groups, "x", (8, 3), ("dp", None))
        for name in ("a", "b"):
            total = x.sum(0)
            if name == "a":
                dist.all_reduce(total, group=groups["tp"].pg)
            else:
                dist.all_reduce(total.square_(), group=groups["tp"].pg)
            sim.see(name, total)

    result = sim.compare(program, ["tp=2", "dp=2", "tp=2,dp=2"])
    assert (result.first.name, result.first.repair, result.first.settles) == ("a", ("group", "dp"), False)
    assert "other values differ still" in result.report()


def test_no_repair_is_reported_that_was_not_tried():
    """With no time for trials nothing is proposed; a line whose inputs are right is named all the same."""

    def program(groups):
        total = sim.random(groups, "x", (8, 3), ("tp", None)).clone()
        dist.all_reduce(total, group=groups["tp"].pg)
        sim.see("total", total, ("tp", None))

    found = first(program, "tp=2,dp=1", seconds=0.0)
    assert (found.repair, found.operation, found.group) == (None, "all-reduce", "tp")
    assert found.before is None


def test_what_gets_other_numbers_is_not_blamed():
    """The first collective whose inputs differ already is said to be after the mistake, and is no cause."""

    def program(groups):
        x = sim.random(groups, "x", (8, 3), ("dp", None))
        total = x.exp().sum(0) if groups["dp"].size == 1 else x.sinh().sum(0)
        dist.all_reduce(total, group=groups["dp"].pg)
        sim.see("total", total)

    result = sim.compare(program, ["dp=2", "dp=4"])
    found = result.first
    assert (found.operation, found.group, found.repair) == (None, None, None)
    assert found.before == f"test_compare.py:{line_of(program) + 3}"
    assert result.report().startswith("could not be repaired: total differs under dp=2")
    assert result.to_dict()["first"]["before"] == found.before


@pytest.mark.parametrize(
    ("factors", "size"),
    [
        ({"dp=2": 0.5, "dp=4": 0.25}, "1/dp"),
        ({"dp=2": 2.0, "tp=2,dp=4": 4.0}, "dp"),
        ({"tp=2": 2.0, "dp=2": 0.5, "tp=2,dp=4": 0.5}, None),
        ({"dp=2": 0.5, "dp=4": 0.5}, None),
    ],
)
def test_factors_are_sizes(factors, size):
    """The size that has these values under these layouts; none that has one number everywhere."""
    layouts = layouts_of([*factors, "tp=1"])[: len(factors)]
    found = factor_of(dict(zip(layouts, factors.values(), strict=True)))
    assert (None if found is None else str(found)) == size


def test_the_line_that_calls_a_helper_is_named():
    """A helper chooses its group itself; of its two callers one needs another group, and is the site."""

    def program(groups):
        def total(tensor):
            dist.all_reduce(tensor, group=groups["tp"].pg)
            return tensor

        sim.see("rows", total(sim.random(groups, "rows", (8,), ("tp",)).sum()))
        columns = sim.random(groups, "columns", (8,), ("dp",)).sum()
        sim.see("columns", total(columns))

    first = sim.compare(program, ["tp=2", "dp=2", "tp=2,dp=2"]).first
    lines, start = inspect.getsourcelines(program)
    assert (first.name, first.repair, first.settles) == ("columns", ("group", "dp"), True)
    assert first.site == f"test_compare.py:{start + len(lines) - 1}"


def test_a_line_is_repaired_with_its_backward_pass():
    """Two layers of one function, one on a wrong group: its line changes in both passes, the other stays."""

    def program(groups):
        def layer(name, axis, pg):
            part = sim.random(groups, name, (8, 4), (axis, None)).sum(0).requires_grad_()
            total = copied(summed(part, pg), pg)
            sim.see(name, total)
            (total @ sim.random(groups, f"{name}.w", (4, 8), (None, axis))).square().sum().backward()
            sim.see(f"{name}.grad", part.grad)

        layer("rows", "tp", groups["tp"].pg)
        layer("columns", "dp", groups["tp"].pg)

    first = sim.compare(program, ["tp=2", "dp=2", "tp=2,dp=2"]).first
    assert (first.name, first.repair, first.settles) == ("columns", ("group", "dp"), True)


def test_a_number_is_as_it_was_seen():
    """Data of a number has all of its digits, whatever torch's default dtype is."""
    first = sim.Difference("loss", "dp=2", (0,), 0.1, 0.3, "train.py:1")
    assert first.worst == ([], 0.1, 0.3)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_rounding_does_not_choose_the_element_that_is_shown(rows, columns, seed):
    """Of elements that differ equally, but for rounding, the first is shown; NaN and infinity differ most."""
    draw = torch.Generator().manual_seed(seed)
    expected = torch.randn(rows, columns, dtype=torch.float64, generator=draw)
    rounding = 1e-12 * torch.randn(rows, columns, dtype=torch.float64, generator=draw)
    difference = Difference("out", "tp=2", (0,), expected, expected + 0.85 + rounding, "train.py:1")
    assert difference.worst[0] == [0, 0]
    got = expected.clone()
    got[-1, -1] = float("nan")
    assert Difference("out", "tp=2", (0,), expected, got, "train.py:1").worst[0] == [rows - 1, columns - 1]
