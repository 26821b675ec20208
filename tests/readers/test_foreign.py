# ruff: noqa: E501
"""Files of other systems: read by what only each has, with their parents, or refused with what was looked for."""

import pytest

from rankmesh import Mesh, PlanError
from rankmesh.core import recipes
from rankmesh.readers import read_config, source

NEOX = "pipe{0}parallel{0}size: 2\nmodel{0}parallel{0}size: 2\nzero_optimization:\n  stage: 1\ntrain_micro_batch_size_per_gpu: 4\n"
PARENT = """\
policy:
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
  generation: {vllm_cfg: {tensor_parallel_size: 8}}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
CHILD = """\
defaults: ../base.yaml
teacher:
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 8}
policy:
  megatron_cfg:
    tensor_model_parallel_size: 4
cluster:
  num_nodes: 2
"""


@pytest.mark.parametrize("sign", ["-", "_"])
def test_gpt_neox(sign):
    """Hyphens and underscores are one; the model axis is adjacent, then data, then pipe."""
    config = read_config(NEOX.format(sign), "125M.yml", world_size=8)
    assert (config.format, dict(config.plan.mesh.axes)) == ("gpt_neox", {"tp": 2, "dp": 2, "pp": 2})
    assert config.plan.of(0).get("pp").ranks == (0, 4)


def test_a_policy_with_its_parent(tmp_path):
    """NeMo-RL: values of the parent count where the file says none; the policy's sizes, the cluster's ranks."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "base.yaml").write_text(PARENT)
    (tmp_path / "recipes" / "run.yaml").write_text(CHILD)
    found = source.read(tmp_path / "recipes" / "run.yaml")
    assert (found.config.format, found.plan.world_size) == ("nemo_rl", 16)
    assert {name: size for name, size in found.plan.mesh.axes.items() if size > 1} == {"tp": 4, "dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("files", "output"),
    [
        ({"run.yaml": "defaults: none.yaml\n" + PARENT}, "needs its parent .*none.yaml.* cannot be read"),
        ({"run.yaml": "defaults: run.yaml\n" + PARENT}, "a file that names it"),
        ({"run.yaml": "defaults: /etc/base.yaml\n" + PARENT}, "an absolute path"),
        ({"run.yaml": "defaults: [model: llama]\n" + PARENT}, "needs its parent .*model/llama.yaml"),
        ({"run.yaml": "defaults: [[1]]\n" + PARENT}, "names a parent that is not known"),
        ({"run.yaml": "defaults: b\n" + PARENT, "b.yaml": "defaults: run\na: 1\n"}, "a file that names it"),
    ],
)
def test_parents_that_cannot_be_read(tmp_path, files, output):
    """A parent that is missing, absolute, or the file itself is named: without it the layout is not known."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=output):
        source.read(tmp_path / "run.yaml")


def test_groups_of_hydra(tmp_path):
    """A group stands below its key, what comes later counts, and _self_ says when the file itself comes."""
    (tmp_path / "parallelism").mkdir()
    (tmp_path / "parallelism" / "small.yaml").write_text("tp: 2\ndp: 2\npp: 1\n")
    (tmp_path / "run.yaml").write_text("defaults:\n- _self_\n- parallelism: small\nparallelism:\n  tp: 8\n  dp: 1\n")
    assert source.read(tmp_path / "run.yaml").plan.mesh.axes["tp"] == 2
    (tmp_path / "run.yaml").write_text("defaults:\n- parallelism: small\nparallelism:\n  tp: 8\n")
    assert source.read(tmp_path / "run.yaml").plan.world_size == 16


# Of axolotl, LLaMA-Factory, Transformers, vLLM and others.
ONE_SHARED_KEY = [
    "base_model: x\ngradient_accumulation_steps: 4\nmicro_batch_size: 1\nsequence_parallel_size: 1\n",
    "stage: sft\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\ndeepspeed: ds_z3.json\n",
    "tensor_parallel: 4\nmodel: x\n",
    "tensor_parallel:\n  size: 4\nmodel: x\n",
    "train_batch_size: 32\nlearning_rate: 0.1\ntensor_parallel: 4\n",
    "base_model: x\nfsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD\n",
    "model: x\nparallelism:\n  tp: 4\n",
    "tensor_model_parallel_size: 2\ngpu_memory_utilization: 0.5\n",  # of vLLM, named as Megatron's
]


AXOLOTL = "base_model: x\ndatasets: []\nfsdp_version: 2\n"


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ("dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n",
         {"dp_shard": 4, "dp_replicate": 2, "tp": 2}),
        ("dp_shard_size: 2\ncontext_parallel_size: 2\n", {"dp_shard": 2, "cp": 2, "dp_replicate": 4}),
        ("context_parallel_size: 8\n", {"dp_shard": 2, "cp": 8}),
        ("tensor_parallel_size: 2\ndp_shard_size: 1\n", {"dp_shard": 8, "tp": 2}),
        ("dp_shard_size: 1\n", {"dp_shard": 16}),
    ],
)  # fmt: skip
def test_axolotl(sizes, plan):
    """Shards are what is left of the world where no number of them stands, and copies what shards leave."""
    config = read_config(AXOLOTL + sizes, "run.yaml", world_size=16)
    assert (config.format, config.plan) == ("axolotl", recipes.accelerate(16, **plan))


VERL = """\
actor_rollout_ref:
  actor:
    strategy: %s
    ulysses_sequence_parallel_size: 2
    fsdp_config: {fsdp_size: %d}
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, expert_tensor_parallel_size: null}
  ref:
    megatron: {tensor_model_parallel_size: "${oc.select:actor_rollout_ref.actor.megatron.tensor_model_parallel_size,1}"}
  rollout: {tensor_model_parallel_size: 8}
