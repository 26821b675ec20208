from collections import Counter

import pytest
import torch
from examples.train_gpt.gpt.layout import Sizes
from examples.train_gpt.gpt.loop import GROUPS, Run, Trainer
from examples.train_gpt.gpt.model import Shape
from examples.train_gpt.gpt.text import VOCABULARY
from tests.placement import programs
from tests.placement.counting import counted, predicted, totals

import rankmesh as rm
from rankmesh.errors import PlacementError
from rankmesh.placement import Message, Traffic, Training, Transformer, step_traffic
from rankmesh.placement.steps import Roles, stage_messages
from rankmesh.sim import run

SHAPE = Shape(layers=4, hidden=16, heads=2, experts=0, sequence=16, batch=8)
MIXED = Shape(layers=4, hidden=16, heads=2, experts=4, top=2, sequence=16, batch=8)


def stage_traffic(plan, *work):
    """What a rank of one pipeline stage sends in a step."""
    return Traffic(stage_messages(Roles.of(plan), *work))


def _model(shape):
    return Transformer(
        layers=shape.layers, hidden=shape.hidden, heads=shape.heads, ffn_hidden_size=4 * shape.hidden,
        vocabulary=VOCABULARY, experts=shape.experts, top_k=shape.top, expert_every=2,
    )  # fmt: skip


def _training(shape, sizes, **arguments):
    rows = shape.batch // sizes.dp // shape.microbatches
    form = dict.fromkeys(("activation", "gradient", "parameter", "scalar"), 4)
    return Training(
        batch=shape.batch, microbatch=rows, sequence=shape.sequence, context="all-gather",
        sequence_parallel=False, **form, **arguments,
    )  # fmt: skip


def _train(shape, layout, world, monkeypatch):
    """One step of the example on simulated ranks: what it sent, and what is predicted, of each rank."""
    sizes = Sizes.parse(layout, world)
    plan = rm.recipes.megatron(world, tp=sizes.tp, cp=sizes.cp, pp=sizes.pp, ep=sizes.ep)
    with counted(monkeypatch) as (calls, counting):

        def step():
            with GROUPS["rankmesh"](sizes) as groups:
                trainer = Trainer(Run(shape, steps=1), groups, torch.device("cpu"))
                rank = torch.distributed.get_rank()
                counting.add(rank)
                trainer.step(0)
                counting.discard(rank)

        run(step, world, timeout=60)

    def traffic(rank):
        return stage_traffic(plan, _model(shape), _training(shape, sizes), plan.mesh.coordinate(rank)["pp"])

    return plan, calls, predicted(plan, traffic)


@pytest.mark.parametrize(
    ("layout", "world"),
    [("tp=2", 2), ("cp=2", 2), ("pp=2", 2), ("pp=4", 4), ("", 4), ("tp=2,pp=2,cp=2", 8), ("tp=2,pp=2", 8)],
)
def test_dense_layouts_send_what_is_predicted(monkeypatch, layout, world):
    """2 to 8 simulated ranks: each sends exactly these messages in a step, of these bytes, this often."""
    plan, calls, expected = _train(SHAPE, layout, world, monkeypatch)
    # The example sums the norm of its experts' gradients even where it has none: a zero over their groups.
    for rank in range(world):
        for name in ("intra_ep_dp", "tp_ep_pp"):
            if plan.of(rank)[name].size > 1:
                expected[rank, plan.of(rank)[name].ranks, "all-reduce", 4] += 1
    assert calls
    if plan.mesh.axes["pp"] > 1:
        # The example sums the tied table apart from the other weights.
        calls, expected = _of_shares(calls), _of_shares(expected)
    assert calls == expected


def _of_shares(messages):
    """Messages, where those of a sharded optimizer are one for each rank, group and kind."""
    found = Counter()
    for (rank, ranks, kind, size), count in messages.items():
        if kind in ("all-gather", "reduce-scatter"):
            found[rank, ranks, kind] += size * count
        else:
            found[rank, ranks, kind, size] += count
    return found


@pytest.mark.parametrize(
    ("layout", "world"), [("ep=2", 2), ("tp=2,ep=2", 4), ("pp=2,ep=2", 4), ("tp=2,cp=2,ep=2", 8), ("cp=2,pp=2,ep=4", 8)]
)
def test_experts_send_what_is_predicted(monkeypatch, layout, world):
    """2 to 8 simulated ranks: the bytes of each kind of group, summed over the ranks, are those predicted.

    Which expert a row goes to is the router's choice; how many rows there are is not.
    """
    plan, calls, expected = _train(MIXED, layout, world, monkeypatch)
    assert calls
    assert totals(plan, calls) == totals(plan, expected)


