"""Megatron's layers, schedules, DDP and optimizer in a comparison: right, and broken in one place each."""

import json

import pytest
from tests.peers.fetch import folder

PEER = folder("megatron-core", "0.19.2")
# The file and the code of the line that is named, the operation, its group, and the change that works.
ROW = ("layers.py", "reduce_from_tensor_model_parallel_region", "all-reduce", "dp", ["group", "tp"])
EXPECTED = {
    "row": ROW,
    "attention row": ROW,
    "column": ("layers.py", "self._forward_impl", "all-reduce", "dp", ["group", "tp"]),
    "vocabulary": ("layers.py", "reduce_from_tensor_model_parallel_region", "all-reduce", "dp", ["group", "tp"]),
    "gradients": ("param_and_grad_buffer.py", "_coalescing_manager", "all-reduce", "tp", ["group", "dp"]),
    "mean": ("param_and_grad_buffer.py", "_coalescing_manager", "all-reduce", "dp_cp", ["scale", "1/dp_cp"]),
    "norms": ("gpt.py", "sim.see", None, None, ["all-reduce", "tp"]),
    "norm": ("optimizer.py", "get_grad_norm_fp32", "all-reduce", "dp", ["group", "mp"]),
}


def test_right_model_is_the_same(asked_beside):
    """Six layouts: 1F1B, sequence parallelism, and clipping; losses, gradients, norms and weights, no false alarm."""
    for same, seen, report in json.loads(asked_beside("tests.peers.gpt", PEER, "right", limit=300))["right"]:
        assert same, report
        assert seen > 50


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_broken_model_is_found(asked_beside, name):
    """The line of Megatron that made the wrong collective, its group, and what makes everything right."""
    found = json.loads(asked_beside("tests.peers.gpt", PEER, name, limit=300))[name]
    file, code, operation, group, repair = EXPECTED[name]
    assert (found["operation"], found["group"], found["repair"], found["settles"]) == (operation, group, repair, True)
    assert found["site"].split(":")[0] == file
    assert code in found["code"]
