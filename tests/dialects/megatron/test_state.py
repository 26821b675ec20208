"""A parallel state in dry worlds: what is written is read, what is refused leaves nothing, destroyed is destroyed."""

import os
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from tests.dialects.dry import members

from rankmesh.backend.registries import registries
from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused, UnknownName
from rankmesh.errors import NotAMember


def test_what_is_written_is_what_getters_return(start, monkeypatch):
    """Values, groups, lists and whole functions that a caller sets; None gives the group's own again."""
    ps = start(5, 16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert (ps.get_tensor_model_parallel_rank(), ps.is_pipeline_first_stage()) == (1, False)
    ps._MPU_TENSOR_MODEL_PARALLEL_RANK = 7
    ps.set_pipeline_model_parallel_rank(0)
    ps.set_data_parallel_rank(4)
    assert ps.get_tensor_model_parallel_rank() == 7
    assert (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()) == (True, False)
    assert ps.get_pipeline_model_parallel_next_rank() == 5
    assert ps.get_data_parallel_rank() == ps.get_data_parallel_rank(with_context_parallel=True) == 4
    ps.set_pipeline_model_parallel_world_size(1)
    assert (ps.is_pipeline_last_stage(), ps.get_pipeline_model_parallel_last_rank()) == (True, 1)
    ps.set_tensor_model_parallel_rank(None)
    ps.set_pipeline_model_parallel_rank(None)
    ps.set_pipeline_model_parallel_world_size(None)
    assert (ps.get_tensor_model_parallel_rank(), ps.is_pipeline_first_stage()) == (1, False)
    group = Mock(spec=dist.ProcessGroup)
    ps._TENSOR_MODEL_PARALLEL_GROUP = group
    for size in (3, 4):
        group.size.return_value = size
        assert ps.get_tensor_model_parallel_world_size() == size
    assert ps.get_tensor_model_parallel_group() is group
    with monkeypatch.context() as patch:
        patch.setattr(ps, "get_pipeline_model_parallel_rank", lambda: 0)
        assert (ps.is_pipeline_first_stage(), ps.get_pipeline_model_parallel_next_rank()) == (True, 5)
    assert (ps.is_pipeline_first_stage(), ps.get_pipeline_model_parallel_next_rank()) == (False, 9)
    ps._PIPELINE_GLOBAL_RANKS = [9, 8, 7, 6]
    assert ps.get_pipeline_model_parallel_first_rank() == ps.get_pipeline_model_parallel_prev_rank() == 9


REFUSED = (
    {"tensor_model_parallel_size": 3},
    {"tensor_model_parallel_size": 2, "order": "tp-tp-dp"},
    {"order": "tp-cp-ep-dp-pp-zz"},
    {"tensor_model_parallel_size": 2, "order": "dp-pp"},
    {"virtual_pipeline_model_parallel_size": 2},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 3]},
    {"high_priority_stream_groups": ["dpp"]},
    {"pipeline_model_parallel_size": 4, "get_embedding_ranks": lambda ranks: [max(ranks[0], 1)]},
    {"gtp_remat_size": 2, "num_distributed_optimizer_instances": 2},
    {"sharp_enabled_group": "dp"},
    {"pipeline_model_parallel_comm_backend": "mpi"},
)


def test_refusals_leave_nothing(begin):
    """Each is what Megatron raises, an AssertionError and a RuntimeError; no group and no global is left."""
    assert issubclass(NotInitialized, AssertionError)
    assert issubclass(Refused, AssertionError)
    assert issubclass(Refused, RuntimeError)
    ps = parallel_state
    for call in (ps.initialize_model_parallel, ps.get_tensor_model_parallel_rank):
        with pytest.raises(NotInitialized):
            call()
    assert ps.get_data_parallel_rank() == ps.get_expert_model_parallel_world_size() == 0
    begin(0, 8)
    before, initial = registries(), ps.rankmesh_state.initial
    for arguments in REFUSED:
        with pytest.raises(Refused):
            ps.initialize_model_parallel(**arguments)
    assert {name: getattr(ps, name) for name in initial} == initial
    assert registries() == before
    ps.initialize_model_parallel()
    with pytest.raises(Refused):
        ps.initialize_model_parallel()


def test_nccl_options_reach_their_groups(start, tmp_path, monkeypatch):
    """A YAML, high-priority groups, SHARP and the timeout are options of the groups named; the environment stays."""
    path = tmp_path / "nccl.yaml"
    path.write_text("dp_cp: {max_ctas: 16}\ntp: {min_ctas: 2, net_name: IB}\nhcp: {max_ctas: 4}\n")
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")
    ps = start(
        0,
        16,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        nccl_communicator_config_path=str(path),
        high_priority_stream_groups=["dp_cp", "ep_dp"],
        use_sharp=True,
        sharp_enabled_group="dp_replica",
        num_distributed_optimizer_instances=2,
        distributed_timeout_minutes=7,
        hybrid_context_parallel=True,
    )
    options = {spec.name: spec.options.to_dict() for spec in ps.rankmesh_state.live.plan.specs}
    assert {given.pop("timeout") for given in options.values()} == {420.0}
    assert os.environ["NCCL_COLLNET_ENABLE"] == "1"
    assert {name: given for name, given in options.items() if given} == {
        "dp_cp": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "hybrid_dp_cp_2": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "hybrid_dp_cp_4": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "tp": {"nccl": {"min_ctas": 2, "net_name": "IB"}},
        "ep_dp": {"high_priority": True},
        "inter_ep_dp": {"sharp": True},
    }


