"""Layouts that are read from engines' and trainers' own loaders, beside what these loaders make of real weights."""

import json
import os
from pathlib import Path

import engines_beside
import engines_table
import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).parents[3]
pytestmark = pytest.mark.nightly
WEIGHTS = ["Llama 3", "Llama 3, tied", "Qwen 3", "Qwen 3 MoE", "Mixtral"]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Every row of the program, which one worker runs once for all of them; it takes minutes."""
    if not os.environ.get("RANKMESH_ENGINES"):
        pytest.skip("minutes: RANKMESH_ENGINES=1 make test-peers ARGS='-k engines'")
    common = tmp_path_factory.getbasetemp()
    kept = (common.parent if os.environ.get("PYTEST_XDIST_WORKER") else common) / "engines.json"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_text(json.dumps(engines_table.measured("all", limit=2900)), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def check_cells(rows, asked):
    """Each model under each side is exact, every element of every rank, or refused with a reason."""
    cells = [row for row in rows if "side" in row]
    assert [(row["model"], row["side"]) for row in cells] == [(m, s) for m in asked["models"] for s in asked["sides"]]
    assert [row for row in cells if row["result"] == "wrong"] == []
    assert all(row["compared"] >= row["tensors"] > 0 for row in cells if row["result"] == "exact")
    assert all(row["why"] for row in cells if row["result"] == "refused")
    # rankmesh's own table, which needs no framework: it says the same of each rank's shard, or that it does not know.
    assert [row for row in cells if row.get("unlike")] == []
    assert any(row.get("unlike") == [] for row in cells)
    # Of a cell that a loader refuses, it says more only where the reason is mbridge's map or padding, and no size.
    assert [row["why"] for row in cells if row.get("table") and "mbridge does not pad" not in row["why"]] == []


def check_transfers(rows):
    """The target's parameters, filled from another framework's, are those that its own loader makes."""
    moved = [row for row in rows if "from" in row]
    assert moved
    assert [row for row in moved if row["wrong"] or not row["tensors"]] == []


@pytest.mark.timeout(700)
def test_a_slice_of_the_table():
    """Two models, five sides, a minute of CPU: exact, and equal after transfers; no experts, no expert parallelism."""
    rows = engines_table.measured("quick")
    check_cells(rows, engines_beside.QUICK)
    check_transfers(rows)
    refused = [row for row in rows if row.get("result") == "refused"]
    assert [(row["model"], row["side"]) for row in refused] == [("Llama 3", "megatron:tp=2,pp=2,ep=2,etp=1,vocab=1")]
    assert "num_moe_experts must be non None to use expert-parallel" in refused[0]["why"]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("model", ["Qwen 3 MoE"] if not os.environ.get("RANKMESH_ENGINES") else WEIGHTS)
def test_megatron_filled_by_a_transfer_is_the_model(model):
    """The logits of one rank are transformers'; what each rank holds of it is what sharded_state_dict says, exactly."""
    logits, *layouts = engines_table.measured(model, program="megatron_weights")
    assert logits["error"] < 1e-4 < 0.1 < logits["spread"]
    assert len(layouts) >= 3
    assert [row for row in layouts if row["wrong"] or not row["compared"]] == []


@pytest.mark.timeout(3000)
def test_every_model_under_every_side_is_exact_or_refused(whole):
    """7 models, 24 sides: each shard of each rank's parameters is what the side's loader put there, every element."""
    check_cells(whole, engines_beside.WHOLE)


@pytest.mark.timeout(3000)
def test_transfers_from_each_side_fill_the_parameters_of_each_other(whole):
    """Whole parameters, padding included, equal what the target's own loader made of the same weights."""
    check_transfers(whole)


@pytest.mark.timeout(3000)
def test_the_table_of_the_page_is_the_measured_one(whole):
    """The page lists which cells are exact, and why the others are refused."""
    page = (REPOSITORY / "docs" / "reference" / "layouts.md").read_text(encoding="utf-8")
    assert engines_table.table(whole) in page


