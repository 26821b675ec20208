"""install(strict=True): reads of the global state beside other grids are listed, and refused where they are wrong."""

import inspect

import pytest

import rankmesh as rm
from rankmesh import sim

pytest.importorskip("megatron.core.parallel_state")

from rankmesh.dialects import megatron
from rankmesh.dialects.megatron import parallel_state
from rankmesh.dialects.megatron.refusals import OtherGrid


@pytest.fixture(autouse=True)
def strict():
    """Strict drop-ins; Megatron's own afterwards."""
    megatron.install(strict=True)
    yield
    megatron.uninstall()


class Layer:
    """A module with a tp group of its own, that asks the global state all the same."""

    def __init__(self, tp_group):
        self.tp_group = tp_group

    def rank(self):
        """This rank's place."""
        return parallel_state.get_tensor_model_parallel_rank()


class Outer:
    """A module that does not pass its group on."""

    def __init__(self, groups):
        self.pg_collection = megatron.process_groups_config.ProcessGroupCollection(tp=groups["tp"].pg)
        self.inner = Layer(None).rank()


def line_of(function, text):
    """``file:line`` of the line of a function that has this text."""
    lines, start = inspect.getsourcelines(function)
    number = start + next(index for index, line in enumerate(lines) if text in line)
    return f"test_strict.py:{number}"


def over(spec, use):
    """A state with tp=2, and the use of groups of another plan, on four ranks."""

    def program():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        with rm.connect(spec) as groups:
            use(groups)
        parallel_state.destroy_model_parallel()

    return sim.run(program, 4)


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (lambda groups: Layer(groups["tp"].pg).rank(), line_of(Layer.rank, "parallel_state")),
        (Outer, line_of(Outer.__init__, "Layer(None)")),
    ],
)
def test_group_of_another_grid_is_an_error(use, line):
    """The module's tp ranks are 0 and 2, those of the state 0 and 1: the line that has the group is named."""
    with pytest.raises(sim.RanksFailed) as caught:
        over("dp=2,tp=2", use)
    error = caught.value.failures[0]
    assert isinstance(error, OtherGrid)
    assert (error.site, error.ranks) == (line, (0, 2))
    assert "get_tensor_model_parallel_rank()" in str(error)


def test_reads_beside_another_grid_are_listed():
    """The same shards in both grids, or no group at hand: listed by line and getter, with how often; no error."""

    def use(groups):
        Layer(groups["tp"].pg).rank()
        return [parallel_state.get_data_parallel_world_size() for _ in range(3)]

    over("tp=2,dp=2", use)
    inner, data = megatron.global_reads()
    assert (inner.getter, inner.count) == ("get_tensor_model_parallel_rank", 4)
    assert (data.getter, data.count) == ("get_data_parallel_world_size", 12)
    assert line_of(Layer.rank, "parallel_state") in inner.site
    assert "12 times" in str(data)


def test_one_grid_is_not_listed():
    """Nothing but the state is live: its reads are no defect."""

    def program():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        found = parallel_state.get_tensor_model_parallel_rank()
        parallel_state.destroy_model_parallel()
        return found

    assert sim.run(program, 4) == [0, 1, 0, 1]
    assert megatron.global_reads() == ()


def test_uninstall_ends_it():
    """Afterwards the getters are as before, and nothing is listed."""
    megatron.uninstall()
    assert (
        parallel_state.get_tensor_model_parallel_rank
        is parallel_state.rankmesh_state.functions["get_tensor_model_parallel_rank"]
    )
    assert megatron.global_reads() == ()


def _live(me):
    megatron.install(strict=True)
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        with rm.connect("dp=2,tp=2") as groups:
            inside = me.error(OtherGrid, Layer(groups["tp"].pg).rank)
        with rm.connect("tp=2,dp=2") as groups:
            same = Layer(groups["tp"].pg).rank()
        reads = [(read.getter, read.count) for read in megatron.global_reads()]
        parallel_state.destroy_model_parallel()
        return [inside["kind"], inside["message"], same, reads]
    finally:
        megatron.uninstall()


def test_group_of_another_grid_is_an_error_on_live_ranks(ranks):
    """4 gloo ranks: each names the line that has the group, and its ranks; a group of the state is answered."""
    for rank, (kind, text, same, reads) in enumerate(ranks(4, _live)):
        assert kind == "OtherGrid"
        assert line_of(Layer.rank, "parallel_state") in text
        assert f"a tp group of ranks {[rank % 2, rank % 2 + 2]}" in text
        assert same == rank % 2
        assert reads == [["get_tensor_model_parallel_rank", 2]]
