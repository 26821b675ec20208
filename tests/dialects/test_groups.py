"""States that answer for one rank's groups, live and in dry worlds of any size, as loops over coordinates do."""

from datetime import timedelta
from math import prod
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks

from rankmesh.backend.registries import registries
from rankmesh.dialects import deepspeed, ezpz, fairscale, process_groups
from rankmesh.errors import AgreementError, AlreadyInitialized, NotInitialized, PlanError, SizesError

WHAT = ("group", "ranks", "world_size", "rank", "src_rank")


class Ezpz:
    """Axes slowest first, the axes that vary in each kind of group, how many getters there are, two live layouts."""

    order = ("dp", "pp", "cp", "tp")
    kinds: ClassVar = {"tensor": ("tp",), "context": ("cp",), "pipeline": ("pp",), "data": ("dp",)}
    getters = 17
    live = {"tp": 2, "pp": 2, "cp": 2}, {"tp": 4, "dp": 2}
    default = ezpz
    backends = ("tensor_parallel_backend", "pipeline_parallel_backend", "context_parallel_backend",
                "data_parallel_backend")  # fmt: skip

    @staticmethod
    def make(sizes, state=None, **options):
        """Make the groups; the state, and the function that destroys them."""
        state = state or ezpz.TensorParallel()
        state.initialize_tensor_parallel(sizes["tp"], sizes["pp"], sizes["cp"], **options)
        return state, state.destroy_tensor_parallel

    @staticmethod
    def name(kind, what):
        """The name of a getter."""
        return f"get_{kind}_parallel_{what}"


class Fairscale(Ezpz):
    """As ezpz lays groups out, with other getters."""

    kinds: ClassVar = {"model": ("tp",), "context": ("cp",), "pipeline": ("pp",), "data": ("dp",)}
    getters = 14
    default = fairscale
    backends = ("model_parallel_backend", "pipeline_backend", "cp_backend", "ddp_backend")

    @staticmethod
    def make(sizes, state=None, **options):
        """Make the groups."""
        state = state or fairscale.ModelParallel()
        state.initialize_model_parallel(sizes["tp"], sizes["pp"], sizes["cp"], **options)
        return state, state.destroy_model_parallel


class Deepspeed(Ezpz):
    """An object for each set of groups, without a default state."""

    order = ("pp", "dp", "sp", "tp")
    kinds: ClassVar = {
        "tensor_model_parallel": ("tp",),
        "slice_parallel": ("tp",),
        "sequence_parallel": ("sp",),
        "data_parallel": ("dp",),
        "sequence_data_parallel": ("sp", "dp"),
        "pipeline_model_parallel": ("pp",),
        "pipe_parallel": ("pp",),
        "model_parallel": ("tp", "pp"),
    }
    getters = 26
    live = {"tp": 2, "sp": 2, "pp": 2}, {"tp": 2, "dp": 4}
    default = None

    @staticmethod
    def make(sizes, state=None):
        """Make the groups."""
        made = deepspeed.Mpu.connect(tp=sizes["tp"], sp=sizes["sp"], pp=sizes["pp"])
        return made, made.close

    @staticmethod
    def name(kind, what):
        """The name of a getter."""
        return f"get_{kind}_{'group_ranks' if what == 'ranks' else what}"


