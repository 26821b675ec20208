"""``rankmesh lint`` with a model that a file names: by its folder and by its name, and the rules of each engine."""

import json

from rankmesh.readers.models import named_counts
from rankmesh.readers.tools.lint import lint_text


def codes(command, name="a.sh"):
    """The findings of a script with one command, without their words."""
    return [(found.code, found.line, found.fix) for found in lint_text(f"#!/bin/bash\n{command}\n", str(name)).findings]


def test_folder(tmp_path):
    """A folder that is there goes before a name; without a model, the config.json beside the file counts."""
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 12, "num_key_value_heads": 4}
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(config))
    script = tmp_path / "serve.sh"
    assert codes("vllm serve ./Qwen3-8B -tp 8", script) == [("heads", 2, "tp=4")]
    assert codes(f"vllm serve --model={tmp_path / 'Qwen3-8B'} -tp 8", script) == [("heads", 2, "tp=4")]
    assert codes("vllm serve --model Qwen/Qwen3-8B -tp 8", script) == []
    assert codes("vllm serve ./none -tp 8", script) == []
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert codes("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 8", script) == [
        ("heads", 2, "tp=4")
    ]
    (tmp_path / "config.json").write_text("[" * 1000)
    assert codes("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 8", script) == []


def test_a_model_that_was_downloaded(tmp_path, monkeypatch):
    """The config.json in Hugging Face's cache goes before a name that is known."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "0a"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 12}')
    assert codes("vllm serve org/m -tp 8") == [("heads", 2, "tp=6")]
    assert codes("vllm serve org/other -tp 8") == []


def test_several_runs_of_a_script():
    """Each run of a script is checked, but for one whose arguments are in another file."""
    found = codes("vllm serve Qwen/Qwen3-8B -tp 3 &\nvllm serve Qwen/Qwen3-8B -tp 2 &\nvllm serve Qwen/Qwen3-8B -tp 5")
    assert [(code, line) for code, line, _ in found] == [("heads", 2), ("heads", 4)]
    run = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen2.5-7B --pipeline_model_parallel_size 8"
    assert codes(run) == [("layers", 2, "pp=4")]
    assert codes(f"source model.sh\n{run} ${{MODEL_ARGS[@]}}") == []


def test_names():
    """Names of repositories, with what is only another training or number format of the same shape."""
    assert named_counts("meta-llama/Meta-Llama-3.1-70B-Instruct-FP8") == named_counts("llama3-70b")
    assert named_counts("deepseek-ai/DeepSeek-R1-0528")["experts"] == 256
    assert named_counts("google/gemma-3-27b-it")["kv_heads"] == 16
    for other in ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "", "org/"):
        assert named_counts(other) == {}