critic:
  megatron: {tensor_model_parallel_size: 4}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""


def test_verl():
    """The actor's engine has the layout; the sizes of rollouts, the reference and the critic are not its own."""
    config = read_config(VERL % ("megatron", -1), "run.yaml")
    assert (config.format, config.plan) == ("verl", recipes.megatron(16, tp=2, pp=2))
    for shards in (-1, 16, 8):
        mesh = read_config(VERL % ("fsdp2", shards), "run.yaml").plan.mesh
        assert mesh.axes == {"sp": 2, "dp": 8}
        assert mesh.views["weights"].axes["fsdp"] == (8 if shards == 8 else 16)


# A setting that a branch may add.
BRANCH = """\
if x; then MORE=(%s); fi
python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 \
 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 ${MORE[@]}
"""
NODES = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
NODES += "trainer.nnodes= trainer.n_gpus_per_node=8"
COMMANDS = [
    (("python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml trainer.nnodes=2 "
     "trainer.n_gpus_per_node=8 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
     "actor_rollout_ref.rollout.tensor_model_parallel_size=8 +critic.megatron.tensor_model_parallel_size=2"),
     recipes.megatron(16, tp=4)),
    (("torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron engine.tensor_model_parallel_size=2 "
     "engine.pipeline_model_parallel_size=2"), recipes.megatron(8, tp=2, pp=2)),
    ("NPROC_PER_NODE=4 NNODES=2 megatron sft --tensor_model_parallel_size 2 --vllm_tensor_parallel_size 4",
     recipes.megatron(8, tp=2)),
    ("msrun --worker_num 8 pretrain_gpt.py --tensor-model-parallel-size 2", recipes.megatron(8, tp=2)),
    ("ray job submit -- python3 train.py --tensor-model-parallel-size 2 --world-size 8 --sglang-dp-size 4",
     recipes.megatron(8, tp=2)),
    ("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 1 --ds-sequence-parallel-size 4",
     recipes.deepspeed(8, sp=4, dp=2)),
    ("torchrun --nproc_per_node 8 pretrain_gpt.py --pipeline-model-parallel-size 1 --moe-expert-parallel-size 4",
     recipes.deepspeed(8, ep=4)),
    (BRANCH % "actor_rollout_ref.rollout.tensor_model_parallel_size=4", recipes.megatron(8, pp=2)),
]  # fmt: skip


