"""Loaders run on tensors without storage, against the same loaders run on numbers."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer import strategies

import rankmesh as rm
from rankmesh.backend.fake_world import fake_world
from rankmesh.errors import ConnectError, LayoutError
from rankmesh_engines.inference import infer
from rankmesh_engines.loaders import Side
from rankmesh_engines.trace import Trace

_MOVES = ["slice", "turn", "cat", "stack", "split", "join", "clone", "pick", "write", "fill"]


def _moved(seed, sources):
    """Tensors that a random program makes of others by slices, transposes, reshapes, joins and writes."""
    rng, pool = random.Random(seed), list(sources)  # noqa: S311
    for _ in range(8):
        tensor, what = rng.choice(pool), rng.choice(_MOVES)
        if not tensor.numel():
            continue
        dim = rng.randrange(tensor.dim())
        length = tensor.shape[dim]
        start = rng.randrange(length)
        count = rng.randint(1, length - start)
        if what == "slice":
            pool.append(tensor.narrow(dim, start, count))
        elif what == "turn":
            pool.append(tensor.transpose(0, -1))
        elif what == "cat":
            pool.append(torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim))
        elif what == "stack":
            pool.append(torch.stack([tensor, tensor], dim))
        elif what == "split" and length % 2 == 0:
            pool.append(tensor.unflatten(dim, (2, length // 2)))
        elif what == "join" and tensor.dim() > 1:
            pool.append(tensor.flatten(0, 1))
        elif what == "clone":
            pool.append(tensor.clone().to(torch.float64))
        elif what == "pick":
            pool.append(tensor.index_select(dim, torch.tensor([rng.randrange(length) for _ in range(3)])))
        elif what == "write":
            made = torch.zeros(tensor.shape, dtype=torch.float64)
            made.narrow(dim, start, count).copy_(tensor.narrow(dim, 0, count))
            made.select(dim, 0).copy_(tensor.select(dim, length - 1))
            pool.append(made)
        elif what == "fill":
            made = tensor.clone()
            made.narrow(dim, 0, 1).zero_()
            pool.append(made)
    return pool


def _rebuilt(found, whole, shape):
    """A tensor of zeros but for the boxes that a trace found."""
    made = torch.zeros(shape, dtype=torch.float64).reshape(-1)
    for name, fragments in found.items():
        for box, offset, strides in fragments:
            piece = whole[name][tuple(slice(*ends) for ends in box)]
            made.as_strided(piece.shape, strides, offset).copy_(piece)
    return made.reshape(shape)


@settings(max_examples=15)
@given(st.integers(0, 1 << 30))
def test_a_trace_says_where_every_element_came_from(seed):
    """Random programs of views, copies, joins and overwrites: the traced boxes give the same numbers."""
    rng = random.Random(seed)  # noqa: S311
    shapes = {str(i): (rng.choice([2, 4, 6, 8]), rng.choice([3, 4, 6, 12])) for i in range(2)}
    whole, numbers = {}, iter(range(1, 1000))
    for name, (rows, columns) in shapes.items():
        whole[name] = torch.tensor([[next(numbers) for _ in range(columns)] for _ in range(rows)], dtype=torch.float64)
    expected = _moved(seed, whole.values())
    try:
        with Trace() as trace:
            made = _moved(seed, [trace.source(name, shape, torch.float64) for name, shape in shapes.items()])
        found = [trace.fragments(tensor) for tensor in made]
    except LayoutError as error:
        assert "neither divides the other" in str(error)  # noqa: PT017  - a refusal is an answer
        return
    for tensor, boxes in zip(expected, found, strict=True):
        assert torch.equal(_rebuilt(boxes, whole, tensor.shape), tensor)


def test_values_that_are_computed_are_refused_by_name():
    """Gemma's ``1 + weight``, written into a parameter: the operation and the tensor are named."""
    with Trace() as trace:
        weight = trace.source("norm.weight", (4,))
        parameter = torch.empty(4)
        parameter.copy_(weight + 1)
    with pytest.raises(LayoutError, match="holds values that add computes") as caught:
        trace.fragments(parameter)
    assert caught.value.sources == ["norm.weight"]


@settings(max_examples=60)
@given(strategies.one())
def test_boxes_are_inferred_as_a_sharding_that_has_them(sharding):
    """Any sharding, from its boxes alone: one that gives each rank the same boxes and the same shape."""
    ranks = sharding.mesh.rank_range.ascending.tolist()
    boxes = {rank: sharding.of(rank).boxes for rank in ranks}
    stored = {rank: sharding.of(rank).shape for rank in ranks if boxes[rank]}
    try:
        found = infer(sharding.mesh, sharding.shape, sharding.dtype, boxes, stored)
    except LayoutError as error:
        empty = any(sharding.holds(rank) and not boxes[rank] for rank in ranks)
        assert empty or sharding.parts or sharding.padded or "no rank loads it" in str(error), error  # noqa: PT017
        return
    for rank in ranks:
        assert sorted(found.of(rank).boxes) == sorted(boxes[rank])


