"""ProcessGroupCollection: groups by hand, and of a parallel state."""

from types import SimpleNamespace

import pytest

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


def test_groups_of_a_parallel_state(start):
    """All or some groups of the default state, or of another; what is absent is None."""
    start(3, 8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert groups.dp_cp is parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert groups.inter_dist_opt is groups.hcp is groups.dp_cp_ag is None
    assert sorted(vars(ProcessGroupCollection.use_mpu_process_groups(["tp", "pos_embd"]))) == ["pos_embd", "tp"]
    actor = ParallelState("actor")
    actor.initialize_model_parallel(tensor_model_parallel_size=8)
    assert ProcessGroupCollection.use_mpu_process_groups(["tp"], state=actor).tp.size() == 8
    with pytest.raises(ValueError, match="foo") as caught:
        ProcessGroupCollection.use_mpu_process_groups(["tp", "foo"])
    assert caught.value.received == ["foo"]
    actor.destroy_model_parallel()
