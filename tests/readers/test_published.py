"""Files of public repositories that were read as another layout than their runs have, in their authors' form."""

import pytest

import rankmesh as rm
from rankmesh.core import recipes
from rankmesh.errors import PlanError
from rankmesh.readers import read_config

BRIDGE = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
srun python run_recipe.py --recipe small_{kind}_config model.tensor_model_parallel_size=2 \
 model.pipeline_model_parallel_size=4 {more}
"""
NEMO = """trainer: {num_nodes: 16, devices: 8}
exp_manager: {checkpoint_callback_params: {model_parallel_size: %s}}
model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, context_parallel_size: 2}
"""
PRIMUS = """modules:
  pre_trainer:
    framework: megatron
    model: some_moe.yaml
    overrides:
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      pipeline_model_parallel_size: ${PRIMUS_PP:-4}
      expert_model_parallel_size: ${PRIMUS_EP:8}
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_machines: 1\nnum_processes: 8\n"
HETERO = "tensor_model_parallel_size: 4\nhetero: {hetero_process_meshes: [2, 1, 1, 4, 1, 4, 1, 1, 2, 1]}\n"
SLIME = "#!/bin/bash\nray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 {sizes}"
LLAVA = "#!/bin/bash\ndeepspeed --num_gpus 8 train_mem.py --pretrain_mm_mlp_adapter ./a.bin --output_dir o\n"

TITAN = """#!/bin/bash
torchrun --nproc_per_node=8 -m torchtitan.train --module graph --config small \
 --parallelism.data_parallel_shard_degree{0}4 --parallelism.{1} --parallelism.expert_parallel_degree{0}2
"""
SERVE = "#!/bin/bash\nvllm serve org/model {sizes} --kv-cache-dtype fp8 --block-size 256\n"
SGLANG = "#!/bin/bash\npython3 -m sglang.launch_server --model-path m --tp 8 --ep-size 4 --dp 2 {more}\n"
PICOTRON = '{"distributed": {"tp_size": 2, "cp_size": 2, "pp_size": 2, "dp_size": 2, "pp_engine": "1f1b"}}'

READ = [
    (TITAN.format("=", "tensor_parallel_degree=2"), "a.sh", {}, recipes.torchtitan(8, dp_shard=4, tp=2, ep=2)),
    (TITAN.format(" ", "pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 8"), "a.sh", {},
     recipes.torchtitan(8, dp_shard=4, pp=2, ep=2)),
    (SERVE.format(sizes="--tensor-parallel-size 3 --enable-expert-parallel"), "a.sh", {}, recipes.vllm(tp=3)),
    (SERVE.format(sizes="-pp 3"), "a.sh", {}, recipes.vllm(pp=3)),
    (SERVE.format(sizes="-tp 2 --data-parallel-size=8 --data-parallel-size-local 4"), "a.sh", {},
     recipes.vllm(tp=2, dp=8)),
    (SERVE.format(sizes="--tensor_parallel_size 4"), "a.sh", {"world_size": 16}, recipes.vllm(16, tp=4)),
    (SGLANG.format(more="--enable-dp-attention"), "a.sh", {}, recipes.sglang(tp=8, ep=4, attn_dp=2)),
    (SGLANG.format(more=""), "a.sh", {}, recipes.sglang(tp=8, ep=4)),
    (PICOTRON, "config.json", {}, recipes.axes(rm.Mesh(tp=2, cp=2, pp=2, dp=2))),
    (BRIDGE.format(kind="pretrain", more=""), "a.sh", {}, recipes.megatron(32, tp=2, pp=4)),
    (BRIDGE.format(kind="sft", more="model.expert_model_parallel_size=4 model.expert_tensor_parallel_size=1"), "a.sh",
     {}, recipes.megatron(32, tp=2, pp=4, ep=4, etp=1)),
    (NEMO % "24", "gpt.yaml", {}, recipes.megatron(128, tp=4, pp=2, cp=2)),
    (NEMO % "'${multiply:${model.tensor_model_parallel_size}, 6}'", "gpt.yaml", {},
     recipes.megatron(128, tp=4, pp=2, cp=2)),
    (PRIMUS, "exp.yaml", {"world_size": 64}, recipes.megatron(64, tp=2, pp=4, ep=8)),
    (PRIMUS, "exp.yaml", {"world_size": 128, "variables": {"PRIMUS_TP": "4", "PRIMUS_PP": "2"}},
     recipes.megatron(128, tp=4, pp=2, ep=8)),
    (ACCELERATE, "one.yaml", {}, recipes.accelerate(1, dp_replicate=1, dp_shard=1)),
]  # fmt: skip
REFUSED = [
    (BRIDGE.format(kind="pretrain", more="model.expert_model_parallel_size=4"), "a.sh", 4,
     "--recipe = small_pretrain_config may set expert_tensor_parallel_size"),
    (HETERO, "train.yaml", 2, "each of its meshes has sizes of its own"),
    (LLAVA, "finetune.sh", 2, "the run has no argument of Megatron"),
    (PRIMUS.replace("${PRIMUS_TP:2}", "${PRIMUS_TP}"), "exp.yaml", 6, "--set PRIMUS_TP=2$"),
    (SERVE.format(sizes="--tensor-parallel-sizes 2"), "a.sh", 2, "did you mean '--tensor-parallel-size'"),
    (SERVE.format(sizes="--tensor-parallel-size $(nproc)"), "a.sh", 2, "run it"),
    ("#!/bin/bash\npython3 -m openrlhf.cli.train_ppo_ray --ds.tensor_parallel_size 2", "a.sh", None, "of OpenRLHF"),
    ("#!/bin/bash\ncolossalai run --nproc_per_node 8 train.py", "a.sh", None, "of ColossalAI"),
    ("distributed: {strategy: fsdp2, tp_size: 1, ep_size: 64}", "run.yaml", None, "of NeMo Automodel"),
    (ACCELERATE + "parallelism_config: {parallelism_config_tp_size: 2}\n", "one.yaml", 5, "NO starts one process"),
    (ACCELERATE, "one.yaml", 2, "distributed_type = NO makes a world of 1 ranks, but the world size is 16"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "path", "given", "plan"), READ)