class Minimal(Deepspeed):
    """Attributes in place of getters; every size is given."""

    order = ("dp", "pp", "tp")
    kinds: ClassVar = {"tp": ("tp",), "pp": ("pp",), "dp": ("dp",)}
    getters = 9
    live = {"tp": 2, "pp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}

    @staticmethod
    def make(sizes, state=None):
        """Make the groups."""
        made = process_groups.ProcessGroups(sizes["tp"], sizes["pp"], sizes["dp"])
        return made, made.close

    @staticmethod
    def name(kind, what):
        """The name of an attribute."""
        return f"{kind}_{'size' if what == 'world_size' else what}"


DIALECTS = {"ezpz": Ezpz, "fairscale": Fairscale, "deepspeed": Deepspeed, "process_groups": Minimal}
EVERY = pytest.mark.parametrize("name", DIALECTS)


def full(dialect, sizes):
    """The size of every axis."""
    return {**dict.fromkeys(dialect.order, 1), **sizes}


def seen(dialect, state):
    """What a state answers, by kind and question; a group as its members."""
    found = {}
    for kind in dialect.kinds:
        for what in WHAT:
            if hasattr(state, dialect.name(kind, what)):
                value = getattr(state, dialect.name(kind, what))
                value = value() if callable(value) else value
                found[kind, what] = dry.members(value) if what == "group" else value
    return found


def check(dialect, state, rank, sizes):
    """Every getter that there is gives what loops over coordinates give."""
    answers, expected = seen(dialect, state), {}
    for kind, groups in dry.enumerated(dialect.order, full(dialect, sizes), dialect.kinds).items():
        row = dry.row_of(rank, groups)
        right = (row, row, len(row), row.index(rank), row[0])
        expected |= {(kind, what): value for what, value in zip(WHAT, right, strict=True)}
    assert answers == {question: expected[question] for question in answers}
    assert len(answers) == dialect.getters


def use(dialect, state):
    """A collective over each group."""
    for kind in dialect.kinds:
        pg = getattr(state, dialect.name(kind, "group"))
        pg = pg() if callable(pg) else pg
        total = torch.ones(1)
        dist.all_reduce(total, group=pg)
        assert total.item() == dist.get_world_size(pg)


def refuses(getter):
    """Whether a getter says that its state is not initialised."""
    try:
        getter()
    except NotInitialized:
        return True
    return False


def refusing(dialect):
    """How many getters of the default state refuse."""
    names = [dialect.name(kind, what) for kind in dialect.kinds for what in WHAT]
    return sum(refuses(getattr(dialect.default, name)) for name in names if hasattr(dialect.default, name))


def _live(me, name):
    dialect, before = DIALECTS[name], registries()
    absent = [refusing(dialect)] if dialect.default else []
    (first, end), (second, end_second) = (
        dialect.make(full(dialect, dialect.live[0]), dialect.default),
        dialect.make(full(dialect, dialect.live[1])),
    )
    for state, sizes in zip((first, second), dialect.live, strict=True):
        check(dialect, state, me.rank, sizes)
        use(dialect, state)
    if dialect.default:
        me.error(AlreadyInitialized, dialect.make, full(dialect, dialect.live[0]), dialect.default)
    end_second()
    use(dialect, first)
    end()
    end()
    if dialect.default:
        absent.append(refusing(dialect))
    else:
        me.error(NotInitialized, lambda: first.groups)

    def cycle():
        state, close = dialect.make(full(dialect, dialect.live[0]))
        use(dialect, state)
        close()

    return [absent, registries() == before, leaks.left_by(me, cycle)]


@EVERY
def test_eight_ranks(ranks, name):
    """8 ranks: two states with collectives; before and after getters refuse, but ezpz's of tensors; nothing is left."""
    absent = [14, 14] if DIALECTS[name].default else []
    assert ranks(8, _live, name) == [[absent, True, {}]] * 8


@pytest.mark.few(2)
@EVERY
@dry.PROPERTIES
@given(data=st.data())
def test_any_rank_of_any_world(name, data):
    """Dry worlds of up to 256 ranks: every getter as loops over coordinates give it."""
    dialect = DIALECTS[name]
    sizes = data.draw(st.fixed_dictionaries(dict.fromkeys(dialect.order, st.integers(1, 4))))
    world = prod(sizes.values())
    rank = data.draw(st.integers(0, world - 1))
    with dry.world(rank, world):
        state, close = dialect.make(sizes)
        check(dialect, state, rank, sizes)
        close()


def _refused(me, name):
    dialect = DIALECTS[name]
    for sizes in ({"tp": 8}, {"tp": 3}, {"tp": 0}, {"tp": 2, "pp": 4}):
        me.error(SizesError, dialect.make, full(dialect, sizes))
    if dialect.default:
        me.error(PlanError, dialect.make, full(dialect, {"tp": 2}), **{dialect.backends[-1]: "gluu"})
    me.error(AgreementError, dialect.make, full(dialect, {"tp": 4, "dp": 1} if me.rank else {"tp": 2, "dp": 2}))
    left = registries()["pg_map"]
    dist.destroy_process_group()
    me.error(NotInitialized, dialect.make, full(dialect, {}))
    return left


@EVERY
def test_refusals(ranks, name):
    """4 ranks: a size above the world (never clamped), sizes that do not divide, other sizes on a rank, no world."""
    assert issubclass(SizesError, AssertionError)
    assert issubclass(NotInitialized, AssertionError)
    assert issubclass(AlreadyInitialized, AssertionError)
    assert ranks(4, _refused, name) == [1] * 4


@pytest.mark.parametrize("name", ["ezpz", "fairscale"])
def test_each_backend_is_that_of_its_group(name):
    """A dry world of 16: the four backends, and the timeout, are options of the groups that they are named for."""
    dialect, backends = DIALECTS[name], {"tp": "nccl", "pp": "ucc", "cp": "gloo", "dp": "mpi"}
    options = dict(zip(dialect.backends, backends.values(), strict=True))
    with dry.world(0, 16):
        state, close = dialect.make({"tp": 2, "pp": 2, "cp": 2}, timeout=timedelta(seconds=77), **options)
        found = {spec.name: spec.options for spec in state._registry.groups.plan.specs}
        close()
    assert {name: options.backend for name, options in found.items()} == backends
    assert {options.timeout for options in found.values()} == {77.0}
