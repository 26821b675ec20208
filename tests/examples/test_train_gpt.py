"""The example trains the same on every layout: losses and gradient norms of a run on one process."""

from dataclasses import replace

import pytest
from examples.train_gpt.gpt import text
from examples.train_gpt.gpt.layout import Refused, Sizes, of
from examples.train_gpt.gpt.loop import GROUPS
from tests.examples import plain_gpt
from tests.examples.training import (
    TINY,
    arguments_of,
    refused_checkpoints,
    restarted,
    resume,
    shard_sizes,
    train,
    train_and_save,
    train_in_words,
    trainer,
)

import rankmesh as rm
from rankmesh import sim

LAYOUTS = {
    "tp=2": 2,
    "cp=2": 2,
    "dp=2": 2,
    "pp=2": 2,
    "dp=2,ep=2": 2,
    "cp=2,ep=2": 2,
    "pp=4": 4,
    "cp=2,dp=2,ep=2": 4,
    "cp=2,dp=2,ep=4": 4,
    "tp=2,cp=2,pp=2,dp=2,ep=2": 16,
    "tp=2,pp=2,dp=2": 8,
}
LIMIT = {"limit": 100, "timeout": 60.0}


@pytest.fixture
def single(ranks):
    """What one process is told, by dtype; asked once."""

    def of(dtype="float64"):
        if dtype not in _single:
            _single[dtype] = ranks(1, train, "", "rankmesh", dtype, **LIMIT)[0]
        return _single[dtype]

    return of


_single = {}


def difference(result, expected):
    """The largest difference of any loss and any norm."""
    assert len(result) == len(expected) > 0
    return max(abs(a - b) for one, other in zip(result, expected, strict=True) for a, b in zip(one, other, strict=True))


def test_one_process_is_plain_torch(ranks):
    """1 rank: losses and norms are those of the model written in plain torch, with torch's AdamW and clipping."""
    result, plain = ranks(1, _both)[0]
    assert difference(result, plain) < 1e-12
    assert min(norm for _, norm in result) > TINY.clip, "the norms are clipped, or the test would not see how"
    assert result[-1][0] < result[0][0] - 0.1


def _both(me):
    with trainer(1, "") as here:
        weights = {piece.name: piece.parameter.detach().clone() for piece in here.weights.pieces}
        result = arguments_of(here.steps())
    shape = TINY.shape
    batches = [text.batch(text.read(), TINY.seed, i, shape.batch, shape.sequence) for i in range(TINY.steps)]
    return result, plain_gpt.train(weights, TINY, batches)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_has_the_losses_of_one_process(ranks, single, layout):
    """2 to 16 ranks, float64: every rank is told the losses and norms of the run on one process, to 1e-9."""
    for result in ranks(LAYOUTS[layout], train, layout, **LIMIT):
        assert difference(result, single()) < 1e-9


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["cp=2,dp=2,ep=2", "tp=2,pp=2,dp=2"])
def test_single_precision(ranks, single, layout):
    """4 and 8 ranks, float32: the same to 1e-4."""
    for result in ranks(LAYOUTS[layout], train, layout, "rankmesh", "float32", **LIMIT):
        assert difference(result, single("float32")) < 1e-4


WORDS = {
    4: (
        ("megatron", "cp=2,dp=2,ep=2"),
        ("nanotron", "cp=2,dp=2,ep=2"),
        ("process_groups", "tp=2,pp=2"),
        ("process_groups", "pp=2,dp=2"),
        ("megatron", "pp=4"),
        ("nanotron", "pp=4"),
    ),
    8: (
        ("megatron", "tp=2,pp=2,dp=2"),
        ("nanotron", "tp=2,pp=2,dp=2"),
        ("process_groups", "tp=2,pp=2,dp=2"),
        ("megatron", "pp=2,dp=4,ep=2"),
        ("nanotron", "pp=2,dp=4,ep=2"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.long)])
def test_words_of_peers(ranks, single, size):
    """4 and 8 ranks, one training after the other: groups made in peers' words give the same losses and norms."""
    for rank in ranks(size, train_in_words, *WORDS[size], **LIMIT):
        for result in rank:
            assert difference(result, single()) < 1e-9


