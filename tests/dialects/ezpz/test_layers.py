import copy
import io

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own habit
from torch import nn

import rankmesh.dialects.ezpz as tp
from rankmesh.dialects.ezpz import layers, mappings
from rankmesh.dialects.ezpz.layers import whole_of
from rankmesh.dialects.ezpz.state import default
from rankmesh.errors import PlanError, SizesError

ROWS, COLUMNS = 12, 8
INDICES = torch.tensor([[0, 3, 11], [4, 4, 8]])
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def _close(ours, whole):
    torch.testing.assert_close(ours, whole, **CLOSE)


def _like(layer, whole):
    """The torch layer with the weights that the parallel one has put together."""
    with torch.no_grad():
        whole.weight.copy_(layer.get_master_weight())
        if getattr(whole, "bias", None) is not None:
            whole.bias.copy_(_whole_bias(layer))
    return whole


def _whole_bias(layer):
    if isinstance(layer, layers.ColumnParallelLinear):
        return whole_of(layer.bias, 0, default)
    return layer.bias


def _compare(layer, whole, given, cut):
    """Outputs, and the gradients of input, weight and bias, against torch's whole layer."""
    torch.manual_seed(7)
    if given.is_floating_point():
        given = given.requires_grad_()
    theirs = given.detach().clone().requires_grad_(given.requires_grad)
    _like(layer, whole)
    for turn in range(2):  # gradients add up as torch's do
        ours, expected = layer(given), whole(theirs)
        _close(ours, expected)
        weights = torch.linspace(-1, 2, expected.numel()).reshape(expected.shape) + turn
        (ours * weights).sum().backward()
        (expected * weights).sum().backward()
    if given.requires_grad:
        _close(given.grad, theirs.grad)
    gradient = layer.weight.grad.to_dense() if layer.weight.grad.is_sparse else layer.weight.grad
    expected = whole.weight.grad.to_dense() if whole.weight.grad.is_sparse else whole.weight.grad
    _close(whole_of(gradient, cut, default), expected)
    if getattr(whole, "bias", None) is not None:
        gradient = whole_of(layer.bias.grad, 0, default) if cut == 0 else layer.bias.grad
        _close(gradient, whole.bias.grad)


def _started(me):
    torch.set_default_dtype(torch.float64)
    tp.initialize_tensor_parallel(me.size)
    torch.manual_seed(3)


def _biased(layer):
    """Biases start at zero: give them values, each rank its own where each has its own part."""
    assert layer.bias is None or not layer.bias.any()
    if layer.bias is not None:
        local = tp.get_tensor_parallel_rank() if isinstance(layer, layers.ColumnParallelLinear) else 0
        with torch.no_grad():
            layer.bias.copy_(torch.arange(layer.bias.numel()) / 4 + local)
    return layer


def _linear(me):
    _started(me)
    for bias in (True, False):
        column = _biased(layers.ColumnParallelLinear(COLUMNS, ROWS, bias=bias))
        _compare(column, nn.Linear(COLUMNS, ROWS, bias=bias), torch.randn(2, 3, COLUMNS), 0)
        row = _biased(layers.RowParallelLinear(ROWS, COLUMNS, bias=bias))
        _compare(row, nn.Linear(ROWS, COLUMNS, bias=bias), torch.randn(5, ROWS), 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_linear_layers(ranks, size):
    """1, 2 and 4 ranks: outputs and all gradients of both linear layers are those of torch's, with and without bias."""
    ranks(size, _linear)


def _strided(me):
    _started(me)
    size, rank = me.size, me.rank
    for layer, dim in (
        (layers.ColumnParallelLinear(3, 24, stride=3, keep_master_weight_for_test=True), 0),
        (layers.RowParallelLinear(24, 3, stride=3, keep_master_weight_for_test=True), 1),
        (layers.ParallelEmbedding(3, 24, keep_master_weight_for_test=True), 1),
    ):
        stride = 1 if isinstance(layer, layers.ParallelEmbedding) else 3
        blocks = layer.master_weight.chunk(stride, dim=dim)
        _close(layer.weight.detach(), torch.cat([block.chunk(size, dim=dim)[rank] for block in blocks], dim=dim))
        _close(layer.get_master_weight(), layer.master_weight)
    assert layers.ColumnParallelLinear(4, 8).master_weight is None


def test_whole_weights_and_strides(ranks):
    """4 ranks: each of several matrices side by side is cut for itself, and put together again in its place."""
    ranks(4, _strided)


def _single(me):
    """Layers that are built without groups are torch's, drawn from the same random numbers."""
    torch.manual_seed(5)
    layer = layers.ColumnParallelLinear(COLUMNS, ROWS)
    torch.manual_seed(5)
    weight = nn.init.xavier_normal_(torch.empty(ROWS, COLUMNS))
    assert torch.equal(layer.weight.detach(), weight)
    given = torch.randn(2, COLUMNS)
    assert torch.equal(layer(given), F.linear(given, weight, layer.bias))
    tp.initialize_tensor_parallel(me.size)
    torch.manual_seed(5)
    assert torch.equal(layers.ColumnParallelLinear(COLUMNS, ROWS).get_master_weight(), weight)
    error = me.error(SizesError, layer, given)
    return [error["built_for"], error["size"]]


def test_a_layer_of_another_size_is_refused(ranks):
    """2 ranks: a layer built before initialisation works alone; in the group it is refused, not wrong."""
    assert ranks(2, _single) == [[1, 2]] * 2


# -- embeddings ------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"padding_idx": 4},
    {"padding_idx": -1},
    {"padding_idx": 0},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"max_norm": 0.5},
    {"max_norm": 0.5, "norm_type": 1.0, "scale_grad_by_freq": True},
]