# Parameters of the model below: three layers of attention 640, feed-forward 1024 and norms 32, a norm, the table.
WEIGHTS = 3 * (640 + 1024 + 32) + 16 + 512
PARTS = {
    "sequence parallel": (
        {"tp": 4},
        {"sequence_parallel": True},
        lambda tp: [programs.sequence_parallel(tp, 32, 16, 3) for _ in range(2)],
    ),
    "ring": ({"cp": 4}, {"context": "ring"}, lambda cp: [programs.ring_attention(cp, 8, 4) for _ in range(6)]),
    "ulysses": (
        {"cp": 4},
        {"context": "all-to-all"},
        lambda cp: [programs.heads_to_ranks(cp, 8, 16, 4) for _ in range(6)],
    ),
    "all-reduce": ({"dp": 4}, {"zero": 0}, lambda dp: programs.gradients_summed(dp, WEIGHTS)),
    "fsdp": ({"dp": 4}, {"zero": 3}, lambda dp: programs.weights_gathered(dp, WEIGHTS, 2)),
    "interleaved": ({"pp": 3}, {"virtual_stages": 2}, lambda pp: programs.interleaved(pp, 16 * 32, 2, 2)),
}


@pytest.mark.parametrize("part", PARTS)
def test_other_parts_send_what_is_predicted(monkeypatch, part):
    """3 or 4 simulated ranks: what the example has not, in its smallest form; without embedding, loss and norm."""
    sizes, arguments, program = PARTS[part]
    (kind,) = sizes
    model = Transformer(layers=3, hidden=16, heads=4, kv_heads=1, ffn_hidden_size=32, vocabulary=32)
    replicas = sizes.get("dp", 1)
    form = dict.fromkeys(("activation", "gradient", "parameter", "scalar"), 4)
    training = Training(batch=2 * replicas, sequence=32, **form, **arguments)
    mesh = rm.Mesh(**sizes)
    plan = rm.Plan(mesh, [rm.GroupSpec(kind)])
    with counted(monkeypatch) as (calls, counting):

        def part_of_step(groups):
            counting.add(groups.rank)
            program(groups[kind].pg)
            counting.discard(groups.rank)

        run(part_of_step, plan, timeout=60)

    def traffic(rank):
        # The ends of the pipeline add the embedding, the output and the loss, which the programs leave out.
        stage = mesh.coordinate(rank)["pp"] if kind == "pp" else 0
        whole = stage_traffic(plan, model, training, stage)
        return {name: _without_ends(messages, model, training, sizes) for name, messages in whole.items()}

    assert calls
    assert calls == predicted(plan, traffic)


def _without_ends(messages, model, training, sizes):
    kept = [message for message in messages if not (message.collective == "all-reduce" and message.bytes <= 4 * 32)]
    if "tp" not in sizes:
        return kept
    microbatches = training.microbatches(1)
    ends = {"all-gather": 3 * microbatches, "reduce-scatter": 2 * microbatches}
    return [Message(each.collective, each.bytes, each.times - ends[each.collective]) for each in kept]


def test_the_busiest_stage_counts():
    """Traffic of a step is that of the stage that sends most of a kind: the last one of tp, the middle one of pp."""
    plan = rm.recipes.megatron(8, tp=2, pp=4)
    model, training = _model(SHAPE), Training(batch=4, sequence=16, sequence_parallel=False)
    step = step_traffic(plan, model, training)
    assert step["tp"] == stage_traffic(plan, model, training, 3)["tp"]
    assert step["pp"][0].times == 2 * training.microbatches(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Training(batch=0, sequence=1),
        lambda: Training(batch=1, sequence=1, context="magic"),
        lambda: Training(batch=1, sequence=1, zero=4),
        lambda: Transformer(layers=-1, hidden=1, heads=1, ffn_hidden_size=1, vocabulary=1),
        lambda: Transformer(layers=1, hidden=1, heads=1, ffn_hidden_size=1, vocabulary=1, experts=2, top_k=3),
    ],
)
def test_models_that_are_none(make):
    """Numbers that are no sizes, and words that nobody knows, are refused."""
    with pytest.raises(PlacementError, match=r" is .*; give "):
        make()
