"""The recipes of vLLM and SGLang beside arrays that are written out; ``tests/peers`` asks the systems themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core import recipes
from rankmesh.errors import LayoutError, PlanError
from rankmesh.readers.source import read

SIZES = st.sampled_from((1, 1, 2, 3, 4))


def rows(array, axis_last, width):
    """The groups of ``width`` along the last of the transposed axes, each in its order."""
    return sorted(np.transpose(array, axis_last).reshape(-1, width).tolist())


def kind(plan, name):
    """The groups of a kind, each in its order."""
    return sorted(plan.groups(name).tolist())


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.data())
def test_vllm_is_an_array_of_replica_dp_pp_pcp_tp(tp, pp, dp, pcp, replicas, data):
    """Every kind equals the rows of the array of ranks, transposed so that its axes come last."""
    choices = [size for size in range(1, tp + 1) if tp % size == 0] if pcp == 1 else [1, pcp, tp * pcp]
    dcp = data.draw(st.sampled_from(choices))
    world = tp * pp * dp * pcp * replicas
    plan = recipes.vllm(world, tp=tp, pp=pp, dp=dp, pcp=pcp, dcp=dcp, eplb=True)
    array = np.arange(world).reshape(replicas, dp, pp, pcp, tp)
    assert kind(plan, "tp") == rows(array, (0, 1, 2, 3, 4), tp)
    assert kind(plan, "pcp") == rows(array, (0, 1, 2, 4, 3), pcp)
    assert kind(plan, "pp") == rows(array, (0, 1, 3, 4, 2), pp)
    assert kind(plan, "dp") == rows(array, (0, 2, 3, 4, 1), dp)
    assert kind(plan, "ep") == rows(array, (0, 2, 1, 3, 4), dp * pcp * tp)
    assert kind(plan, "eplb") == kind(plan, "ep")
    assert kind(plan, "dcp") == rows(array, (0, 1, 2, 4, 3) if dcp > 1 else (0, 1, 2, 3, 4), dcp)


def test_eplb_has_a_communicator_of_its_own():
    """vLLM balances experts over a group of its own, so that it cannot deadlock with the layers'; None unless asked."""
    plan = recipes.vllm(tp=4, dp=2, eplb=True)
    assert plan.of(0)["eplb"].canonical == "eplb" != plan.of(0)["ep"].canonical
    assert "eplb" not in recipes.vllm(tp=4, dp=2).kinds
    assert read("vllm:tp=4,dp=2,eplb=true").plan == plan


@given(SIZES, SIZES, SIZES, SIZES, st.data())
def test_sglang_cuts_tp_three_times(attn_tp, attn_cp, attn_dp, pp, data):
    """Attention, experts and decoding each factor the ranks of tp; moe_dp is attn_cp where that is larger."""
    tp = attn_tp * attn_cp * attn_dp
    divisors = [size for size in range(1, tp + 1) if tp % size == 0]
    ep = data.draw(st.sampled_from(divisors))
    moe_dp = data.draw(st.sampled_from([size for size in divisors if tp // ep % size == 0]))
    dcp = data.draw(st.sampled_from(divisors))
    plan = recipes.sglang(tp=tp, pp=pp, attn_dp=attn_dp, attn_cp=attn_cp, ep=ep, moe_dp=moe_dp, dcp=dcp)
    attention = np.arange(tp * pp).reshape(pp, attn_dp, attn_cp, attn_tp)
    experts = np.arange(tp * pp).reshape(pp, moe_dp, ep, -1)
    assert kind(plan, "tp") == rows(attention, (0, 1, 2, 3), tp)
    assert kind(plan, "pp") == rows(attention, (1, 2, 3, 0), pp)
    assert kind(plan, "attn_tp") == rows(attention, (0, 1, 2, 3), attn_tp)
    assert kind(plan, "attn_cp") == rows(attention, (0, 1, 3, 2), attn_cp)
    assert kind(plan, "attn_dp") == rows(attention, (0, 2, 3, 1), attn_dp)
    assert kind(plan, "moe_ep") == rows(experts, (0, 1, 3, 2), ep)
    assert kind(plan, "moe_tp") == rows(experts, (0, 1, 2, 3), experts.shape[3])
    shared = kind(plan, "attn_cp") if attn_cp > moe_dp else rows(experts, (0, 2, 3, 1), moe_dp)
    assert kind(plan, "moe_dp") == shared
    assert ("dcp" in plan.kinds) == (dcp > 1)
    if dcp > 1:
        assert kind(plan, "dcp") == rows(attention, (0, 1, 2, 3), dcp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.vllm(10, tp=4), "tp x pcp x pp x dp = 4 does not divide world_size = 10"),
        (lambda: recipes.vllm(tp=4, dcp=3), "dcp = 3 does not divide tp = 4"),
        (lambda: recipes.vllm(tp=4, pcp=2, dcp=4), "use 1, 2 or 8"),
        (lambda: recipes.vllm(tp=0), "tp"),
        (lambda: recipes.sglang(16, tp=8), "world_size is 16, but an SGLang engine has tp 8 x pp 1 = 8 ranks"),
        (lambda: recipes.sglang(tp=8, attn_dp=3), "attn_dp x attn_cp = 3 does not divide tp = 8"),
        (lambda: recipes.sglang(tp=8, ep=4, moe_dp=4), "ep x moe_dp = 16 does not divide tp = 8"),
        (lambda: recipes.sglang(tp=8, attn_dp=4, shared_experts_tp=4), "does not divide attn_tp = 2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(make, message):
    """Each with the sizes, and what must divide what."""
    with pytest.raises((PlanError, LayoutError), match=message):
        make()
