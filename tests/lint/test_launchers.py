"""``rankmesh lint`` of what each launcher is given, in a script and in a container, with the files that it names."""

import json

import pytest

from rankmesh.readers.tools.lint import lint_text

FILES = {
    "titan.toml": "[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n",
    "fsdp.yaml": "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 2\n"
    "  parallelism_config_dp_shard_size: 4\n",
    "zero.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"zero_hpz_partition_size": 4}}',
    "sft.yaml": "model_name_or_path: m\nstage: sft\ndeepspeed: zero.json\n",
}
TITAN = "-m torchtitan.train --job.config_file titan.toml"
SHARDS = "--use_fsdp --num_processes 8 --parallelism_config_dp_shard_size 4"
# A command without a mistake, and what makes one of it.
COMMANDS = [
    (f"torchrun --nproc_per_node=8 {TITAN} --parallelism.tensor_parallel_degree=2", "degree=2", "degree=3"),
    (f"torchrun --nproc_per_node=8 {TITAN}", "node=8", "node=6"),
    ("NGPU=8 CONFIG_FILE=titan.toml ./run_train.sh --parallelism.context_parallel_degree 1", "degree 1", "degree 2"),
    ("accelerate launch --config_file fsdp.yaml train.py", "fsdp", "fsdp.yaml --num_processes 12 --config_file fsdp"),
    (f"accelerate launch {SHARDS} --parallelism_config_tp_size 2 train.py", "tp_size 2", "tp_size 3"),
    ("deepspeed --num_nodes 1 --num_gpus 8 train.py --deepspeed zero.json", "gpus 8", "gpus 6"),
    ("NPROC_PER_NODE=8 llamafactory-cli train sft.yaml", "8", "6"),
    ("deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 4", "gpus 8", "gpus 6"),
    ("vllm serve Qwen/Qwen3-8B -tp 4", "tp 4", "tp 5"),
    ("docker run --gpus all -p 1:1 vllm/vllm-openai:v1 --model Qwen/Qwen3-8B -tp 4", "tp 4", "tp 5"),
    ("python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B -tp 4", "tp 4", "tp 5"),
    ("python3 -m sglang.launch_server --model-path m --tp 8 --dp 2 --enable-dp-attention", "dp 2", "dp 3"),
    ("NPROC_PER_NODE=8 megatron sft --tensor_model_parallel_size 2", "size 2", "size 3"),
]


@pytest.fixture
def folder(tmp_path):
    """The files that commands name."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("command", "right", "wrong"), COMMANDS)
def test_commands(folder, command, right, wrong):
    """One mistake is one finding at the line of the command, in a script, a Dockerfile, Compose and a manifest."""
    mistaken = command.replace(right, wrong)
    assert mistaken != command
    of_shell = [["bash", "-c", each] for each in (command, mistaken)]
    services = ["services:\n  a:\n    command: " + json.dumps(words) for words in of_shell]
    pods = ["kind: Pod\nspec:\n  containers:\n  - args: " + json.dumps(words) for words in of_shell]
    for name, before, texts in (
        ("run.sh", 1, [f"#!/bin/bash\n{each}\n" for each in (command, mistaken)]),
        ("Dockerfile", 1, [f"FROM a\nCMD {each}\n" for each in (command, mistaken)]),
        ("compose.yaml", 2, services),
        ("pod.yaml", 3, pods),
    ):
        found = [lint_text(text, str(folder / name)) for text in texts]
        assert (found[0].findings, found[0].notes) == ((), ())
        assert [each.line for each in found[1].findings] == [before + 1]


@pytest.mark.parametrize(
    ("batch", "more", "wrong"),
    [(64, {}, False), (62, {}, True), (64, {"gradient_accumulation_steps": 4}, False),
     (64, {"gradient_accumulation_steps": 3}, True), ("auto", {}, False)],
)  # fmt: skip
def test_batches_of_deepspeed(batch, more, wrong):
    """DeepSpeed's batch is a multiple of the micro batch and the accumulation."""
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, **more}
    found = lint_text(json.dumps(sizes), "ds.json").findings
    assert [each.code for each in found] == ["batch"] * wrong
    for each in found:
        sizes["train_batch_size"] = int(each.edit.split(": ")[1])
        assert lint_text(json.dumps(sizes), "ds.json").findings == ()