def test_packages_and_references_of_hydra(tmp_path):
    """A group stands below its package, a list of groups is each of them, and a reference is the value it names."""
    for name, text in {
        "actor/mcore.yaml": "strategy: megatron\nmegatron: {tensor_model_parallel_size: 4}\n",
        "a/x.yaml": "tp: 2\n",
        "a/y.yaml": "dp: 2\npp: ${a.tp}\n",
        "run.yaml": "defaults:\n- actor@actor_rollout_ref.actor: mcore\n- critic@critic: null\n- _self_\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 8}\n",
        "list.yaml": "defaults:\n- a@parallelism: [x, y]\na: {tp: 4}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert source.read(tmp_path / "run.yaml").plan == recipes.megatron(8, tp=4)
    assert source.read(tmp_path / "list.yaml").plan.mesh.axes == {"tp": 2, "cp": 1, "dp": 2, "pp": 4, "ep": 1}


AUTOMODEL = "policy: {dtensor_cfg: {enabled: true, %s}}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n"


NEMO = """\
trainer: {devices: 8, num_nodes: %s}
model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: %s, width: 64}
"""


def nemo(nodes, stages):
    """A config of NeMo's trainer."""
    return NEMO % (f"'{nodes}'", f"'{stages}'")


OF_TWO, OF_FOUR = recipes.megatron(16, tp=4, pp=2), recipes.megatron(32, tp=4, pp=2)
READ = [
    *((command, "run.sh", {}, plan) for command, plan in COMMANDS),
    # Experts have an axis where they are alone.
    (AXOLOTL + "expert_parallel_size: 8\n", "run.yaml", {"world_size": 8}, recipes.axes(Mesh(ep=8))),
    # verl's nodes are a variable of the cluster.
    (NODES, "run.sh", {"world_size": 16}, recipes.megatron(16, tp=2)),
    # Expert groups are adjacent ranks of the shards, where nothing else cuts them.
    (AUTOMODEL % "dp_replicate_size: 2", "run.yaml", {}, recipes.torchtitan(8, dp_replicate=2)),
    (AUTOMODEL % "expert_parallel_size: 4", "run.yaml", {}, recipes.torchtitan(8, ep=4)),
    # Nodes times devices are the world; values in terms of others, of the environment, and products of them.
    (nemo("2", "2"), "gpt.yaml", {}, OF_TWO),
    (nemo("${oc.env:NODES,2}", "2"), "gpt.yaml", {}, OF_TWO),
    (nemo("${oc.env:NODES,2}", "2"), "gpt.yaml", {"variables": {"NODES": "4"}}, OF_FOUR),
    (nemo("${trainer.devices}", "${oc.select:model.stages,null}"), "gpt.yaml", {}, recipes.megatron(64, tp=4)),
    (nemo("2", "${mul:1,${oc.env:PP}}"), "gpt.yaml", {"variables": {"PP": "2"}}, OF_TWO),
    (nemo("${multiply:${model.pipeline_model_parallel_size},2}", "2"), "gpt.yaml", {}, OF_FOUR),
]


@pytest.mark.parametrize(("text", "name", "given", "plan"), READ)
def test_other_systems(text, name, given, plan):
    """verl, ms-swift, MindSpore's launcher, slime, DeepSpeed's own axes, NeMo-RL and NeMo."""
    assert read_config(text, name, **given).plan == plan


WORLD, NO_SIZE = "does not state the world size, .*give --world-size", "a parallel size is a whole number"
MEGATRON = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 "
REFUSED = [
    *((text, "run.yaml", {"world_size": 8}, "no key of a training config") for text in ONE_SHARED_KEY),
    (NEOX.format("-"), "125M.yml", {}, WORLD),
    (NODES, "run.sh", {}, WORLD),
    (AXOLOTL + "expert_parallel_size: 2\ndp_shard_size: 2\n", "run.yaml", {"world_size": 8},
     r"run\.yaml:4: expert_parallel_size = 2; no recipe has an expert axis beside"),
    *((BRANCH % setting, "run.sh", {}, "run.sh:1: .*MORE is set in a branch, loop or function .*; run it: rankmesh show")
      for setting in ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
                      "+actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "trainer.nnodes=2")),
    (VERL % ("fsdp", 3), "run.yaml", {}, "fsdp_size 3 does not divide the world size 16"),
    (MEGATRON + "--ds-sequence-parallel-size 4", "run.sh", {},
     "beside another of the sizes --tensor-model-parallel-size = 2, --ds-seq"),
    (AUTOMODEL % "expert_parallel_size: 4, tensor_parallel_size: 2", "run.yaml", {},
     "expert_parallel_size beside tensor or context parallelism"),
    (nemo("-1", "2"), "gpt.yaml", {}, WORLD),
    (nemo("${oc.env:NODES}", "2"), "gpt.yaml", {}, WORLD),
    (nemo("2", "${oc.env:PP}"), "gpt.yaml", {},
     r"the environment of the job gives it; give the variable a value: --set PP=2$"),
    (nemo("2", "${model.pipeline_model_parallel_size}"), "gpt.yaml", {}, NO_SIZE),
    (nemo("2", "${eval:1+1}"), "gpt.yaml", {}, NO_SIZE),
    (nemo("2", "2"), "gpt.yaml", {"variables": {"PP": "4"}},
     r"variables \(PP\) are set for a file that is not a script and does not name them"),
    ("apiVersion: batch/v1\nkind: Job\nspec: {parallelism: 2}\n", "job.yaml", {"world_size": 8},
     r"a manifest of kind Job; rankmesh lint job\.yaml"),
    # Each of 30 values is twice the one before.
    ("".join(f"a{i}: '${{a{i + 1}}}${{a{i + 1}}}'\n" for i in range(30)) +
     "a30: 1\ntensor_model_parallel_size: '${a0}'\n", "gpt.yaml", {"world_size": 8}, NO_SIZE),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "given", "message"), REFUSED)
def test_what_is_not_known_is_refused(text, name, given, message):
    """Sizes that lead nowhere, or that no recipe has, and files of other systems are refused, never guessed."""
    with pytest.raises(PlanError, match=message):
        read_config(text, name, **given)
