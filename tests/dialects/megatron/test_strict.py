"""install(strict=True): reads of the global state beside other grids are listed by line."""

import inspect

import pytest

import rankmesh as rm
from rankmesh import sim

pytest.importorskip("megatron.core.parallel_state")

from rankmesh.dialects import megatron
from rankmesh.dialects.megatron import parallel_state


@pytest.fixture(autouse=True)
def strict():
    """Strict drop-ins; Megatron's own afterwards."""
    megatron.install(strict=True)
    yield
    megatron.uninstall()


def read():
    """The line that reads the global state."""
    return parallel_state.get_tensor_model_parallel_rank()


def layer_group_if_none():
    """A helper of Megatron, by its name: its caller is the site."""
    return parallel_state.get_data_parallel_world_size()


def use():
    """Read the state once, and three times through a helper."""
    read()
    return [layer_group_if_none() for _ in range(3)]


def program(spec):
    """A state with tp=2, and its use beside the groups of another plan, or beside none."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if spec is None:
        use()
    else:
        with rm.connect(spec):
            use()
    parallel_state.destroy_model_parallel()


def listed():
    """The reads as site, getter and count."""
    return [(one.site.rpartition("/")[2], one.getter, one.count) for one in megatron.global_reads()]


def line_of(function, text):
    """Where a function has this text, as ``global_reads`` writes it."""
    lines, start = inspect.getsourcelines(function)
    number = start + next(index for index, line in enumerate(lines) if text in line)
    return f"test_strict.py:{number} in {function.__name__}"


EXPECTED = [
    (line_of(read, "return parallel_state"), "get_tensor_model_parallel_rank"),
    (line_of(use, "for _ in"), "get_data_parallel_world_size"),
]


def test_reads_beside_another_grid_are_listed():
    """Four simulated ranks: by line and getter, with how often; what a getter reads itself is not listed."""
    sim.run(program, 4, "dp=2,tp=2")
    assert [(site.replace("<listcomp>", "use"), getter, count) for site, getter, count in listed()] == [
        (*EXPECTED[0], 4),
        (*EXPECTED[1], 12),
    ]
    assert "4 times" in str(megatron.global_reads()[0])


def test_one_grid_is_not_listed():
    """Nothing but the state is live: its reads are no defect."""
    sim.run(program, 4, None)
    assert megatron.global_reads() == ()


def test_uninstall_ends_it():
    """Afterwards the getters are as before, and nothing is listed."""
    megatron.uninstall()
    functions = parallel_state.rankmesh_state.functions
    assert parallel_state.get_tensor_model_parallel_rank is functions["get_tensor_model_parallel_rank"]
    assert megatron.global_reads() == ()


def _live(me):
    megatron.install(strict=True)
    try:
        program("dp=2,tp=2")
        return [(one.getter, one.count) for one in megatron.global_reads()]
    finally:
        megatron.uninstall()


def test_reads_of_live_ranks_are_listed(ranks):
    """4 gloo ranks: each lists its own."""
    assert ranks(4, _live) == [[["get_tensor_model_parallel_rank", 1], ["get_data_parallel_world_size", 3]]] * 4
