"""The drop-in against megatron-core itself: random configurations, every getter, every global, every refusal."""

import random

import pytest
from tests.sweeping import ALL

pytest.importorskip("megatron.core.parallel_state")

PER_PROCESS = 160 if ALL else 50
PROCESSES = 2
LARGEST = 24


def configuration(draw):
    """World size and arguments, most of them possible."""
    tp, cp, pp, ep, dp = (draw.choice((1, 1, 2, 2, 3, 4)) for _ in range(5))
    etp = draw.choice((None, None, 1, tp, 2, 3))
    world = tp * cp * pp * dp
    expert = (etp or tp) * ep * pp
    if world > LARGEST or (world % expert and draw.random() < 0.97):
        return configuration(draw)
    arguments = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "order": order(draw, {"tp": max(tp, etp or tp), "cp": cp, "ep": ep, "dp": max(dp, world // expert), "pp": pp}),
        "num_distributed_optimizer_instances": draw.choice((1, 1, 1, 2, 2, 3)),
        "hierarchical_context_parallel_sizes": draw.choice((None, factors(draw, cp))),
        "virtual_pipeline_model_parallel_size": draw.choice((None, None, 2, 3)) if pp > 1 else None,
        "create_gloo_process_groups": draw.random() < 0.7,
        "create_all_gather_group": draw.random() < 0.3,
        "hybrid_context_parallel": draw.random() < 0.2,
        "get_embedding_ranks": draw.choice(EMBEDDINGS),
        "get_position_embedding_ranks": draw.choice(EMBEDDINGS),
    }
    if draw.random() < 0.1:
        arguments |= draw.choice(WRONG)
    return world, arguments


def order(draw, sizes):
    """An order of the axes, half of them with pp last; axes of size 1 may be left out, seldom another too."""
    names = list(sizes)
    draw.shuffle(names)
    if draw.random() < 0.7:
        names.sort(key="pp".__eq__)
    names = [name for name in names if draw.random() < (0.98 if sizes[name] > 1 else 0.6)]
    return "-".join(names) or "tp"


def factors(draw, size):
    """Sizes of a hierarchy whose product is the size, adjacent first."""
    found = []
    for factor in (2, 3, 2):
        if size % factor == 0 and size > 1 and draw.random() < 0.7:
            found.append(factor)
            size //= factor
    return [*found, size]


def two_ends(ranks):
    """The default, written as users do."""
    return [ranks[0], ranks[-1]] if len(ranks) > 1 else [ranks[0]]


def backwards(ranks):
    """A list that is not ascending."""
    return [ranks[-1], ranks[0]] if len(ranks) > 1 else [ranks[0]]


def second(ranks):
    """A stage in the middle."""
    return [ranks[len(ranks) // 2]]


EMBEDDINGS = (None, None, None, two_ends, backwards, second)
WRONG = (
    {"tensor_model_parallel_size": 5},
    {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
    {"sharp_enabled_group": "dp"},
    {"use_sharp": True, "sharp_enabled_group": "tp"},
    {"use_sharp": True, "sharp_enabled_group": "dp_replica", "num_distributed_optimizer_instances": 1},
    {"hierarchical_context_parallel_sizes": [5]},
    {"num_distributed_optimizer_instances": 5},
    {"pipeline_model_parallel_comm_backend": "gloo"},
    {"order": "tp-cp-ep-dp-pp-xp"},
    {"order": "tp-dp"},
    {"expert_tensor_parallel_size": 7},
)


def _compare(me, count):
    """This process's share of the configurations; how many were built and refused, and whatever differed."""
    from tests.dialects.megatron import peer as both

    draw, found = random.Random(1000 + me.rank), {"built": 0, "refused": 0, "wrong": []}  # noqa: S311
    for _ in range(count):
        size, arguments = configuration(draw)
        for rank in {draw.randrange(size), draw.randrange(size)}:
            compare(both, rank, size, arguments, found)
    return found


def compare(both, rank, size, arguments, found, unlike=None):
    """Initialise both as one rank, and add to ``found`` whether they did, or what differs.

    ``unlike`` is in the error of a refusal that the drop-in does not share.
    """
    both.world(rank, size)
    theirs, mine = both.start_peer(arguments), both.start_ours(arguments)
    wrong, built = [], theirs is mine is None
    found["built"] += built
    found["refused"] += theirs is not None
    if built:
        wrong = list(differences(both))
    elif theirs is None and "which hybrid_cp cannot fill" not in str(mine):
        wrong = [f"ours raised {mine!r}"]
    elif theirs is not None and not isinstance(mine, type(theirs)) and (unlike is None or unlike not in str(theirs)):
        wrong = [f"peer raised {theirs!r}, ours {mine!r}"]
    found["wrong"] += [f"rank {rank} of {size}: {arguments}: {text}" for text in wrong][: 12 - len(found["wrong"])]
    both.ours.destroy_model_parallel()
    return built


def differences(both):
    """What the two answer otherwise, to every question and in every global."""
    for (name, flags), ours, theirs in zip(
        both.QUESTIONS, both.answers(both.ours), both.answers(both.peer), strict=True
    ):
        if not both.same(ours, theirs):
            yield f"{name}({flags}): ours {ours!r}, peer {theirs!r}"
    for name in both.GLOBALS:
        ours, theirs = both.plain(getattr(both.ours, name)), both.plain(getattr(both.peer, name))
        if name == "_global_process_group_list":  # each communicator once, however many groups share it
            ours, theirs = both.distinct(ours), both.distinct(theirs)
        if ours != theirs:
            yield f"{name}: ours {ours!r}, peer {theirs!r}"


def test_random_configurations_equal_megatron_core(ranks):
    """Random configurations, up to 2 ranks of each: every getter with every flag, every global, every refusal."""
    result = ranks(PROCESSES, _compare, PER_PROCESS, world=None)
    wrong = [text for part in result for text in part["wrong"]]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert sum(part["built"] for part in result) >= 0.7 * PROCESSES * PER_PROCESS
    assert sum(part["refused"] for part in result) >= 0.05 * PROCESSES * PER_PROCESS
