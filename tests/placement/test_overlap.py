"""What place finds is quickest by what search predicts: one model of what hides behind computation."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.test_place import speeds
from tests.topology.strategies import clusters

import rankmesh as rm
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES
from rankmesh.core.model import OVERLAP, Sizes
from rankmesh.errors import PlacementError
from rankmesh.placement import Training, Transformer, place
from rankmesh.placement.place import WORTH
from rankmesh.placement.predict import Links, Prediction, predict, search_plan
from rankmesh.placement.search import evaluate, settled
from rankmesh.placement.steps import Roles, usual_work

H100 = DEVICES["h100"]
MODEL = Transformer(layers=6, hidden=64, heads=8, ffn_hidden_size=128, vocabulary=128, gated=True, tied=False,
                    experts=8, top_k=2, moe_ffn_hidden_size=64, dense_layers=1)  # fmt: skip


@st.composite
def problems(draw, most=8):
    """Sizes of a few ranks, how they train, a cluster of random links with a device for each rank."""
    tp, cp, pp, dp = (draw(st.sampled_from([1, 2, 3, 1])) for _ in range(4))
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4) if tp * cp * dp % ep == 0]))
    sizes = Sizes(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep)
    overlap = tuple(name for name in OVERLAP if draw(st.booleans()))
    schedule = draw(st.sampled_from(["1f1b", "dualpipe"])) if pp == 2 else "1f1b"
    zero, context = draw(st.integers(0, 3)), draw(st.sampled_from(["ring", "all-gather"]))
    sequence = draw(st.sampled_from([16, 512]))
    training = Training(batch=4 * dp, sequence=sequence, overlap=overlap, schedule=schedule, zero=zero, context=context)
    cluster = draw(
        clusters(most_hosts=4, most_devices=4).filter(lambda found: sizes.world <= min(most, found.size) <= 12)
    )
    return sizes, training, draw(speeds(cluster)), draw(st.sampled_from(["nccl", "gloo"]))


def _step(plan, problem):
    _, training, cluster, backend = problem
    return predict(MODEL, training, H100, Links(plan, cluster, backend)).seconds


def _devices(links, orders):
    """The device of each rank under each order of the ranks."""
    device_of = {rank: device for device, rank in enumerate(links.ranks.tolist())}
    return np.array([[device_of[rank] for rank in order] for order in orders])


@given(problems())
@settings(max_examples=15)
def test_no_placement_is_predicted_to_be_slower_than_the_order_given(problem):
    """The step is no slower, it is the one that predict has of the placed plan, and so are its parts."""
    sizes, training, cluster, backend = problem
    plan = search_plan(sizes, training)
    placed = place(plan, cluster, model=MODEL, training=training, backend=backend)
    before, after = _step(plan, problem), _step(placed.plan, problem)
    assert after <= before * (1 + 1e-9)
    assert placed.step.seconds == pytest.approx(after)
    assert placed.step_before.seconds == pytest.approx(before)
    assert placed.cost - placed.before == pytest.approx(after - before, abs=1e-9 * before)
    assert placed.cost >= -1e-9 * before
    again = place(placed.plan, cluster, model=MODEL, training=training, backend=backend)
    assert again.rank_map == placed.rank_map


@given(problems(most=6))
@settings(max_examples=8)
def test_of_few_ranks_no_order_is_quicker(problem):
    """Of all permutations of up to 6 ranks, predicted together, none has a quicker step."""
    sizes, training, cluster, backend = problem
    plan = search_plan(sizes, training)
    placed = place(plan, cluster, model=MODEL, training=training, backend=backend)
    links = Links(plan, cluster, backend)
    orders = [*permutations(range(sizes.world))]
    every = Prediction(MODEL, training, H100, links.roles).seconds(links.under(_devices(links, orders)))
    without = predict(MODEL, training, H100, links.only(())).seconds
    least = min(every) - without
    assert placed.exact
    assert placed.cost == pytest.approx(least, abs=1e-9 * without) or (
        placed.unchanged and placed.cost <= least / (1 - WORTH) + 1e-9 * without
    )


@given(problems(), st.data())
@settings(max_examples=15)
def test_placements_are_predicted_together_as_one_by_one(problem, data):
    """The seconds under several placements at once are those of each."""
    sizes, training, cluster, backend = problem
    plan = search_plan(sizes, training)
    orders = [data.draw(st.permutations(range(sizes.world))) for _ in range(3)]
    links = Links(plan, cluster, backend)
    found = Prediction(MODEL, training, H100, links.roles).seconds(links.under(_devices(links, orders)))
    assert found.tolist() == pytest.approx([_step(plan.replace(rank_map=order), problem) for order in orders])


@pytest.mark.parametrize(
    "spec",
    ["ep=8,dp=8", "ep=4,dp=8", "dp=4,ep=4,tp=2", "ep=4,pp=2,dp=4", "ep=2,dp=8", "megatron:world=64,ep=8",
     "megatron:world=64,tp=2,ep=8,etp=1", "megatron:world=32,ep=4,order=dp-pp-ep-cp-tp"],
)  # fmt: skip
def test_experts_do_not_leave_a_host_for_gradients(spec):
    """By default the all-to-all stays on NVLink; the reduction of gradients hides behind the backward pass."""
    plan = rm.read(spec)
    placed = place(plan, Cluster.parse(f"host=8,leaf={plan.world_size // 8}"))
    kinds = {kind.name: kind for kind in placed.kinds}
    assert kinds["ep"].level == "host"
    assert kinds["ep"].cost <= kinds["ep"].before
    assert placed.step.seconds <= placed.step_before.seconds
    assert placed.step.hidden["dp"] > 0
    assert sum(kind.cost for kind in placed.kinds) > placed.cost


def test_what_does_not_hide_decides():
    """The same layout with and without overlap of dp: only without does its reduction take the faster links."""
    cluster, plan = Cluster.parse("host=4:450GB,leaf=4:50GB"), rm.read("ep=4,dp=4")
    model, training = usual_work(Roles.of(plan))
    levels = {}
    for overlap in (("dp",), ()):
        placed = place(plan, cluster, model=model, training=replace(training, batch=16, overlap=overlap))
        levels[overlap] = {kind.name: kind.level for kind in placed.kinds}
    assert levels == {("dp",): {"ep": "host", "dp": "leaf"}, (): {"ep": "leaf", "dp": "host"}}


def test_place_and_search_agree():
    """The step of a placed layout is the one that search has of it, defaults of bandwidths included."""
    cluster, sizes = Cluster.parse("host=4,leaf=2"), Sizes(tp=2, pp=2, dp=2, ep=2)
    training = Training(batch=16, sequence=512)
    plan = search_plan(sizes, training)
    found = evaluate(sizes, cluster, MODEL, training)
    placed = place(plan, cluster, model=MODEL, training=training)
    assert placed.step.seconds == pytest.approx(found.seconds)
    links = Links(plan, cluster)
    assert placed.step_before.seconds == pytest.approx(predict(MODEL, training, H100, links).seconds)
    chosen = settled(plan, cluster, MODEL, training)
    assert predict(MODEL, chosen, H100, links).seconds <= placed.step_before.seconds
    assert settled(plan, cluster, MODEL, training, device=replace(H100, memory=1e9)) is None


@pytest.mark.parametrize(
    ("sizes", "arguments", "value"),
    [
        (Sizes(dp=4), {"training": Training(batch=6, sequence=16)}, {"batch": 6, "dp": 4}),
        (Sizes(pp=8), {"training": Training(batch=6, sequence=16)}, {"pp": 8}),
        (Sizes(dp=3, ep=3), {"training": Training(batch=6, sequence=16)}, {"ep": 3}),
        (Sizes(dp=2), {}, {}),
        (Sizes(dp=2), {"training": Training(batch=6, sequence=16), "traffic": {}}, {}),
    ],
)
def test_a_model_that_does_not_fit_the_layout_is_refused(sizes, arguments, value):
    """A batch that replicas do not divide, more stages than layers, experts that ep does not cut, half a model."""
    plan = search_plan(sizes, Training(batch=6, sequence=16))
    with pytest.raises(PlacementError) as error:
        place(plan, Cluster.of_nodes(8, sizes.world), model=MODEL, **arguments)
    assert value.items() <= error.value.values.items()
