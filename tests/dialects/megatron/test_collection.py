"""ProcessGroupCollection: groups by hand, and of a parallel state."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.process_groups_config import ProcessGroupCollection, ProcessGroupHelperMeta


def test_by_hand():
    """Groups are set by name, at once or later; names that there are not are refused; equal groups are equal."""
    groups = ProcessGroupCollection(tp=None)
    groups.hcp = [SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 4)]
    assert repr(groups) == "ProcessGroupCollection(tp(None), hcp([2, 4]))"
    assert not hasattr(groups, "dp")
    assert groups == ProcessGroupCollection(tp=None, hcp=groups.hcp)
    with pytest.raises(ValueError, match=r"Unknown attribute.*'tpp'"):
        ProcessGroupCollection(tpp=None)


def test_the_protected_attribute():
    """A class of the helper's kind takes any attribute but the virtual pipeline size."""
    helper = ProcessGroupHelperMeta("Helper", (), {})
    helper.other = 1
    with pytest.raises(AttributeError, match="set_virtual_pipeline_model_parallel_size"):
        helper.virtual_pipeline_model_parallel_size = 2


def _of_the_state(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    some = ProcessGroupCollection.use_mpu_process_groups(["tp", "pos_embd"])
    actor = ParallelState("actor")
    actor.initialize_model_parallel(tensor_model_parallel_size=8)
    return {
        "same": groups.dp_cp is parallel_state.get_data_parallel_group(with_context_parallel=True),
        "absent": [groups.inter_dist_opt, groups.hcp, groups.dp_cp_ag],
        "some": sorted(vars(some)),
        "other": ProcessGroupCollection.use_mpu_process_groups(["tp"], state=actor).tp.size(),
        "wrong": me.error(ValueError, ProcessGroupCollection.use_mpu_process_groups, ["tp", "foo"])["received"],
    }


def test_groups_of_a_parallel_state(ranks):
    """All or some groups of the default state, or of another; what is absent is None."""
    (found,) = ranks(1, _of_the_state, world=None)
    assert found["same"] is True
    assert found["absent"] == [None, None, None]
    assert found["some"] == ["pos_embd", "tp"]
    assert found["other"] == 8
    assert found["wrong"] == ["foo"]
