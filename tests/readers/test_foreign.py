# ruff: noqa: E501
"""Files of other systems: read by what only each has, with their parents, or refused with what was looked for."""

import pytest

from rankmesh import PlanError
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
    with pytest.raises(PlanError, match="does not state the world size"):
        read_config(NEOX.format(sign), "125M.yml")


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


@pytest.mark.parametrize(
    "text",
    [
        "base_model: x\ngradient_accumulation_steps: 4\nmicro_batch_size: 1\nsequence_parallel_size: 1\n",
        "stage: sft\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\ndeepspeed: ds_z3.json\n",
        "tensor_parallel: 4\nmodel: x\n",
        "tensor_parallel:\n  size: 4\nmodel: x\n",
        "train_batch_size: 32\nlearning_rate: 0.1\ntensor_parallel: 4\n",
        "base_model: x\nfsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD\n",
        "model: x\nparallelism:\n  tp: 4\n",
    ],
)
def test_one_shared_key_makes_no_config(text):
    """Files of axolotl, LLaMA-Factory, Transformers and others are refused with the formats that are read."""
    with pytest.raises(PlanError, match="no key of a training config; a config is a Megatron launch script"):
        read_config(text, "run.yaml", world_size=8)