def _embeddings(me, options):
    _started(me)
    for kind, cut in ((layers.VocabParallelEmbedding, 0), (layers.ParallelEmbedding, 1)):
        if cut == 1 and "max_norm" in options and me.size > 1:
            me.error(PlanError, kind, ROWS, COLUMNS, **options)
            continue
        layer = kind(ROWS, COLUMNS, **options)
        _compare(layer, nn.Embedding(ROWS, COLUMNS, **options), INDICES, cut)
        # max_norm changes the table while it is read, in the rows that were asked for and in no other.
        whole = _like(layer, nn.Embedding(ROWS, COLUMNS, **options))
        whole(INDICES)
        layer(INDICES)
        _close(layer.get_master_weight(), whole.weight.detach())


@pytest.mark.few(6)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_embeddings(ranks, size, options):
    """1, 2 and 4 ranks: outputs and gradients are torch's with every option, or the option is refused."""
    ranks(size, _embeddings, options)


def _bad_indices(me):
    _started(me)
    kinds = []
    for kind in (layers.VocabParallelEmbedding, layers.ParallelEmbedding):
        for options in ({}, {"scale_grad_by_freq": True}):
            layer = kind(ROWS, COLUMNS, **options)
            kinds += [me.error(IndexError, layer, torch.tensor([0, index]))["kind"] for index in (ROWS, -1, 99)]
        kinds.append(me.error(SizesError, kind, ROWS, COLUMNS, padding_idx=ROWS)["kind"])
        kinds.append(me.error(AssertionError, kind, ROWS + 1, COLUMNS + 1)["kind"])
    return sorted(set(kinds))


def test_bad_indices(ranks):
    """2 ranks: an index outside the vocabulary is an IndexError on every rank, as in torch, never zeros."""
    assert ranks(2, _bad_indices) == [["IndexError", "SizesError"]] * 2


# -- a model ---------------------------------------------------------------------------------------


class _Model(nn.Module):
    """Embedding, a wide linear layer cut by columns, a narrow one cut by rows."""

    def __init__(self, parallel):
        super().__init__()
        if parallel:
            self.table = layers.VocabParallelEmbedding(ROWS, COLUMNS)
            self.wide = layers.ColumnParallelLinear(COLUMNS, 4 * COLUMNS, gather_output=False)
            self.narrow = layers.RowParallelLinear(4 * COLUMNS, COLUMNS, input_is_parallel=True)
        else:
            self.table = nn.Embedding(ROWS, COLUMNS)
            self.wide, self.narrow = nn.Linear(COLUMNS, 4 * COLUMNS), nn.Linear(4 * COLUMNS, COLUMNS)

    def forward(self, indices):
        return self.narrow(F.gelu(self.wide(self.table(indices))))


