"""A parallel state in dry worlds: what is written is read, what is refused leaves nothing, destroyed is destroyed."""

import os
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.registries import registries
from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused, UnknownName
from rankmesh.errors import NotAMember, PlanError


def start(rank, size, **arguments):
    """The default state in a dry world."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(**arguments)
    return parallel_state


def members(group):
    """The ranks of a process group."""
    return dist.get_process_group_ranks(group)


def _written(me):
    ps = start(5, 16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    found = {"first": [ps.get_tensor_model_parallel_rank(), ps.is_pipeline_first_stage()]}
    ps._MPU_TENSOR_MODEL_PARALLEL_RANK = 7
    ps.set_pipeline_model_parallel_rank(0)
    ps.set_data_parallel_rank(4)
    found["set"] = [
        ps.get_tensor_model_parallel_rank(),
        ps.is_pipeline_first_stage(),
        ps.is_pipeline_last_stage(),
        ps.get_pipeline_model_parallel_next_rank(),
        ps.get_data_parallel_rank(),
        ps.get_data_parallel_rank(with_context_parallel=True),
    ]
    ps.set_pipeline_model_parallel_world_size(1)
    found["one stage"] = [ps.is_pipeline_last_stage(), ps.get_pipeline_model_parallel_last_rank()]
    ps.set_tensor_model_parallel_rank(None)
    ps.set_pipeline_model_parallel_rank(None)
    ps.set_pipeline_model_parallel_world_size(None)
    found["again"] = [ps.get_tensor_model_parallel_rank(), ps.is_pipeline_first_stage()]
    group = Mock(spec=dist.ProcessGroup)
    ps._TENSOR_MODEL_PARALLEL_GROUP = group
    sizes = []
    for size in (3, 4):
        group.size.return_value = size
        sizes.append(ps.get_tensor_model_parallel_world_size())
    found["group"] = [sizes, ps.get_tensor_model_parallel_group() is group]
    with pytest.MonkeyPatch.context() as patch:
        stage = Mock(return_value=3)
        patch.setattr(ps, "get_pipeline_model_parallel_rank", stage)
        stage.return_value = 0
        found["replaced"] = [ps.is_pipeline_first_stage(), ps.get_pipeline_model_parallel_next_rank()]
    found["restored"] = [ps.is_pipeline_first_stage(), ps.get_pipeline_model_parallel_next_rank()]
    ps._PIPELINE_GLOBAL_RANKS = [9, 8, 7, 6]
    found["ranks"] = [ps.get_pipeline_model_parallel_first_rank(), ps.get_pipeline_model_parallel_prev_rank()]
    return found


def test_what_is_written_is_what_getters_return(ranks):
    """Values, groups, lists and whole functions that a caller sets; None gives the group's own again."""
    (found,) = ranks(1, _written, world=None)
    assert found == {
        "first": [1, False],
        "set": [7, True, False, 5, 4, 4],
        "one stage": [True, 1],
        "again": [1, False],
        "group": [[3, 4], True],
        "replaced": [True, 5],
        "restored": [False, 9],
        "ranks": [9, 9],
    }