def _load(rank, tensors):
    """A fused loader over tp=4 with two key-value heads: query, key and value one below the other; a padded table."""
    qkv, table = torch.empty(2 + 4 + 4, 6), torch.zeros(4, 6)
    qkv[:2].copy_(tensors["q"].chunk(4)[rank])
    for row, name in ((2, "k"), (6, "v")):
        qkv.narrow(0, row, 4).copy_(tensors[name].narrow(0, rank // 2 * 4, 4))
    rows = tensors["table"].narrow(0, rank * 4, max(0, min(4, 13 - rank * 4)))
    table[: len(rows)].copy_(rows)
    scaled = torch.empty(3)
    scaled.copy_(tensors["scale"] * 2)
    return {"qkv": qkv, "table": table, "scaled": scaled, "own": torch.nn.Parameter(torch.zeros(2))}


SHAPES = {"q": (8, 6), "k": (8, 6), "v": (8, 6), "table": (13, 6), "scale": (3,), "unused": (2,)}
WEIGHTS = {name: (shape, "float32") for name, shape in SHAPES.items()}


def test_a_loader_is_read_for_every_rank():
    """Four ranks in one process: fused rows, copied heads, padding; what is computed and what is unused is refused."""
    layout = Side("toy", rm.Mesh(tp=4), WEIGHTS, _load).read()
    assert layout.shardings["q"] == rm.Sharding(rm.Mesh(tp=4), ("tp", None), (8, 6))
    assert [layout.shardings["k"].of(rank).boxes[0][0] for rank in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert layout.shardings["table"] == rm.Sharding(rm.Mesh(tp=4), ("tp", None), (13, 6), padded={0: 16})
    assert layout.refused == {"scale": "scaled: it holds values that mul computes; only copies have a layout",
                              "unused": "no rank loads it"}  # fmt: skip
    assert layout.unfilled == ("own",)


def test_views_of_parameters_are_the_shards():
    """Real numbers through the same loader: each view is the box of the whole tensor, padding behind it."""
    layout = Side("toy", rm.Mesh(tp=4), WEIGHTS, _load).read()
    whole = {name: torch.randn(shape) for name, (shape, _) in WEIGHTS.items()}
    for rank in range(4):
        parameters = _load(rank, whole)
        for name, view in layout.views(parameters, rank).items():
            shard = layout.shardings[name].of(rank)
            (low, high), *_ = shard.boxes[0]
            assert view.shape == shard.shape
            assert torch.equal(view[: high - low], whole[name][low:high])
        for parts in ({"table": parameters["table"]}, parameters | {"qkv": parameters["qkv"].T}):
            with pytest.raises(LayoutError) as caught:
                layout.views(parts, rank)
            assert caught.value.name == "q"


class _Wrapped(torch.Tensor):
    """A tensor that stands for others, as Transformer Engine's and torchao's quantised ones do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return args[0]


def test_a_parameter_in_a_form_made_after_loading_is_refused_by_name():
    """A side that knows of one refuses what it holds; so do parameters that are fp8, packed, wrapped, transposed."""
    one = Side(
        "toy", rm.Mesh(tp=4), WEIGHTS, _load, {"qkv": "fp8 (BlockedMethod)"}, "fill it before repack(), then call that"
    )
    layout = one.read()
    assert layout.refused["k"] == (
        "qkv is fp8 (BlockedMethod), a form made after loading; fill it before repack(), then call that"
    )
    assert list(layout.shardings) == ["table"]
    assert not {"q", "k", "v"} & layout.places[0].keys()
    uses = (layout.views, layout.shards, lambda given, rank: layout.fill(given, rank, {"table": torch.ones(4, 6)}))
    for made in (
        torch.zeros(4, 6).to(torch.float8_e4m3fn),
        torch.zeros(4, 6, dtype=torch.int32),
        torch.Tensor._make_subclass(_Wrapped, torch.zeros(4, 6)),
        torch.zeros(6, 4).T,
        torch.zeros(6, 6),
    ):
        for use in uses:
            with pytest.raises(LayoutError, match="fill it before repack") as caught:
                use({"table": made}, 0)
            assert caught.value.name == "table"


def test_a_module_whose_weight_was_replaced_is_named_with_what_it_has():
    """AWQ's packed weights and scales in the place of ``weight``."""

    def load(rank, tensors):
        weight = torch.empty(4, 6)
        weight.copy_(tensors["w"])
        return {"layer.weight": weight}

    layout = Side("toy", rm.Mesh(dp=1), {"w": ((4, 6), "float32")}, load, hook="fill it before repack()").read()
    packed = {"layer.qweight": torch.zeros(1), "layer.scales": torch.zeros(1), "other.weight": torch.zeros(4, 6)}
    with pytest.raises(LayoutError, match=r"\(layer has qweight, scales instead\); fill it before repack\(\)"):
        layout.views(packed, 0)


def _load_by_group(rank, tensors):
    """Megatron's queries, keys and values: two groups a rank of tp=2, in each two query heads, a key, a value."""
    qkv = torch.zeros(8, 6)
    for group in range(2):
        first = rank * 2 + group
        for row, count, name in ((0, 2, "q"), (2, 1, "k"), (3, 1, "v")):
            qkv.narrow(0, group * 4 + row, count).copy_(tensors[name].narrow(0, first * count, count))
    return {"qkv": qkv}


def test_a_shard_in_several_pieces_of_a_parameter():
    """Groups one below the other: rows are one range of each tensor, a view only where a group has one row of it."""
    shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6)}
    layout = Side(
        "toy", rm.Mesh(tp=2), {name: (shape, "float32") for name, shape in shapes.items()}, _load_by_group
    ).read()
    assert {one.cut for one in layout.shardings.values()} == {("tp", None)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    for rank in range(2):
        parameters = _load_by_group(rank, whole)
        shards = layout.shards(parameters, rank)
        for name, tensor in shards.items():
            assert torch.equal(tensor, whole[name].chunk(2)[rank])
        empty = {"qkv": torch.zeros(8, 6)}
        layout.fill(empty, rank, shards)
        assert torch.equal(empty["qkv"], parameters["qkv"])
        with pytest.raises(LayoutError, match=r"'q' is in 2 pieces of 'qkv', and no view of it; use shards\(\) before"):
            layout.views(parameters, rank)
        assert shards["k"].data_ptr() in range(parameters["qkv"].data_ptr(), parameters["qkv"].data_ptr() + 8 * 6 * 4)


def test_a_parameter_of_another_dtype_than_the_checkpoint():
    """A float32 bias of a bfloat16 model: its shard is a copy of the checkpoint's dtype, and fill() writes it back."""

    def load(rank, tensors):
        bias = torch.zeros(4, dtype=torch.float32)
        bias.copy_(tensors["bias"].narrow(0, rank * 4, 4))
        return {"bias": bias}

    layout = Side("toy", rm.Mesh(tp=2), {"bias": ((8,), "bfloat16")}, load).read()
    whole = torch.randn(8).bfloat16()
    for rank in range(2):
        parameters = load(rank, {"bias": whole})
        shards = layout.shards(parameters, rank)
        assert shards["bias"].dtype is torch.bfloat16
        assert torch.equal(shards["bias"], whole.chunk(2)[rank])
        empty = {"bias": torch.zeros(4)}
        layout.fill(empty, rank, shards)
        assert torch.equal(empty["bias"], parameters["bias"])


def test_ranks_whose_rows_are_all_padding_hold_nothing():
    """A table of 3 rows padded to 8 over four ranks: the last two have no row, yet the parameter is a filled one."""

    def load(rank, tensors):
        table = torch.nn.Parameter(torch.zeros(2, 6))
        rows = tensors["w"].narrow(0, min(rank * 2, 3), max(0, min(2, 3 - rank * 2)))
        table.data[: len(rows)].copy_(rows)
        return {"table": table}

    layout = Side("toy", rm.Mesh(tp=4), {"w": ((3, 6), "float32")}, load).read()
    assert [layout.shardings["w"].of(rank).boxes for rank in range(4)] == [
        (((0, 2), (0, 6)),), (((2, 3), (0, 6)),), (), ()
    ]  # fmt: skip
    assert layout.unfilled == ()
    views = [layout.views({"table": torch.zeros(2, 6)}, rank) for rank in range(4)]
    assert [sorted(of) for of in views] == [["w"], ["w"], [], []]


def _twice(tensor):
    return {name: torch.empty(4, 2).copy_(tensor) for name in ("one", "two")}


def _rows_apart(tensor):
    return {"p": torch.empty(3, 2).copy_(tensor.index_select(0, torch.tensor([0, 1, 3])))}


@pytest.mark.parametrize(("load", "why"), [(_twice, "in one and in two"), (_rows_apart, "[0:2, 0:2], [3:4, 0:2]")])
def test_a_tensor_without_one_place_or_sharding_is_refused(load, why):
    """A weight that a rank holds twice, and rows 0, 1 and 3 of a tensor over one rank."""
    side = Side("toy", rm.Mesh(dp=1), {"w": ((4, 2), "float32")}, lambda _rank, tensors: load(tensors["w"]))
    assert why in side.read().refused["w"]


def test_a_loader_that_fails_is_named_with_its_rank():
    """The side's own error is the cause of the refusal."""

    def load(rank, tensors):
        raise KeyError("layers.7.weight")

    with pytest.raises(LayoutError) as caught:
        Side("toy", rm.Mesh(dp=1), {}, load).read()
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_layout_is_not_read_inside_a_job():
    """A default group that exists is left alone."""
    with fake_world(0, 2), pytest.raises(ConnectError, match="part of a job already"), fake_world(1, 2):
        pass


def test_objects_of_others_are_not_read_from_memory():
    """No rank has sent any: a receiver's stay as they were, where torch would unpickle what was there before."""
    with fake_world(1, 2):
        for _ in range(50):
            sizes = torch.full((1,), 1 << 45)  # what a size would be read from
            objects = [None]
            del sizes
            torch.distributed.broadcast_object_list(objects, src=0)
            torch.distributed.recv_object_list(objects, src=0)
            assert objects == [None]
        everyone = [None, None]
        torch.distributed.all_gather_object(everyone, "mine")
        assert everyone == [None, None]
