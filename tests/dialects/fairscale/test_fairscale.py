import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks

import rankmesh.dialects.fairscale as fs
from rankmesh.backend.registries import registries
from rankmesh.errors import AlreadyInitialized, NotInitialized, PlanError, SizesError

SIZES = st.integers(1, 4)

GETTERS = [name for name in fs.__all__ if name.startswith("get_")]


def enumerated(world, mp, pp, cp):
    """Every group, from one array of shape (dp, pp, cp, mp)."""
    ranks = torch.arange(world).reshape(-1, pp, cp, mp)
    moved = {"dp": 0, "pp": 1, "cp": 2, "mp": 3}
    return {name: ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist() for name, dim in moved.items()}


def _seen(state):
    return {
        "mp": dry.members(state.get_model_parallel_group()),
        "cp": dry.members(state.get_context_parallel_group()),
        "pp": dry.members(state.get_pipeline_parallel_group()),
        "dp": dry.members(state.get_data_parallel_group()),
        "ranks": {
            "cp": state.get_context_parallel_ranks(),
            "pp": state.get_pipeline_parallel_ranks(),
            "dp": state.get_data_parallel_ranks(),
        },
        "places": {
            "mp": [state.get_model_parallel_rank(), state.get_model_parallel_world_size()],
            "cp": [state.get_context_parallel_rank(), state.get_context_parallel_world_size()],
            "dp": [state.get_data_parallel_rank(), state.get_data_parallel_world_size()],
        },
        "source": state.get_model_parallel_src_rank(),
    }


def _check(seen, rank, groups):
    local = {name: dry.row_of(rank, kind) for name, kind in groups.items()}
    assert {name: seen[name] for name in local} == local
    assert seen["ranks"] == {name: local[name] for name in ("cp", "pp", "dp")}
    assert seen["places"] == {name: [local[name].index(rank), len(local[name])] for name in ("mp", "cp", "dp")}
    assert seen["source"] == local["mp"][0]


def _use(state):
    for name in ("model", "context", "pipeline", "data"):
        total = torch.ones(1)
        pg = getattr(state, f"get_{name}_parallel_group")()
        dist.all_reduce(total, group=pg)
        assert total.item() == dist.get_world_size(pg)


def _cycle():
    fs.initialize_model_parallel(2, 2)
    _use(fs)
    fs.destroy_model_parallel()


def _live(me):
    before = registries()
    absent = [me.error(AssertionError, getattr(fs, name))["kind"] for name in GETTERS]
    fs.initialize_model_parallel(2, 2, 2, timeout=timedelta(seconds=20))
    twice = me.error(AlreadyInitialized, fs.initialize_model_parallel, 2)["message"]
    _use(fs)
    other = fs.ModelParallel()
    other.initialize_model_parallel(4, model_parallel_backend="gloo")
    _use(other)
    seen = {"default": _seen(fs), "other": _seen(other), "twice": twice, "absent": absent}
    other.destroy_model_parallel()
    _use(fs)
    seen["both"] = [fs.model_parallel_is_initialized(), other.model_parallel_is_initialized()]
    fs.destroy_model_parallel()
    fs.destroy_model_parallel()
    seen["stale"] = [me.error(AssertionError, getattr(fs, name))["kind"] for name in GETTERS]
    seen["back"] = registries() == before
    return {**seen, "left": leaks.left_by(me, _cycle)}


def test_eight_ranks(ranks):
    """8 ranks: two states with collectives, each with its groups; before and after them every getter refuses."""
    for rank, live in enumerate(ranks(8, _live)):
        _check(live["default"], rank, enumerated(8, 2, 2, 2))
        _check(live["other"], rank, enumerated(8, 4, 1, 1))
        assert "call destroy_model_parallel() first" in live["twice"]
        assert set(live["absent"]) == set(live["stale"]) == {NotInitialized.__name__}
        assert live["both"] == [True, False]
        assert (live["back"], live["left"]) == (True, {})


def _properties(me):
    @dry.PROPERTIES
    @given(st.tuples(SIZES, SIZES, SIZES, SIZES), st.data())
    def check(sizes, data):
        mp, pp, cp, dp = sizes
        world = mp * pp * cp * dp
        rank = data.draw(st.integers(0, world - 1))
        state = fs.ModelParallel()
        with dry.world(rank, world):
            state.initialize_model_parallel(mp, pp, cp)
            _check(_seen(state), rank, enumerated(world, mp, pp, cp))
            state.destroy_model_parallel()

    check()


def test_any_rank_of_any_world(ranks):
    """Dry worlds of up to 256 ranks: every getter as an array of ranks gives it."""
    ranks(1, _properties, world=None)


def _refused(me):
    fs.initialize_model_parallel(2)
    fs.destroy_model_parallel()
    return [
        me.error(SizesError, fs.initialize_model_parallel, 8)["message"],
        me.error(AssertionError, fs.initialize_model_parallel, 3)["message"],
        me.error(AssertionError, fs.initialize_model_parallel, 2, 4)["message"],
        me.error(PlanError, fs.initialize_model_parallel, 2, ddp_backend="gluu")["message"],
        [fs.model_parallel_is_initialized(), registries()["pg_map"]],
        me.error(AssertionError, _without_a_world)["message"],
    ]


def _without_a_world():
    dist.destroy_process_group()
    fs.initialize_model_parallel(1)


def test_refusals(ranks):
    """4 ranks: a size above the world (never clamped), sizes that do not divide, a backend, no world."""
    for clamped, odd, product, backend, state, absent in ranks(4, _refused):
        assert "world_size is 4, but tp 8" in clamped
        assert "world_size is 4, but tp 3" in odd
        assert "= 8 does not divide it" in product
        assert "unknown backend 'gluu'" in backend
        assert state == [False, 1]
        assert "init_process_group" in absent


def test_signature():
    """Sizes by position in fairscale's order, backends and timeout by name."""
    parameters = inspect.signature(fs.initialize_model_parallel).parameters
    positional = ["model_parallel_size_", "pipeline_length", "context_parallel_size"]
    named = ["model_parallel_backend", "pipeline_backend", "cp_backend", "ddp_backend", "timeout"]
    assert list(parameters) == positional + named
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in named)


def _backends(me):
    state, timeout = fs.ModelParallel(), timedelta(seconds=77)
    names = {"model_parallel_backend": "nccl", "pipeline_backend": "ucc", "cp_backend": "gloo", "ddp_backend": "mpi"}
    with dry.world(0, 16):
        state.initialize_model_parallel(2, 2, 2, **names, timeout=timeout)
        specs = state._registry.groups.plan.specs
        return {spec.name: [spec.options.backend, spec.options.timeout] for spec in specs}


def test_each_backend_is_that_of_its_group(ranks):
    """A dry world of 16: the four backends, and the timeout, are options of the groups that they are named for."""
    expected = {"tp": ["nccl", 77.0], "pp": ["ucc", 77.0], "cp": ["gloo", 77.0], "dp": ["mpi", 77.0]}
    assert ranks(1, _backends, world=None) == [expected]