@pytest.mark.parametrize("text", ["dpp: {max_ctas: 1}", "tp: [1]", "tp: {net_name: tcp}", "{"])
def test_a_wrong_nccl_configuration_is_refused(begin, tmp_path, text):
    """Unknown groups, lists for options, unknown networks, text that is not YAML."""
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    begin(0, 2)
    with pytest.raises(Refused) as caught:
        parallel_state.initialize_model_parallel(nccl_communicator_config_path=str(path))
    assert type(caught.value) is (UnknownName if "dpp" in text else Refused)


def test_sharded_weights(start):
    """gtp_remat follows tp in dense layers and ep in experts; data groups are with it unless said otherwise."""
    ps = start(3, 16, tensor_model_parallel_size=2, gtp_remat_size=2, expert_gtp_remat_size=2,
               expert_model_parallel_size=2)  # fmt: skip
    partial = {"with_context_parallel": True, "partial_data_parallel": True}
    with_egtp = ps.get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True)
    for group, expected in (
        (ps.get_gtp_weight_remat_group(), [1, 3]),
        (ps.get_expert_gtp_weight_remat_group(), [3, 7]),
        (ps.get_data_parallel_group(with_gtp_remat=False), [3, 7, 11, 15]),
        (ps.get_data_parallel_group(), [1, 3, 5, 7, 9, 11, 13, 15]),
        (ps.get_data_parallel_group(with_context_parallel=True), [1, 3, 5, 7, 9, 11, 13, 15]),
        (ps.get_data_parallel_group(**partial), [1, 3, 5, 7, 9, 11, 13, 15]),
        (ps.get_data_parallel_group(**partial, with_gtp_remat=False), [3, 7, 11, 15]),
        (ps.get_model_parallel_group(), [0, 1, 2, 3]),
        (ps.get_expert_data_parallel_group(with_gtp_remat=False), [3, 11]),
        (ps.get_expert_data_parallel_group(), [3, 7, 11, 15]),
        (ps.get_expert_data_parallel_group(partial_expert_data_parallel=True), [3, 7, 11, 15]),
        (ps.get_expert_tensor_model_pipeline_parallel_group(), [0, 1, 2, 3]),
        (with_egtp, [0, 1, 2, 3, 4, 5, 6, 7]),
    ):
        assert members(group) == expected
    assert (ps.get_gtp_weight_remat_rank(), ps.get_gtp_weight_remat_world_size()) == (1, 2)
    assert ps.get_data_parallel_world_size() == 2 * ps.get_data_parallel_world_size(with_gtp_remat=False) == 8


@pytest.mark.parametrize(("rank", "expected"), [(1, None), (7, ([6, 7], [5, 7, 9, 11]))])
def test_a_mesh_over_part_of_the_world(start, rank, expected):
    """rank_offset and local_world_size: ranks inside have groups, a rank outside has none."""
    ps = start(rank, 12, tensor_model_parallel_size=2, rank_offset=4, local_world_size=8)
    assert ps.is_initialized() == (expected is not None)
    if expected:
        found = members(ps.get_tensor_model_parallel_group()), members(ps.get_data_parallel_group())
        assert found == expected


def test_a_group_that_this_rank_is_not_in(start):
    """It is another error than for a group that there is not; ``test_differential`` has the answers."""
    ps = start(4, 16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    with pytest.raises(NotAMember):
        ps.get_embedding_group()
    with pytest.raises(UnknownName):
        ps.get_hybrid_data_context_parallel_groups(group_size=3)


def test_what_is_deprecated(start):
    """The virtual rank can be set, and the misspelt question be asked, which warns; a stage has to be named."""
    ps = start(0, 8, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    with pytest.warns(DeprecationWarning, match="set_virtual_pipeline_model_parallel_rank"):
        ps.set_virtual_pipeline_model_parallel_rank(1)
    assert ps.get_virtual_pipeline_model_parallel_rank() == 1
    with pytest.warns(DeprecationWarning, match="is_unitialized"):
        assert not ps.is_unitialized()
    with pytest.raises(NotInitialized):
        ps.is_pipeline_first_stage(ignore_virtual=False)


def test_several_states_at_once(begin):
    """Each has groups and values of its own, the same layout twice too; one is destroyed, the others live."""
    begin(3, 8)
    states = actor, critic, default = ParallelState("actor"), ParallelState("critic"), parallel_state
    actor.initialize_model_parallel(tensor_model_parallel_size=2)
    critic.initialize_model_parallel(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    default.initialize_model_parallel(tensor_model_parallel_size=2)
    assert [state.get_tensor_model_parallel_world_size() for state in states] == [2, 4, 2]
    actor.set_tensor_model_parallel_world_size(16)
    assert [state.get_tensor_model_parallel_world_size() for state in states] == [16, 4, 2]
    assert actor.get_tensor_model_parallel_group() is not default.get_tensor_model_parallel_group()
    critic.destroy_model_parallel()
    assert [state.is_initialized() for state in states] == [True, False, True]
    actor.destroy_model_parallel()
    assert members(default.get_tensor_model_parallel_group()) == [2, 3]


def test_buffers(start):
    """Memory by name is reused, until the buffer is destroyed."""
    ps = start(0, 2, tensor_model_parallel_size=2)
    buffer = ps.get_global_memory_buffer()
    large = buffer.get_tensor((4, 3), torch.float32, "x")
    assert large.shape == (4, 3)
    assert buffer.get_tensor((2, 2), torch.float32, "x").data_ptr() == large.data_ptr()
    with pytest.raises(Refused):
        ps._set_global_memory_buffer()
    with pytest.raises(NotInitialized):
        ps.get_global_symmetric_memory_buffer()
    ps.destroy_global_memory_buffer()
    assert ps._GLOBAL_MEMORY_BUFFER is None
