"""recipes.megatron against megatron-core's own RankGenerator, and against its group rules in plain words."""

import random
import warnings
from itertools import chain
from math import prod

import pytest

from rankmesh import LayoutError
from rankmesh.core import recipes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("megatron.core.parallel_state")

CASES = 600
DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "mp": "tp-pp",
    "dp_cp": "dp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "tp_dp": "tp-dp",
    "tp_cp": "tp-cp",
}
EXPERT = {
    "ep_tp": "tp",
    "ep": "ep",
    "ep_dp": "dp",
    "pp": "pp",
    "tp_ep_mp": "tp-ep",
    "tp_ep_pp": "tp-ep-pp",
}


def configurations():
    """Random sizes that fit and random orders; half end in pp, and axes of size 1 may be left out."""
    draw, found = random.Random(20251), []  # noqa: S311
    while len(found) < CASES:
        tp, cp, pp, ep, dp = (draw.choice((1, 1, 2, 2, 3, 4)) for _ in range(5))
        etp = draw.choice((1, tp, 2, 3))
        world = tp * cp * dp * pp
        if world > 192 or world % (etp * ep * pp):
            continue
        edp = world // (etp * ep * pp)
        order = ["tp", "cp", "ep", "dp", "pp"]
        draw.shuffle(order)
        if draw.random() < 0.5:
            order.sort(key="pp".__eq__)
        needed = {"tp": max(tp, etp), "cp": cp, "ep": ep, "dp": max(dp, edp), "pp": pp}
        order = [name for name in order if needed[name] > 1 or draw.random() < 0.5]
        if order:
            sizes = {"world_size": world, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
            found.append((sizes, "-".join(order), dp, edp))
    return found


def generators(sizes, order, dp, edp):
    """megatron-core's two generators, as its initialize_model_parallel makes them."""
    dense = peer.RankGenerator(tp=sizes["tp"], ep=1, dp=dp, pp=sizes["pp"], cp=sizes["cp"], order=order)
    expert = peer.RankGenerator(tp=sizes["etp"], ep=sizes["ep"], dp=edp, pp=sizes["pp"], cp=1, order=order)
    return dense, expert


def test_every_group_equals_the_rank_generator():
    """Dense and expert groups are the peer's lists in the peer's order, and what it refuses is refused."""
    built = refused = 0
    for sizes, order, dp, edp in configurations():
        dense, expert = generators(sizes, order, dp, edp)
        if dense.get_ranks("pp") != expert.get_ranks("pp"):
            with pytest.raises(LayoutError, match="view 'expert' shares 'pp'"):
                recipes.megatron(**sizes, order=order)
            refused += 1
            continue
        plan = recipes.megatron(**sizes, order=order)
        for name, token in DENSE.items():
            assert plan.groups(name).tolist() == dense.get_ranks(token), (sizes, order, name)
        for name, token in EXPERT.items():
            assert plan.groups(name).tolist() == expert.get_ranks(token), (sizes, order, name)
        built += 1
    assert built >= 400
    assert refused >= 20


def test_embedding_ranks_equal_the_defaults():
    """The embeddings are where the peer's default functions put them, for each length of pipeline."""
    for pp in (1, 2, 3, 4):
        plan = recipes.megatron(2 * pp, tp=2, pp=pp)
        pipelines = plan.groups("pp").tolist()
        assert plan.groups("embd").tolist() == [peer.default_embedding_ranks(ranks) for ranks in pipelines]
        assert plan.groups("pos_embd").tolist() == [peer.default_position_embedding_ranks(ranks) for ranks in pipelines]


def test_optimizer_instances():
    """Instances cut dp_cp in runs and ep_dp in two levels, and join the tp_ep_pp of one instance."""
    checked = 0
    for sizes, order, dp, edp in configurations():
        dense, expert = generators(sizes, order, dp, edp)
        instances = random.Random(world_seed(sizes)).choice((2, 3))  # noqa: S311
        whole = dp * sizes["cp"]
        if whole % instances or edp % instances or dense.get_ranks("pp") != expert.get_ranks("pp"):
            continue
        plan = recipes.megatron(**sizes, order=order, optimizer_instances=instances)
        intra = [run for group in dense.get_ranks("dp-cp") for run in runs(group, whole // instances)]
        assert plan.groups("intra_dp_cp").tolist() == intra
        part = edp // instances
        rows = [runs(group, part) for group in expert.get_ranks("dp")]
        assert plan.groups("intra_ep_dp").tolist() == list(chain.from_iterable(rows))
        columns = [list(column) for group in rows for column in zip(*group, strict=True)]
        assert plan.groups("inter_ep_dp").tolist() == columns
        joined = [sorted(chain(*models)) for models in runs(expert.get_ranks("tp-ep-pp"), part)]
        assert sorted(map(sorted, plan.groups("intra_dist_opt_instance"))) == sorted(joined)
        checked += 1
    assert checked >= 100


def runs(items, length):
    """A list cut into consecutive pieces."""
    return [items[i : i + length] for i in range(0, len(items), length)]


def world_seed(sizes):
    """A number that depends on the sizes alone."""
    return sum(value * 31**i for i, value in enumerate(sizes.values()))


def test_one_instance_is_the_whole():
    """Without instances, the intra groups are the data-parallel groups and share their communicators."""
    plan = recipes.megatron(32, tp=2, cp=2, pp=2, ep=2, etp=1)
    assert plan.groups("intra_dp_cp").tolist() == plan.groups("dp_cp").tolist()
    assert plan.groups("intra_ep_dp").tolist() == plan.groups("ep_dp").tolist()
    local = plan.of(5)
    assert local["intra_dp_cp"].canonical == "dp_cp"
    assert local["intra_ep_dp"].canonical == local["ep_dp"].canonical


def test_hierarchical_context_parallel():
    """Each level of each context group is what the peer's rearrangement gives."""
    einops = pytest.importorskip("einops")
    for widths in ((2, 2, 4), (4, 2), (2, 3), (1, 4)):
        cp = prod(widths)
        plan = recipes.megatron(4 * cp, tp=2, cp=cp, pp=2, hierarchical_cp=widths)
        for level, width in enumerate(widths):
            expected = [
                piece
                for group in plan.groups("cp").array
                for piece in einops.rearrange(group, "(l s u) -> (l u) s", s=width, u=prod(widths[:level])).tolist()
            ]
            assert plan.groups(f"hcp_{level}").tolist() == expected


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_hybrid_context_parallel(size):
    """Hybrid groups are consecutive pieces of dp_cp of 2, 4, ... up to half of it."""
    plan = recipes.megatron(4 * size, tp=2, cp=2, pp=2, hybrid_cp=True)
    whole = plan.groups("dp_cp").tolist()
    parts = [2**i for i in range(1, size.bit_length() - 1)]
    assert [name for name in plan.kinds if name.startswith("hybrid")] == [f"hybrid_dp_cp_{part}" for part in parts]
    for part in parts:
        expected = [group[i : i + part] for group in whole for i in range(0, size, part)]
        assert plan.groups(f"hybrid_dp_cp_{part}").tolist() == expected