def test_the_layout_of_the_run(text, path, given, plan):
    """The plan is that of the run."""
    assert read_config(text, path, **given).plan == plan


@pytest.mark.parametrize(("text", "path", "line", "why"), REFUSED)
def test_what_could_change_a_size_is_no_default(text, path, line, why):
    """A word that may change a size, and is not understood, is refused with its line."""
    with pytest.raises(PlanError, match=why) as caught:
        read_config(text, path, world_size=16)
    assert caught.value.values.get("line") == line


def test_the_file_that_deepspeed_is_given(tmp_path):
    """The layout of a run with --deepspeed is that of the file, beside the script; one that is missing is named."""
    script = tmp_path / "run.sh"
    script.write_text(LLAVA.replace("--output_dir", "--deepspeed ./zero3.json --output_dir"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"zero3\.json, which cannot be read") as caught:
        read_config(script.read_text(encoding="utf-8"), str(script), world_size=8)
    assert caught.value.line == 2
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}')
    config = read_config(script.read_text(encoding="utf-8"), str(script), world_size=8)
    assert config.plan == recipes.deepspeed(8, tp=2)


def test_files_that_may_set_sizes_are_named():
    """Recipes and files that are not read stand among the notes, with the count that has no effect."""
    assert any("some_moe.yaml" in text for _, text in read_config(PRIMUS, "exp.yaml", world_size=64).notes)
    bridge = read_config(BRIDGE.format(kind="sft", more=""), "a.sh")
    assert any("small_sft_config is not read" in text for _, text in bridge.notes)
    assert any("num_processes = 8 is not used" in text for _, text in read_config(ACCELERATE, "one.yaml").notes)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [("--expert-model-parallel-size 8 --expert-tensor-parallel-size 1", (4, 2, 1)),
     ("--expert-model-parallel-size 6 --expert-tensor-parallel-size 2", (2, 1))],
)  # fmt: skip
def test_experts_that_do_not_fit(sizes, fits):
    """The message names the sizes of ep that fit the world, the largest first."""
    text = SLIME.format(sizes=f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {sizes}")
    with pytest.raises(PlanError, match=f"set --expert-model-parallel-size {fits[0]}, which fits") as caught:
        read_config(text, "run.sh")
    assert caught.value.fits == fits
    for ep in fits:
        assert (
            read_config(text.replace(sizes[:30], f"--expert-model-parallel-size {ep}"), "run.sh").plan.world_size == 8
        )
