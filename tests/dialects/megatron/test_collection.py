"""ProcessGroupCollection and what it prepares for the optimizer and for DDP, beside megatron-core's own."""

import importlib
import itertools
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.process_groups_config import ProcessGroupCollection, ProcessGroupHelperMeta

FIELDS = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt", "mp",
          "tp_ep_pp", "tp", "pp", "ep")  # fmt: skip


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


def _prepared(me):
    from tests.dialects.megatron import peer as both

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer_config = importlib.import_module("megatron.core.process_groups_config")
    logging.disable()
    checked, wrong = 0, []
    both.world(5, 16)
    for instances, sharded, gloo in itertools.product((1, 2), (False, True), (False, True)):
        arguments = {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "num_distributed_optimizer_instances": instances,
        }
        assert both.start_peer(arguments) is both.start_ours(arguments) is None
        settings = SimpleNamespace(num_distributed_optimizer_instances=instances, use_distributed_optimizer=sharded)
        for names in (None, *(without(FIELDS, name) for name in FIELDS), FIELDS):
            for cp, with_settings in itertools.product((1, 2), (True, False)):
                config = SimpleNamespace(context_parallel_size=cp)
                chunk = SimpleNamespace(config=config, **({"ddp_config": settings} if with_settings else {}))
                output = []
                for module in (ProcessGroupCollection, peer_config.ProcessGroupCollection):
                    given = None if names is None else module.use_mpu_process_groups(list(names))
                    optimizer, ddp = module.setup_process_groups_for_optimizer, module.setup_process_groups_for_ddp
                    output.append(
                        [
                            both.answer(
                                optimizer,
                                {"pg_collection": given, "model_chunks": [chunk], "use_gloo_process_groups": gloo},
                            ),
                            both.answer(ddp, {"pg_collection": given, "config": config, "ddp_config": settings}),
                        ]
                    )
                for ours, theirs in zip(*output, strict=True):
                    checked += 1
                    if not both.same(ours, theirs):
                        wrong.append(f"{instances} {sharded} {gloo} {names} {cp} {with_settings}: {ours!r}, {theirs!r}")
        both.ours.destroy_model_parallel()
    return {"checked": checked, "wrong": wrong[:5]}


def without(names, left_out):
    """The names but one."""
    return tuple(name for name in names if name != left_out)


def test_what_optimizer_and_ddp_get(ranks):
    """Every combination of settings and of groups that are given: megatron-core's groups, or its refusal."""
    pytest.importorskip("megatron.core.process_groups_config")
    (found,) = ranks(1, _prepared, world=None)
    assert found["wrong"] == []
    assert found["checked"] == 8 * 14 * 4 * 2