def _destroyed(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    before = registries()
    ps, found = parallel_state, []
    for _ in range(3):
        ps.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        ps.set_data_parallel_rank(5)
        ps.set_virtual_pipeline_model_parallel_world_size(2)
        ps.destroy_model_parallel()
        ps.destroy_model_parallel()
        left = {name: getattr(ps, name) for name in parallel_state.rankmesh_state.initial}
        found.append([left == parallel_state.rankmesh_state.initial, registries() == before, ps.is_initialized()])
    return found


def test_destroy_leaves_nothing(ranks):
    """After destruction every global is as at first, and so are torch's registries; twice is as good as once."""
    assert ranks(1, _destroyed, world=None) == [[[True, True, False]] * 3]


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


def _refused(me):
    ps = parallel_state
    me.error(NotInitialized, ps.initialize_model_parallel)
    me.error(NotInitialized, ps.get_tensor_model_parallel_rank)
    found = [ps.get_data_parallel_rank(), ps.get_expert_model_parallel_world_size()]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    before = registries()
    for arguments in REFUSED:
        me.error(Refused, ps.initialize_model_parallel, **arguments)
    left = {name: getattr(ps, name) for name in parallel_state.rankmesh_state.initial}
    found += [left == parallel_state.rankmesh_state.initial, registries() == before]
    ps.initialize_model_parallel()
    me.error(Refused, ps.initialize_model_parallel)
    return found


def test_refusals_leave_nothing(ranks):
    """Each is what Megatron raises, an AssertionError and a RuntimeError; no group and no global is left."""
    assert issubclass(NotInitialized, AssertionError)
    assert issubclass(Refused, AssertionError)
    assert issubclass(Refused, RuntimeError)
    assert ranks(1, _refused, world=None) == [[0, 0, True, True]]


def _configured(me, path):
    os.environ["NCCL_COLLNET_ENABLE"] = "1"
    ps = start(
        0,
        16,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        nccl_communicator_config_path=path,
        high_priority_stream_groups=["dp_cp", "ep_dp"],
        use_sharp=True,
        sharp_enabled_group="dp_replica",
        num_distributed_optimizer_instances=2,
        distributed_timeout_minutes=7,
        hybrid_context_parallel=True,
    )
    plan = ps.rankmesh_state.live.plan
    options = {spec.name: {k: v for k, v in spec.options.to_dict().items() if k != "timeout"} for spec in plan.specs}
    timeouts = {spec.options.timeout for spec in plan.specs}
    return {"options": options, "timeouts": sorted(timeouts), "environment": os.environ["NCCL_COLLNET_ENABLE"]}


def test_nccl_options_reach_their_groups(ranks, tmp_path):
    """A YAML, high-priority groups, SHARP and the timeout are options of the groups named; the environment stays."""
    path = tmp_path / "nccl.yaml"
    path.write_text("dp_cp: {max_ctas: 16}\ntp: {min_ctas: 2, net_name: IB}\nhcp: {max_ctas: 4}\n")
    (found,) = ranks(1, _configured, str(path), world=None)
    assert found["timeouts"] == [420.0]
    assert found["environment"] == "1"
    options = {name: value for name, value in found["options"].items() if value}
    assert options == {
        "dp_cp": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "hybrid_dp_cp_2": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "hybrid_dp_cp_4": {"nccl": {"max_ctas": 16}, "high_priority": True},
        "tp": {"nccl": {"min_ctas": 2, "net_name": "IB"}},
        "ep_dp": {"high_priority": True},
        "inter_ep_dp": {"sharp": True},
    }


def _wrong_configuration(me, path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return me.error(PlanError, parallel_state.initialize_model_parallel, nccl_communicator_config_path=path)["kind"]


@pytest.mark.parametrize("text", ["dpp: {max_ctas: 1}", "tp: [1]", "tp: {net_name: tcp}", "{"])
def test_a_wrong_nccl_configuration_is_refused(ranks, tmp_path, text):
    """Unknown groups, lists for options, unknown networks, text that is not YAML."""
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    assert ranks(1, _wrong_configuration, str(path), world=None) == ["UnknownName" if "dpp" in text else "Refused"]


def _sharded(me):
    ps = start(3, 16, tensor_model_parallel_size=2, gtp_remat_size=2, expert_gtp_remat_size=2,
               expert_model_parallel_size=2)  # fmt: skip
    partial = {"with_context_parallel": True, "partial_data_parallel": True}
    groups = {
        "gtp": ps.get_gtp_weight_remat_group(),
        "egtp": ps.get_expert_gtp_weight_remat_group(),
        "dp": ps.get_data_parallel_group(with_gtp_remat=False),
        "all data": ps.get_data_parallel_group(),
        "all data with cp": ps.get_data_parallel_group(with_context_parallel=True),
        "part": ps.get_data_parallel_group(**partial),
        "its replicas": ps.get_data_parallel_group(**partial, with_gtp_remat=False),
        "mp": ps.get_model_parallel_group(),
        "edp": ps.get_expert_data_parallel_group(with_gtp_remat=False),
        "all expert data": ps.get_expert_data_parallel_group(),
        "partial expert data": ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        "tp_ep_pp": ps.get_expert_tensor_model_pipeline_parallel_group(),
        "with egtp": ps.get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True),
    }
    numbers = [ps.get_gtp_weight_remat_rank(), ps.get_gtp_weight_remat_world_size(), ps.get_data_parallel_world_size(),
               ps.get_data_parallel_world_size(with_gtp_remat=False)]  # fmt: skip
    return {"groups": {name: members(group) for name, group in groups.items()}, "numbers": numbers}


def test_sharded_weights(ranks):
    """gtp_remat follows tp in dense layers and ep in experts; data groups are with it unless said otherwise."""
    (found,) = ranks(1, _sharded, world=None)
    assert found["groups"] == {
        "gtp": [1, 3],
        "egtp": [3, 7],
        "dp": [3, 7, 11, 15],
        "all data": [1, 3, 5, 7, 9, 11, 13, 15],
        "all data with cp": [1, 3, 5, 7, 9, 11, 13, 15],
        "part": [1, 3, 5, 7, 9, 11, 13, 15],
        "its replicas": [3, 7, 11, 15],
        "mp": [0, 1, 2, 3],
        "edp": [3, 11],
        "all expert data": [3, 7, 11, 15],
        "partial expert data": [3, 7, 11, 15],
        "tp_ep_pp": [0, 1, 2, 3],
        "with egtp": [0, 1, 2, 3, 4, 5, 6, 7],
    }
    assert found["numbers"] == [1, 2, 8, 4]


def _part_of_the_world(me, rank):
    ps = start(rank, 12, tensor_model_parallel_size=2, rank_offset=4, local_world_size=8)
    if not ps.is_initialized():
        return None
    return [members(ps.get_tensor_model_parallel_group()), members(ps.get_data_parallel_group())]


@pytest.mark.parametrize(("rank", "expected"), [(1, None), (7, [[6, 7], [5, 7, 9, 11]])])
def test_a_mesh_over_part_of_the_world(ranks, rank, expected):
    """rank_offset and local_world_size: ranks inside have groups, a rank outside has none."""
    assert ranks(1, _part_of_the_world, rank, world=None) == [expected]


def _absent(me):
    ps = start(4, 16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    found = [me.error(NotAMember, get)["kind"] for get in (ps.get_embedding_group, ps.get_position_embedding_group)]
    me.error(UnknownName, ps.get_hybrid_data_context_parallel_groups, group_size=3)
    me.error(NotInitialized, ps.get_inter_distributed_optimizer_instance_group)
    inside = [ps.is_rank_in_embedding_group(), ps.is_rank_in_position_embedding_group()]
    return [*found, ps.get_embedding_group(check_initialized=False), *inside]


def test_a_group_that_this_rank_is_not_in(ranks):
    """Unchecked it is None, as Megatron's code relies on; asked for, it is an error."""
    assert ranks(1, _absent, world=None) == [["NotHere", "NotHere", None, False, False]]


def _virtual(me):
    ps = start(0, 8, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    found = [ps.get_virtual_pipeline_model_parallel_rank(), ps.get_virtual_pipeline_model_parallel_world_size()]
    found += [ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage) for stage in (0, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.set_virtual_pipeline_model_parallel_rank(1)
        found += [ps.is_unitialized()]
    found += [ps.get_virtual_pipeline_model_parallel_rank(), [str(w.category.__name__) for w in caught]]
    me.error(NotInitialized, ps.is_pipeline_first_stage, ignore_virtual=False)
    return found


def test_virtual_stages(ranks):
    """The virtual rank and size, stages that heed them, a stage that is not named."""
    assert ranks(1, _virtual, world=None) == [[0, 2, True, False, False, 1, ["DeprecationWarning"] * 2]]


def _several(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    actor, critic = ParallelState("actor"), ParallelState("critic")
    actor.initialize_model_parallel(tensor_model_parallel_size=2)
    critic.initialize_model_parallel(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    states = (actor, critic, parallel_state)
    found = [[state.get_tensor_model_parallel_world_size() for state in states]]
    actor.set_tensor_model_parallel_world_size(16)
    found += [[state.get_tensor_model_parallel_world_size() for state in states]]
    distinct = actor.get_tensor_model_parallel_group() is not parallel_state.get_tensor_model_parallel_group()
    critic.destroy_model_parallel()
    found += [distinct, [state.is_initialized() for state in states]]
    actor.destroy_model_parallel()
    found += [members(parallel_state.get_tensor_model_parallel_group())]
    return found


def test_several_states_at_once(ranks):
    """Each has groups and values of its own, the same layout twice too; one is destroyed, the others live."""
    assert ranks(1, _several, world=None) == [
        [[2, 4, 2], [16, 4, 2], True, [True, False, True], [2, 3]],
    ]


def _buffers(me):
    ps = start(0, 2, tensor_model_parallel_size=2)
    buffer = ps.get_global_memory_buffer()
    large = buffer.get_tensor((4, 3), torch.float32, "x")
    again = buffer.get_tensor((2, 2), torch.float32, "x")
    me.error(Refused, ps._set_global_memory_buffer)
    me.error(NotInitialized, ps.get_global_symmetric_memory_buffer)
    ps.destroy_global_memory_buffer()
    return [large.shape == (4, 3), again.data_ptr() == large.data_ptr(), ps._GLOBAL_MEMORY_BUFFER]


def test_buffers(ranks):
    """Memory by name is reused, until the buffer is destroyed."""
    assert ranks(1, _buffers, world=None) == [[True, True, None]]