HOOKS = {"transformers": "then quantise it: from_pretrained(None, config=config, state_dict=model.state_dict()",
         "vllm": "fill it before vLLM's process_weights_after_loading(model, model_config, device), then",
         "sglang": "fill it before the process_weights_after_loading(module) of its module's quant_method"}  # fmt: skip
# What a format leaves as it is.
PLAIN = {"fp8": ("norm", "embed_tokens", "lm_head"), "awq": ("norm", "embed_tokens", "lm_head"),
         "gptq": ("norm", "embed_tokens", "lm_head"),
         "mxfp4": ("norm", "embed_tokens", "lm_head", "self_attn", "router")}  # fmt: skip


@pytest.mark.timeout(700)
def test_parameters_of_a_quantised_model_are_refused_by_name():
    """fp8, AWQ, GPTQ, MXFP4: each quantised parameter with format and hook, as the engines' own quantisers say."""
    rows = engines_table.measured("kernels")
    assert [(row["model"], row["format"]) for row in rows[::4]] == engines_beside.KERNELS
    for row in rows:
        kind, engine = row["format"], row["side"].partition(":")[0]
        if engine == "megatron":  # it trains the weights as they were before quantisation
            assert row["refused"] == {}, row
            continue
        left_out = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv" if kind == "fp8"}
        # A router is a linear layer that vLLM quantises and SGLang does not; transformers leaves biases of experts too.
        others = {"transformers": ("gate.weight", "experts.gate_up_proj_bias", "experts.down_proj_bias"),
                  "sglang": ("gate.weight",)}  # fmt: skip
        left_out |= {f"model.layers.{i}.mlp.{name}" for i in range(4) for name in others.get(engine, ())}
        for name in row["kept"]:
            assert any(part in name for part in PLAIN[kind]) or name in left_out, (name, row["side"], kind)
        for name, why in row["refused"].items():
            assert not any(part in name for part in PLAIN[kind]), (name, row["side"], kind)
            assert kind in why
            assert "a form made after loading" in why
            assert HOOKS[engine] in why
        assert len(row["refused"]) >= 8
    names = {row["side"]: row["refused"] for row in rows if row["format"] == "fp8"}
    assert "gate_up_proj.weight is fp8 (Fp8LinearMethod)" in names["vllm:tp=2"]["model.layers.1.mlp.gate_proj.weight"]


@pytest.mark.timeout(700)
def test_a_layout_does_not_depend_on_those_that_were_read_before_it():
    """vLLM keeps which layers a stage lacks by the id of a model, which a class has here; SGLang keeps modules."""
    rows = engines_table.measured("again")
    assert len(rows) == 4
    assert [row for row in rows if not row["again"] or row["refused"]] == []


@pytest.mark.timeout(700)
def test_what_a_side_does_not_have_is_refused():
    """An option, sizes that do not divide tp, and heads that tp does not divide: what it is, and what to give."""
    why = {row["side"]: row["why"] for row in engines_table.measured("refusals")}
    assert why["sglang:tp=2,cp=2"] == "sglang has no option 'cp'; it has tp, pp, dp, ep"
    assert why["vllm:cp=2"] == "vllm has no option 'cp'; it has tp, pp, dp, ep"
    assert why["megatron:tp=2,fsdp=2"].startswith("megatron has no option 'fsdp'; it has tp, cp, dp, pp")
    assert why["transformers:tp=2,cp=2"] == "transformers has no option 'cp'; it has tp, fsdp, dp_replicate, pp, ep"
    assert why["vllm:tp=2,tp=4"] == "side 'vllm:tp=2,tp=4' has tp twice; give it once"
    assert why["sglang:tp=4,dp=3"] == "dp=3 does not divide tp=4, of which it is a part in SGLang; give another dp"
    assert why["sglang:tp=4,ep=8"] == "ep=8 does not divide tp=4, of which it is a part in SGLang; give another ep"
    assert why["sglang:tp=3"].startswith("sglang cannot load this model as rank 0: AssertionError")
