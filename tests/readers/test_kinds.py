"""Public files that were read as another layout, or not at all: words of forks, files without sizes, manifests."""

import pytest

from rankmesh import PlanError
from rankmesh.core import recipes
from rankmesh.readers import read_config
from rankmesh.readers.tools.lint import lint_text

MEGABLOCKS = """#!/bin/bash
torchrun --nproc_per_node 8 third_party/Megatron-LM/pretrain_gpt.py --num-layers 6 --hidden-size 512 \\
  --moe-num-experts=64 --moe-top-k=1 {}
"""
MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --micro-batch-size 4 --seq-length 1024"
ACCELERATE = """distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3}
num_processes: 8
parallelism_config: {parallelism_config_sp_size: 4, parallelism_config_sp_backend: deepspeed}
"""
AXOLOTL = "base_model: org/model\nmicro_batch_size: 1\ndatasets: [{path: x, type: alpaca}]\n"
NEMO = "model: {tensor_model_parallel_size: 2, %s}\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MEGABLOCKS.format("--moe-expert-model-parallelism"), "moe.sh"),
        (MEGABLOCKS.format("--tensor-model-parallel-size 2 --enable-expert-tensor-parallelism \\\n  --fp16"), "moe.sh"),
        (MEGABLOCKS.format("--ep-world-size 4"), "moe.sh"),
        (NEMO % "use_expert_parallel: true", "run.yaml"),
        ("[parallelism]\ntensor_parallel_degree = 2\nenable_expert_parallel = true\n", "run.toml"),
    ],
)
def test_a_word_that_spreads_experts_is_refused(text, name):
    """A switch or size of expert parallelism that is not known is refused, and noted by lint: never dropped."""
    with pytest.raises(PlanError, match=r"(ep|expert).*(this may spread the experts|this looks like a parallel size)"):
        read_config(text, name, world_size=8)
    assert len(lint_text(text, name).notes) + len(lint_text(text, name).findings) == 1


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--moe-weight-parallelism", True),
        ("--parallel-lanes 4", True),
        ("--num-experts 8 --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64", False),
        ("--overlap-moe-expert-parallel-comm --moe-expert-capacity-factor 1.25 --no-async-tensor-parallel", False),
        ("--moe-router-enable-expert-bias --ckpt-fully-parallel-save --save-tokens-per-expert-interval 10", False),
        ("--data-parallel-sharding-strategy no_shard --sequence-parallel", False),
    ],
)
def test_other_words_are_noted_unless_they_only_compute(words, noted):
    """An unknown word with `parallel` is a note of `show`; what Megatron knows and lays out nothing by is none."""
    config = read_config(MEGABLOCKS.format(f"--tensor-model-parallel-size 2 {words}"), "moe.sh")
    assert any("not known here" in text for _, text in config.notes) == noted
    assert config.plan == recipes.megatron(8, tp=2)


@pytest.mark.parametrize("name", ["optional cluster: none", "optional cluster@_global_: none", '"optional none"'])
def test_an_optional_parent_may_be_missing(tmp_path, name):
    """Hydra leaves out an optional parent that is not there, and reads one that is; another is an error."""
    text = f"defaults: [_self_, {'{' + name + '}' if ': ' in name else name}]\ntensor_model_parallel_size: 4\n"
    path = tmp_path / "run.yaml"
    assert read_config(text, str(path), world_size=8).plan == recipes.megatron(8, tp=4)
    with pytest.raises(PlanError, match="needs its parent"):
        read_config(text.replace("optional ", ""), str(path), world_size=8)
    (tmp_path / "cluster").mkdir()
    for folder in (tmp_path, tmp_path / "cluster"):
        (folder / "none.yaml").write_text("tensor_model_parallel_size: 2\n", encoding="utf-8")
    if "_global_" in name or ":" not in name:
        assert read_config(text, str(path), world_size=8).plan == recipes.megatron(8, tp=2)


READ = [
    # DeepSpeed makes the groups of sp, of adjacent ranks.
    (ACCELERATE, "a.yaml", recipes.deepspeed(8, sp=4)),
    # All ranks of axolotl are data parallel: shards of FSDP, DeepSpeed's own layout, or replicas.
    (AXOLOTL + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n", "run.yaml",
     recipes.accelerate(8, dp_shard=8)),
    (AXOLOTL + "fsdp: [full_shard, auto_wrap]\n", "run.yaml", recipes.accelerate(8, dp_shard=8)),
    (AXOLOTL + "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n", "run.yaml",
     recipes.accelerate(8, dp_replicate=8, dp_shard=1)),
    (AXOLOTL + "deepspeed: {zero_optimization: {stage: 3}}\n", "run.yaml", recipes.deepspeed(8)),
    (AXOLOTL + "deepspeed: {tensor_parallel: {autotp_size: 2}}\n", "run.yaml", recipes.deepspeed(8, tp=2)),
    (AXOLOTL, "run.yaml", recipes.accelerate(8, dp_replicate=8, dp_shard=1)),
    # A run of Megatron whose sizes are all its defaults has one data parallel group.
    (f"#!/bin/bash\ntorchrun --nproc_per_node 8 my_gpt.py {MODEL}\n", "run.sh", recipes.megatron(8)),
    ("#!/bin/bash\nNPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --micro_batch_size 1\n", "run.sh",
     recipes.megatron(8)),
    (f"{MODEL.replace(' --', chr(10) + '--')}\n", "run.args", recipes.megatron(8)),
    ("micro_batch_size: 2\nglobal_batch_size: 16\nnum_layers: 12\nhidden_size: 768\n", "run.yaml", recipes.megatron(8)),
    # Documents that hold nothing do not count.
    ("---\ntensor_model_parallel_size: 2\n---\n# nothing\n", "run.yaml", recipes.megatron(8, tp=2)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "plan"), READ)
def test_files_without_sizes(text, name, plan):
    """What a file does not state has the default of its system, in a world of 8 ranks."""
    assert read_config(text, name, world_size=8).plan == plan


def test_axolotl_names_the_file_of_deepspeed(tmp_path):
    """The layout is in that file, beside or above the config; a missing one is named."""
    path = tmp_path / "examples" / "run.yaml"
    path.parent.mkdir()
    text = AXOLOTL + "deepspeed: deepspeed_configs/zero3.json\n"
    with pytest.raises(PlanError, match=r"run\.yaml:4: the run's layout is in deepspeed_configs/zero3\.json"):
        read_config(text, str(path), world_size=8)
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero3.json").write_text('{"zero_optimization": {"zero_hpz_partition_size": 4}}')
    assert read_config(text, str(path), world_size=8).plan == recipes.deepspeed(8, hpz=4)


@pytest.mark.parametrize("text", ["a: 1\n---\nb: 2\n", "tp: 1\n---\n# none\n---\ndp: 2\n...\n---\nc: [1]\n"])
def test_several_documents(text):
    """A YAML of several documents is said to be one."""
    match = r"has [23] YAML documents \(the second at line \d\), and one is read"
    with pytest.raises(PlanError, match=match) as caught:
        read_config(text, "run.yaml", world_size=8)
    assert "not valid" not in str(caught.value)
