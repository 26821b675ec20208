"""Memory by part beside formulas of others, a model that torch builds, and a schedule run event by event."""

import json

import pytest
import torch
from tests.placement.schedules import most_in_flight
from torch import nn

from bench.published import ROWS, row_of
from rankmesh.core.model import Sizes
from rankmesh.placement import Training, Transformer
from rankmesh.placement.memory import block_activations, in_flight, memory, stage_memory
from rankmesh.placement.steps import parameters

GPT = Transformer(layers=8, hidden=1024, heads=16, ffn_hidden_size=4096, vocabulary=51200)
OLD = {"attention": "unfused", "dropout": True}


def _paper(hidden, heads, sequence, tp, *, parallel, selective):
    """Bytes of a layer and token: Korthikanti et al. 2022, equations 1, 2, 4 and table 2."""
    scores = 0 if selective else 5 * heads * sequence / tp
    return 34 * hidden / tp + scores if parallel else hidden * (10 + 24 / tp) + scores


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_activations_are_those_of_the_paper(tp, parallel, selective):
    """A GPT block with unfused attention and dropout keeps 34 h + 5 a s, cut as the paper cuts it."""
    recompute = "selective" if selective else "none"
    training = Training(batch=1, sequence=2048, sequence_parallel=parallel, **OLD)
    ours = block_activations(GPT, training, Sizes(tp=tp), experts=False, recompute=recompute)
    assert ours == pytest.approx(_paper(1024, 16, 2048, tp, parallel=parallel, selective=selective))


def test_full_recomputation_keeps_the_input():
    """Two bytes of each hidden value, cut by tp where its ranks split the tokens."""
    for parallel, expected in ((False, 2048), (True, 512)):
        training = Training(batch=1, sequence=64, sequence_parallel=parallel)
        assert block_activations(GPT, training, Sizes(tp=4), experts=False, recompute="full") == expected


class _Block(nn.Module):
    """A block with grouped queries, and a gated feed-forward layer or a router and experts."""

    def __init__(self, hidden, heads, kv_heads, width, wide, experts=0):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.queries = nn.Linear(hidden, heads * width, bias=False)
        self.keys, self.values = (nn.Linear(hidden, kv_heads * width, bias=False) for _ in range(2))
        self.output = nn.Linear(heads * width, hidden, bias=False)
        self.feed = nn.ModuleList(
            nn.ModuleList([nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False),
                           nn.Linear(wide, hidden, bias=False)])
            for _ in range(experts or 1)
        )  # fmt: skip
        if experts:
            self.router = nn.Linear(hidden, experts, bias=False)


@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_parameters_are_those_that_torch_counts(experts, pp):
    """The stages together have the parameters of the same model built of torch's modules on the meta device."""
    model = Transformer(layers=7, hidden=64, heads=8, kv_heads=2, width=16, ffn_hidden_size=96, vocabulary=100,
                        gated=True, tied=False, experts=experts, top_k=2, moe_ffn_hidden_size=96)  # fmt: skip
    with torch.device("meta"):
        blocks = nn.ModuleList([_Block(64, 8, 2, 16, 96, experts) for _ in range(7)])
        rest = nn.ModuleList([nn.Embedding(100, 64), nn.Linear(64, 100, bias=False), nn.RMSNorm(64)])
    count = sum(weight.numel() for module in (blocks, rest) for weight in module.parameters())
    assert sum(sum(parameters(model, Sizes(pp=pp), stage)) for stage in range(pp)) == count == model.parameters


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_in_flight_is_what_the_schedule_keeps(pp, virtual_stages, rounds):
    """No stage keeps more microbatches than predicted, and each keeps as many in a schedule run step by step."""
    training = Training(batch=pp * rounds, sequence=1, virtual_stages=virtual_stages)
    for stage in range(pp):
        kept = most_in_flight(stage, pp, pp * rounds, virtual_stages)
        assert in_flight(Sizes(pp=pp), training, stage) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("zero", "divided"),
    [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")), (3, ("optimizer", "gradients"))],
)
def test_what_is_sharded(zero, divided):
    """Each level of zero divides one part more by the replicas; copies of the shards divide by fewer."""
    whole = stage_memory(GPT, Training(batch=8, sequence=64, zero=0), Sizes(dp=8), 0)
    for replicate in (1, 2):
        found = stage_memory(GPT, Training(batch=8, sequence=64, zero=zero, replicate=replicate), Sizes(dp=8), 0)
        for name in ("optimizer", "gradients"):
            ranks = 8 / replicate if name in divided else 1
            assert found[name] == pytest.approx(whole[name] / ranks)
    assert (found["weights"] < whole["weights"]) == (zero == 3)


def test_published_memory_is_met():
    """What torchtitan measured is at most what is predicted, which is at most a tenth more."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    measured = [row for row in rows["rows"] if "memory" in row["published"]]
    assert len(measured) == 4
    for row in measured:
        sizes, _, model, training, _ = row_of(row)
        ratio = sum(memory(model, training, sizes).values()) / row["published"]["memory"]
        assert 1 <= ratio <= 1.1, row["name"]