def _trains(me):
    _started(me)
    ours, whole = _Model(True), _Model(False)
    for name in ("table", "wide", "narrow"):
        _like(getattr(ours, name), getattr(whole, name))
    steps = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (ours, whole)]
    for _ in range(5):
        losses = [model(INDICES).square().mean() for model in (ours, whole)]
        _close(*losses)
        for loss, step in zip(losses, steps, strict=True):
            step.zero_grad()
            loss.backward()
            step.step()
    for name in ("table", "wide", "narrow"):
        _close(getattr(ours, name).get_master_weight(), getattr(whole, name).weight.detach())
    copied = copy.deepcopy(ours)
    _close(copied(INDICES), ours(INDICES))
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    _close(torch.load(saved, weights_only=False)(INDICES), ours(INDICES))
    return sorted(ours.state_dict())


def test_a_model_trains_like_the_whole_one(ranks):
    """4 ranks: five steps of Adam give the losses and weights of the single-process model; it copies and saves."""
    names = ["narrow.bias", "narrow.weight", "table.weight", "wide.bias", "wide.weight"]
    assert ranks(4, _trains) == [names] * 4


# -- mappings --------------------------------------------------------------------------------------


def _mappings(me):
    _started(me)
    size, rank = me.size, me.rank
    whole = torch.arange(4.0 * size).reshape(2, 2 * size)
    piece = whole.chunk(size, dim=-1)[rank]
    total = size * (size + 1) / 2
    for function, given, expected, gradient in (
        (mappings.copy_to_tensor_parallel_region, whole, whole, total * torch.ones_like(whole)),
        (mappings.reduce_from_tensor_parallel_region, whole * (rank + 1), whole * total, None),
        (mappings.scatter_to_tensor_parallel_region, whole, piece, None),
        (mappings.gather_from_tensor_parallel_region, piece, whole, (rank + 1) * torch.ones_like(piece)),
    ):
        leaf = given.clone().requires_grad_()
        kept = given.clone()
        output = function(leaf)
        _close(output, expected)
        incoming = torch.full_like(output, rank + 1.0)
        sent = incoming.clone()
        output.backward(incoming)
        if function is mappings.scatter_to_tensor_parallel_region:
            gradient = torch.cat([torch.full_like(piece, other + 1.0) for other in range(size)], dim=-1)
        _close(leaf.grad, incoming if gradient is None else gradient)
        assert torch.equal(leaf.detach(), kept)
        assert torch.equal(incoming, sent)
    half = mappings.reduce_from_tensor_parallel_region(torch.ones(3, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    across = mappings.gather_from_tensor_parallel_region(whole.t())
    _close(across, torch.cat([whole.t()] * size, dim=-1))


@pytest.mark.parametrize("size", [1, 3])
def test_mappings(ranks, size):
    """1 and 3 ranks: each mapping and its gradient by its table; inputs and incoming gradients stay as they were."""
    ranks(size, _mappings)


def _twice(me):
    """The gradient of a gradient through a column and a row layer, against torch's."""
    _started(me)
    column = layers.ColumnParallelLinear(3, 4, gather_output=False)
    row = layers.RowParallelLinear(4, 2, input_is_parallel=True)
    first, second = _like(column, nn.Linear(3, 4)), _like(row, nn.Linear(4, 2))
    ours = torch.randn(2, 3).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    outputs = row(torch.tanh(column(ours))), second(torch.tanh(first(theirs)))
    slopes = [
        torch.autograd.grad(output.square().sum(), given, create_graph=True)[0]
        for output, given in zip(outputs, (ours, theirs), strict=True)
    ]
    _close(*slopes)
    bends = [
        torch.autograd.grad(slope.square().sum(), given)[0] for slope, given in zip(slopes, (ours, theirs), strict=True)
    ]
    _close(*bends)


def test_gradients_of_gradients(ranks):
    """2 ranks: second derivatives through two layers are torch's."""
    ranks(2, _twice)


def _other_state(me):
    """Layers of two states at once: pairs and the whole world."""
    torch.set_default_dtype(torch.float64)
    tp.initialize_tensor_parallel(2)
    state = tp.TensorParallel()
    state.initialize_tensor_parallel(4)
    torch.manual_seed(1)
    pairs = layers.ColumnParallelLinear(3, 8)
    world = layers.ColumnParallelLinear(3, 8, state=state)
    given = torch.randn(2, 3)
    for layer in (pairs, world, copy.deepcopy(world)):
        _close(layer(given), F.linear(given, layer.get_master_weight(), torch.zeros(8)))
    return [list(pairs.weight.shape), list(world.weight.shape)]


def test_layers_of_two_states(ranks):
    """4 ranks: a layer is cut over the group of its own state."""
    assert ranks(4, _other_state) == [[[4, 3], [2, 3]]] * 4