def test_checkpoint_fits_every_layout(ranks, single, tmp_path):
    """4 ranks: two steps under one layout, the rest under another, then the end again on one process.

    A checkpoint that fewer ranks write over another one counts, not what is left of the other.
    """
    folder = str(tmp_path)
    ranks(4, train_and_save, "tp=2,pp=2", folder, 2, **LIMIT)
    first = ranks(2, train_and_save, "tp=2", folder, 2, **LIMIT)[0]
    assert difference(ranks(4, resume, "tp=2,pp=2", folder, **LIMIT)[0], single()[2:]) < 1e-9
    (tmp_path / "step-000004" / "rankmesh.json").unlink()
    rest = ranks(4, resume, "cp=2,dp=2,ep=2", folder, **LIMIT)[0]
    assert difference(first + rest, single()) < 1e-9
    (tmp_path / "step-000004" / "rankmesh.json").unlink()
    assert difference(ranks(1, resume, "", folder, **LIMIT)[0], single()[2:]) < 1e-9


def test_refused_checkpoints(ranks, tmp_path):
    """1 rank: no checkpoint, one of another model, and one that lost a file are told, and nothing is loaded."""
    none, other, torn = ranks(1, refused_checkpoints, str(tmp_path))[0]
    assert "which holds no checkpoint" in none
    assert "ask for the same model" in other
    assert "the checkpoint is truncated; read another" in torn


@pytest.mark.nightly
def test_state_moves_between_layouts_in_memory(ranks):
    """8 ranks: each step under another layout, the state moved in memory between them: the losses of one process."""
    layouts = ["tp=2,pp=2,dp=2", "cp=2,dp=4,ep=4", "pp=4,dp=2,ep=2", "tp=2,cp=2,dp=2,ep=2"]
    layouts += ["cp=2,dp=3,ep=2,order=tp-dp-cp-ep-pp", "tp=2,dp=3"]  # columns that 6 and 3 replicas do not divide
    single = ranks(1, restarted, [(len(layouts), "tp=1,dp=1")], **LIMIT)[0]
    for result in ranks(8, restarted, [(1, layout) for layout in layouts], **LIMIT)[:6]:
        assert difference(result, single) < 1e-9


def test_moments_are_sharded_over_replicas(ranks):
    """4 ranks: each holds its columns of both moments, of which no other rank has a copy, in Adam's own memory."""
    sizes = ranks(4, shard_sizes, "cp=2,dp=2,ep=2")
    assert sizes[0]["block0.norm1"] == 16
    assert [one["block0.norm1.exp_avg"] for one in sizes] == [4] * 4
    for name, size in {"block0.attention.in": 3 * 16 * 16, "block1.experts.up": 4 * 64 * 16}.items():
        assert sum(one[f"{name}.exp_avg_sq"] for one in sizes) == size, name


def test_an_order_that_mixes_tokens():
    """8 ranks, an order in which the experts' tp groups are others than the rest's: refused on every rank."""

    def groups():
        with rm.connect("megatron:tp=2,cp=2,dp=2,ep=2,order=cp-tp-ep-dp-pp") as made:
            of(made)

    errors = sim.run(groups, 8, return_exceptions=True)
    assert {type(error) for error in errors} == {Refused}


REFUSED = {
    "foo=2": "axis 'foo'",
    "tp=3": "does not divide it",
    "tp=2,dp=2": "torchrun --nproc-per-node N",
    "tp=8": "tp = 8 does not divide heads = 2",
    "cp=16": "2 · cp = 32 does not divide sequence = 16",
    "pp=8": "pp = 8 does not divide layers = 4",
    "ep=8": "ep = 8 does not divide experts = 4",
    "dp=16": "dp · microbatches = 32 does not divide batch = 8",
    "tp=2,etp=1": "etp equals tp",
}


@pytest.mark.parametrize("layout", REFUSED)
def test_refused_layout(layout):
    """A layout that the world or the model cannot serve is refused in one sentence that names the sizes."""
    world_size = 16 if layout == "dp=16" or layout == "cp=16" else 8
    with pytest.raises(Refused) as caught:
        TINY.shape.check(Sizes.parse(layout, world_size))
    assert REFUSED[layout] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"experts": 0}, Sizes(dp=2, ep=2), "needs experts, and this model has none"),
        ({"top": 5}, Sizes(), "top = 5 is not in 1 to 4"),
        ({"heads": 3}, Sizes(), "2 · heads = 6 does not divide hidden = 16"),
    ],
)
def test_refused_model(changes, sizes, message):
    """So is a model that makes no sense, or that lacks what an axis splits."""
    with pytest.raises(Refused, match=message):
        replace(TINY.shape, **changes).check(sizes)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("process_groups", Sizes(cp=2), "has the axes tp, pp and dp"),
        ("process_groups", Sizes(pp=4), "no group of the first and last stage"),
        ("nanotron", Sizes(cp=2, dp=1, ep=2), "must divide dp"),
    ],
)
def test_words_that_a_peer_lacks(name, sizes, message):
    """A layout that a peer's class cannot express is refused before any group is made."""
    with pytest.raises(Refused, match=message), GROUPS[name](sizes):
        pass
