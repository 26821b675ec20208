"""What gloo's readiness costs: members that send to each other, and stages that exchange outputs and gradients."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from tests.placement.dumb import turns

import rankmesh as rm
from rankmesh.core.clusters.cluster import Cluster, Level
from rankmesh.core.clusters.hardware import DEVICES
from rankmesh.core.model import Sizes
from rankmesh.placement import Message, Training, Transformer
from rankmesh.placement.predict import Links, predict, search_plan

SPEED = 1e6
# One host for each rank, links that all groups share, no latency.
CLUSTER = Cluster.parse("host=1,leaf=8").with_levels(
    [Level("host", 0.0, 1e12), Level("leaf", 0.0, SPEED, uplink=SPEED)]
)
HOSTS_OF_TWO = Cluster.parse("host=2,leaf=4").with_levels(CLUSTER.levels)


def _seconds(collective, spec, axis, backend="gloo", cluster=CLUSTER):
    plan = rm.Plan(rm.Mesh.parse(spec), [rm.GroupSpec(axis)])
    return Links(plan, cluster, backend).seconds(axis, [Message(collective, 8e6)])


@pytest.mark.parametrize("pairs", range(1, 8))
def test_pairs_toss_coins(pairs):
    """Each pair: both ways at once (1/4), or one of the two first (3/8 each). The busier way, over all that can be."""
    chance, busier = {-1: 3 / 8, 0: 1 / 4, 1: 3 / 8}, 0.0
    for toss in product(chance, repeat=pairs):
        busier += prod(chance[way] for way in toss) * abs(sum(toss))
    assert turns(pairs, 1) == pytest.approx(1 + busier / pairs, rel=0.03 if pairs > 1 else 1e-12)


@pytest.mark.parametrize(
    ("collective", "bytes_sent", "longer"),
    [("all-to-all", 4e6, 1.75), ("ring", 8e6, 1.75), ("all-gather", 8e6, 1.375), ("all-reduce", 8e6, 1),
     ("reduce-scatter", 8e6, 1), ("send/recv", 8e6, 1)],
)  # fmt: skip
def test_two_members_wait_for_each_other(collective, bytes_sent, longer):
    """With gloo, where a member sends before it has said that it is ready to receive; never with NCCL."""
    assert _seconds(collective, "dp=2", "dp") == pytest.approx(longer * bytes_sent / SPEED)
    assert _seconds(collective, "dp=2", "dp", "nccl") <= bytes_sent / SPEED * 1.001


def test_many_pairs_even_out():
    """Three peers of one member; two groups on the same hosts have one order. A ring of four has no pairs."""
    assert _seconds("all-to-all", "dp=4", "dp") == pytest.approx(6 * turns(3, 1))
    assert _seconds("all-to-all", "tp=2,dp=2", "dp", cluster=HOSTS_OF_TWO) == pytest.approx(8 * turns(1, 1))
    assert _seconds("all-gather", "dp=4", "dp") == pytest.approx(24)
    # Groups of two pipeline stages do not wait for each other: two pairs, two coins.
    assert _seconds("all-to-all", "pp=2,dp=2", "dp", cluster=HOSTS_OF_TWO) == pytest.approx(8 * turns(2, 1))


@pytest.mark.parametrize(("backend", "messages"), [("gloo", 8), ("nccl", 5)])
def test_outputs_and_gradients_of_two_stages(backend, messages):
    """Four microbatches on two stages: 8 messages one after the other, or 5 where both ways are used at once."""
    sizes, training = Sizes(pp=2), Training(batch=4, sequence=512, overlap=())
    model = Transformer(layers=2, hidden=1024, heads=8, ffn_hidden_size=4096, vocabulary=1024, tied=False)
    links = Links(search_plan(sizes, training), CLUSTER, backend)
    step = predict(model, training, replace(DEVICES["h100"], speed=float("inf")), links)
    assert step.seconds == pytest.approx(messages * 512 * 1024 * 2 / SPEED, rel=1e-3)
