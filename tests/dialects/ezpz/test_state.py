import copy
import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks

import rankmesh.dialects.ezpz as tp
from rankmesh.backend.registries import registries
from rankmesh.errors import AlreadyInitialized, NotInitialized, SizesError

SIZES = st.integers(1, 4)
AXES = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}

# What ezpz's code makes of 16 ranks with tp = cp = pp = 2; its docstring says otherwise for pp and dp.
SIXTEEN = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "dp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
}


def enumerated(sizes):
    """Every group, by loops over (dp, pp, cp, tp) as ezpz's code nests them."""
    dp, pp, cp, size = (sizes[axis] for axis in ("dp", "pp", "cp", "tp"))
    groups = {axis: {} for axis in ("dp", "pp", "cp", "tp")}
    rank = 0
    for d in range(dp):
        for p in range(pp):
            for c in range(cp):
                for t in range(size):
                    place = {"dp": d, "pp": p, "cp": c, "tp": t}
                    for axis in groups:
                        others = tuple(at for name, at in place.items() if name != axis)
                        groups[axis].setdefault(others, []).append(rank)
                    rank += 1
    return {axis: list(kind.values()) for axis, kind in groups.items()}


def _seen(state):
    seen = {}
    for token, axis in AXES.items():
        get = {
            what: getattr(state, f"get_{token}_parallel_{what}") for what in ("group", "ranks", "world_size", "rank")
        }
        seen[axis] = [dry.members(get["group"]()), get["ranks"](), get["world_size"](), get["rank"]()]
    return {**seen, "source": state.get_tensor_parallel_src_rank()}


def _check(seen, rank, groups):
    for axis, kind in groups.items():
        row = dry.row_of(rank, kind)
        assert seen[axis] == [row, row, len(row), row.index(rank)]
    assert seen["source"] == dry.row_of(rank, groups["tp"])[0]


def _use(state):
    for token in AXES:
        total = torch.ones(1)
        pg = getattr(state, f"get_{token}_parallel_group")()
        dist.all_reduce(total, group=pg)
        assert total.item() == dist.get_world_size(pg)


def _cycle():
    tp.initialize_tensor_parallel(2, 2, 2)
    _use(tp)
    tp.destroy_tensor_parallel()


def _others(me):
    """What the getters do without groups: the tensor axis answers 1 and 0, everything else refuses."""
    plain = [tp.get_tensor_parallel_world_size(), tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_src_rank()]
    names = [f"get_{token}_parallel_{what}" for token in AXES for what in ("group", "ranks", "world_size", "rank")]
    refusing = [name for name in names if name not in ("get_tensor_parallel_world_size", "get_tensor_parallel_rank")]
    kinds = {me.error(AssertionError, getattr(tp, name))["kind"] for name in refusing}
    return [plain, sorted(kinds), len(refusing)]


def _live(me):
    before = registries()
    seen = {"absent": _others(me)}
    tp.initialize_tensor_parallel(2, pipeline_parallel_size=2, context_parallel_size=2)
    _use(tp)
    other = tp.TensorParallel()
    other.initialize_tensor_parallel(4, data_parallel_backend="gloo")
    _use(other)
    seen |= {"default": _seen(tp), "other": _seen(other)}
    seen["twice"] = me.error(AlreadyInitialized, tp.initialize_tensor_parallel)["message"]
    seen["same"] = copy.deepcopy(other) is other
    other.destroy_tensor_parallel()
    _use(tp)
    seen["both"] = [tp.tensor_parallel_is_initialized(), other.tensor_parallel_is_initialized()]
    tp.destroy_tensor_parallel()
    tp.destroy_tensor_parallel()
    seen["destroyed"] = _others(me)
    seen["back"] = registries() == before
    return {**seen, "left": leaks.left_by(me, _cycle)}


