"""A guard on simulated ranks: what differs is found at the next check, by name, rank and place; nothing else is."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer.brute import local
from tests.transfer.strategies import shardings

import rankmesh as rm
from rankmesh import sim
from rankmesh.core import Mesh
from rankmesh.core.boxes import size as elements

LAYOUT = "tp=2,dp=3,pp=2"


def model(groups):
    """Tensors of a job: one cut by tp, one that every rank has, one on both ends of the pipeline, one of a stage."""
    mesh = groups.plan.mesh
    shardings = {
        "up": rm.Sharding(mesh, ("tp", None), shape=(4, 3)),
        "norm": rm.Sharding(mesh, shape=(5,), dtype="bfloat16"),
        "embedding": rm.Sharding(mesh, ("tp",), shape=(6,), at={"pp": (0, -1)}),
        "head": rm.Sharding(mesh, shape=(2,), dtype="float64", at={"pp": 1}),
    }
    tensors = {
        name: torch.zeros(one.of(groups.rank).shape, dtype=getattr(torch, one.dtype))
        for name, one in shardings.items()
        if one.holds(groups.rank)
    }
    return tensors, shardings


def raised(call):
    """What a call raises, as plain values; None for nothing."""
    try:
        call()
    except rm.Diverged as error:
        return {"message": str(error), **error.values}
    return None


def on_each(program, layout=LAYOUT):
    """What a program returns on every rank, the same on each."""
    values = sim.run(program, layout)
    assert values == [values[0]] * len(values)
    return values[0]


@pytest.mark.parametrize(
    ("name", "rank", "group", "box", "ranks"),
    [
        ("up", 4, "dp-pp@tp0", ((1, 2), (2, 3)), (4,)),
        ("norm", 7, "tp-dp-pp", ((4, 5),), (7,)),
        ("embedding", 9, "dp-pp@tp1", ((5, 6),), (9,)),
        ("head", 11, "tp-dp@pp1", ((1, 2),), (11,)),
    ],
)
def test_a_tensor_differs_on_one_rank(name, rank, group, box, ranks):
    """All ranks raise the same in the same step: the one that differs, where, and since when."""

    def program(groups):
        tensors, shardings = model(groups)
        guard = rm.Guard(groups, tensors, shardings, every=2)
        steps = []

        def train():
            for step in range(20):
                if step == 7 and groups.rank == rank:
                    tensors[name].view(-1)[-1] = 3
                guard.step(step)
                steps.append(step)

        return raised(train), steps

    found, steps = on_each(program)
    assert (found["step"], found["since"], steps) == (8, 6, [*range(9)])
    assert (found["tensor"], found["ranks"], found["box"], found["count"]) == (name, ranks, box, 1)
    assert (found["expected"], found["got"]) == (0, 3)
    assert found["group"] == group


def test_a_difference_that_is_gone_when_it_is_looked_at():
    """A gradient that the next step overwrites: the ranks are known, the element no more."""

    def program(groups):
        tensors, shardings = model(groups)
        guard = rm.Guard(groups, tensors, shardings, every=1)
        tensors["up"][0, 0] = groups["dp"].rank == 1
        guard.step(0)
        tensors["up"].zero_()
        return raised(lambda: guard.step(1))

    found = on_each(program)
    assert (found["step"], found["tensor"], found["ranks"], found["box"], found["got"]) == (0, "up", (2, 8), None, None)


def test_warnings_and_functions_instead_of_an_error(caplog):
    """The job goes on, and hears of it at each check."""

    def program(groups):
        tensors, shardings = model(groups)
        seen = []
        for action in ("warn", seen.append):
            guard = rm.Guard(groups, tensors, shardings, every=1, action=action)
            for step in range(4):
                tensors["norm"][0] = groups.rank == 3
                guard.step(step)
            guard.close()
        return [error.step for error in seen]

    assert on_each(program) == [0, 1, 2]
    assert [record.message.startswith("rankmesh: 'norm' differs") for record in caplog.records] == [True] * 3


def test_a_value_that_is_reduced():
    """It is compared on the ranks over which it is reduced, as others are, and apart from a tensor of that name."""

    def program(groups):
        tensors, shardings = {"norm": torch.zeros(2)}, {"norm": rm.Sharding(groups.plan.mesh, shape=(2,))}
        guard = rm.Guard(groups, tensors, shardings, every=3)

        def train():
            for step in range(9):
                norm = torch.tensor(1.0 + groups["tp"].ranks[0] + (step >= 4 and groups.rank == 2))
                guard.sum("norm", norm, over="tp")
                guard.sum("loss", 0.5 if groups.plan.mesh.coordinate(groups.rank)["pp"] else None, over="dp")
                guard.step(step)

        return raised(train)

    found = on_each(program)
    assert (found["tensor"], found["step"], found["ranks"], found["group"]) == ("norm", 6, (2, 3), "tp@pp0,dp1")
    assert found["since"] == 3
    assert {found["expected"], found["got"]} == {3.0, 4.0}


def test_values_in_any_order():
    """Ranks may name them in another order; what is looked at late does not gather."""

    def program(groups):
        guard = rm.Guard(groups, {}, {}, every=1)
        names = [("norm", 1.0, "tp"), ("loss", 2.0, "dp"), ("scale", 3.0, "tp-dp")]
        for step in range(20):
            for name, value, over in names[groups.rank % 3 :] + names[: groups.rank % 3]:
                guard.sum(name, value, over=over)
                guard.finite(name, value)
            guard.step(step)
            assert len(guard._pending) <= 2
        guard.sum("norm", 1.0 + (groups.rank == 0), over="tp")
        return raised(guard.check)

    found = on_each(program)
    assert (found["tensor"], found["ranks"], found["tied"]) == ("norm", (0, 1), True)


def test_a_value_that_some_ranks_do_not_name():
    """Every rank hears of it, and nobody waits."""

    def program(groups):
        guard = rm.Guard(groups, {}, {}, every=1)
        if groups.rank != 5:
            guard.sum("norm", 1.0, over="tp")
        guard.step(0)
        with pytest.raises(rm.PlanError, match="with None where a rank has no value"):
            guard.step(1)

    sim.run(program, LAYOUT)


def test_values_of_a_step_that_raises():
    """They are gone with the step: the next check does not look at them."""

    def program(groups):
        tensors, shardings = model(groups)
        guard = rm.Guard(groups, tensors, shardings, every=1)
        guard.sum("norm", float(groups.rank == 1), over="tp")
        guard.step(0)
        guard.step(1)  # the sums are compared meanwhile
        guard.sum("norm", float(groups.rank == 2), over="tp")
        with pytest.raises(rm.Diverged):
            guard.step(2)
        guard.check(3)
        return guard.equal_at

    assert sim.run(program, LAYOUT) == [3] * 12


@pytest.mark.parametrize(
    ("bad", "given", "ranks", "local", "words"),
    [
        ({4}, True, (4,), True, "rank 4 put it in, and it reached ranks 0, 2"),
        ({2, 4}, True, (2, 4), True, "ranks 2, 4 put it in, and it reached rank 0"),
        ({4}, False, (0, 2, 4), False, "pass given="),
    ],
)
def test_who_put_in_a_value_that_is_not_finite(bad, given, ranks, local, words):
    """Summed over dp: the ranks whose own value is not finite, all of them; where that is unknown, all that have it."""

    def program(groups):
        guard = rm.Guard(groups, {}, {})
        given_here = torch.tensor(float("nan") if groups.rank in bad else 1.0)
        total = given_here.clone()
        dist.all_reduce(total, group=groups["dp"].pg)
        guard.finite("loss", total, given_here if given else None)
        return raised(guard.check)

    found = on_each(program)
    assert (found["ranks"], found["local"]) == (ranks, local)
    assert words in found["message"]


@pytest.mark.parametrize(("makers", "local"), [((3,), True), ((3, 5), False)])
def test_a_value_that_is_not_finite_of_finite_input(makers, local):
    """A single rank made it; what several have may have overflowed where it was reduced."""

    def program(groups):
        guard = rm.Guard(groups, {}, {})
        guard.finite("x", float("inf") if groups.rank in makers else 1.0, 1.0)
        return raised(guard.check)

    found = on_each(program)
    assert (found["ranks"], found["local"]) == (makers, local)
    assert ("it was made there" in found["message"]) is local


def with_experts(**sizes):
    """Ranks on tp and dp, and on these axes of a view of experts."""
    return rm.Plan(rm.Mesh(tp=2, dp=4).with_view("expert", **sizes), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])


@pytest.mark.parametrize(
    ("layout", "view", "axis", "group", "agree"),
    [
        ("tp=2,dp=2", None, "tp", "tp", "dp"),
        ("tp=2,dp=2", None, "dp", "dp", "tp"),
        ("ep=3,dp=2", None, "ep", "ep", "dp"),
        ("tp=2,dp=2,pp=2", None, "tp-pp", "tp-pp", "dp"),
        # Experts that were saved as one: the axes are those of the view in which the fewest ranks differ.
        (with_experts(etp=1, ep=2, edp=4), "expert", "ep", "tp", "dp"),
        (with_experts(ep=4, edp=2), "expert", "ep", "ep", "edp"),
    ],
)
def test_the_axes_over_which_replicas_drift(layout, view, axis, group, agree):
    """Every rank's value depends on its place on some axes only: these are named, and those over which it is equal."""

    def program(groups):
        place = groups.plan.mesh.coordinate(groups.rank, view=view)
        weight = torch.ones(4) + sum(10**at * place[name] for at, name in enumerate(axis.split("-")))
        guard = rm.Guard(groups, {"norm": weight}, {"norm": rm.Sharding(groups.plan.mesh, shape=(4,))})
        return raised(guard.check)

    found = on_each(program, layout)
    assert found["group"] == group
    assert f"differs within {group} at step 0 and is equal within {agree}" in found["message"]