def test_eight_ranks(ranks):
    """8 ranks: two states with collectives; before and after them only the tensor axis answers, with 1 and 0."""
    for rank, live in enumerate(ranks(8, _live)):
        _check(live["default"], rank, enumerated({"tp": 2, "cp": 2, "pp": 2, "dp": 1}))
        _check(live["other"], rank, enumerated({"tp": 4, "cp": 1, "pp": 1, "dp": 2}))
        assert live["absent"] == live["destroyed"] == [[1, 0, rank], [NotInitialized.__name__], 14]
        assert "call destroy_tensor_parallel() first" in live["twice"]
        assert (live["same"], live["both"]) == (True, [True, False])
        assert (live["back"], live["left"]) == (True, {})


def test_the_enumeration_is_the_code_of_ezpz():
    """The loops that the tests compare with give ezpz's groups of 16 ranks."""
    groups = enumerated({"tp": 2, "cp": 2, "pp": 2, "dp": 2})
    assert {axis: sorted(kind) for axis, kind in groups.items()} == {a: sorted(k) for a, k in SIXTEEN.items()}


def _properties(me):
    @dry.PROPERTIES
    @given(st.fixed_dictionaries(dict.fromkeys(("tp", "pp", "cp", "dp"), SIZES)), st.data())
    def check(sizes, data):
        groups = enumerated(sizes)
        world = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
        rank = data.draw(st.integers(0, world - 1))
        state = tp.TensorParallel()
        with dry.world(rank, world):
            state.initialize_tensor_parallel(sizes["tp"], sizes["pp"], sizes["cp"])
            _check(_seen(state), rank, groups)
            state.destroy_tensor_parallel()

    check()


def test_any_rank_of_any_world(ranks):
    """Dry worlds of up to 256 ranks: every getter as loops over coordinates give it."""
    ranks(1, _properties, world=None)


def _refused(me):
    output = [
        me.error(SizesError, tp.initialize_tensor_parallel, 8)["message"],
        me.error(AssertionError, tp.initialize_tensor_parallel, 3)["message"],
        me.error(AssertionError, tp.initialize_tensor_parallel, 2, 2, 2)["message"],
    ]
    dist.destroy_process_group()
    output.append(me.error(AssertionError, tp.initialize_tensor_parallel)["message"])
    return [*output, tp.get_tensor_parallel_src_rank()]


def test_refusals(ranks):
    """4 ranks: a size above the world (never clamped), sizes that do not divide, no world."""
    for clamped, odd, product, absent, source in ranks(4, _refused):
        assert "world_size is 4, but tp 8" in clamped
        assert "world_size is 4, but tp 3" in odd
        assert "= 8 does not divide it" in product
        assert "init_process_group" in absent
        assert source == 0


def test_signature():
    """The parameters of ezpz, in its order."""
    assert list(inspect.signature(tp.initialize_tensor_parallel).parameters) == [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "tensor_parallel_backend",
        "pipeline_parallel_backend",
        "context_parallel_backend",
        "data_parallel_backend",
        "timeout",
    ]


def _backends(me):
    state, timeout = tp.TensorParallel(), timedelta(seconds=77)
    names = {"tensor_parallel_backend": "nccl", "pipeline_parallel_backend": "ucc"}
    names |= {"context_parallel_backend": "gloo", "data_parallel_backend": "mpi"}
    with dry.world(0, 16):
        state.initialize_tensor_parallel(2, 2, 2, **names, timeout=timeout)
        specs = state._registry.groups.plan.specs
        return {spec.name: [spec.options.backend, spec.options.timeout] for spec in specs}


def test_each_backend_is_that_of_its_group(ranks):
    """A dry world of 16: the four backends, and the timeout, are options of the groups that they are named for."""
    expected = {"tp": ["nccl", 77.0], "pp": ["ucc", 77.0], "cp": ["gloo", 77.0], "dp": ["mpi", 77.0]}
    assert ranks(1, _backends, world=None) == [expected]