@st.composite
def faults(draw):
    """A tensor on a mesh, and a rank that has an element of it wrong; None for none."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("tp", "dp", "pp")}
    mesh = Mesh(**sizes)
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    sharding = draw(shardings(mesh, shape, draw(st.sampled_from(["float32", "int64", "bool", "complex64"]))))
    rank = draw(st.integers(0, mesh.size - 1))
    local_of = sharding.of(rank)
    length = elements(tuple((0, length) for length in local_of.shape)) if sharding.holds(rank) else 0
    return sharding, rank, draw(st.integers(0, length - 1)) if length else None


@settings(max_examples=20)
@given(faults())
def test_one_wrong_element_of_any_tensor(fault):
    """It is found exactly if another rank holds the same, at the place that brute force gives."""
    sharding, rank, at = fault

    def program(groups):
        tensors = {}
        if sharding.holds(groups.rank):
            tensors["w"] = torch.zeros(sharding.of(groups.rank).shape, dtype=getattr(torch, sharding.dtype))
            if groups.rank == rank and at is not None:
                tensors["w"].view(-1)[at] = 1
        guard = rm.Guard(groups, tensors, {"w": sharding})
        found = raised(guard.check)
        guard.close()
        return found

    found = on_each(program, sharding.mesh)
    world = range(sharding.mesh.size)
    local_of = {one: local(sharding, one) for one in world if sharding.holds(one)}
    if rank in local_of and at is not None and (local_of[rank] < 0).all():
        return  # padding alone, as others have: which of it are copies, brute force does not tell
    copies = [one for one in local_of if rank in local_of and (local_of[one].shape, *local_of[one].reshape(-1)) ==
             (local_of[rank].shape, *local_of[rank].reshape(-1)) and sharding.of(one) == sharding.of(rank)]  # fmt: skip
    if at is None or len(copies) < 2:
        assert found is None
        return
    assert found["ranks"] == ((rank,) if len(copies) > 2 else tuple(copies))
    assert found["count"] == 1
    number = int(local_of[rank].reshape(-1)[at])
    if number < 0:
        assert found["box"] is None
    else:
        index = torch.tensor([*range(max(1, elements(tuple((0, n) for n in sharding.shape))))]).reshape(sharding.shape)
        place = [int(one) for one in (index == number).nonzero()[0]]
        assert found["box"] == tuple((low, low + 1) for low in place)


def test_what_a_guard_refuses():
    """Tensors that do not fit, before anything is compared."""

    def program(groups):
        tensors, shardings = model(groups)
        for wrong, match in (
            ({**tensors, "up": torch.zeros(9)}, r"tensor 'up' is torch.float32 \[9\]"),
            ({**tensors, "more": torch.zeros(1)}, "tensor 'more' has no sharding"),
        ):
            with pytest.raises(rm.PlanError, match=match):
                rm.Guard(groups, wrong, shardings)
        other = {name: rm.Sharding(Mesh(tp=4), shape=(1,)) for name in shardings}
        with pytest.raises(rm.PlanError, match="not on the plan's mesh"):
            rm.Guard(groups, {}, other)
        with pytest.raises(rm.PlanError, match="not 'stop'"):
            rm.Guard(groups, tensors, shardings, action="stop")
        with pytest.raises(rm.UnknownAxis):
            rm.Guard(groups, tensors, shardings).sum("norm", 1.0, over="ddp")

    sim.run(program, LAYOUT)
