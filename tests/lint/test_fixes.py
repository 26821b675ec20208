"""Every finding of a file at once, and fixes that are tried, in the words of the file."""

import json
import re

import pytest
from tests.lint.test_lint import FOUND

from rankmesh import PlanError
from rankmesh.readers import read_config
from rankmesh.readers.tools.lint import lint_text

GLM = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 46, "hidden_size": 4096,
       "num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 128}  # fmt: skip
SMALL = """\
#!/bin/bash
export NNODES=4
export NPROC_PER_NODE=8
megatron sft --load . --tensor_model_parallel_size 8 \\
    --pipeline_model_parallel_size 4 \\
    --expert_tensor_parallel_size 1 \\
    --expert_model_parallel_size 16
"""
SHARDS = """\
distributed_type: FSDP
num_machines: 2
num_processes: 8
fsdp_config: {fsdp_version: 2}
parallelism_config:
  parallelism_config_dp_shard_size: 4
"""
VERL = """\
#!/bin/bash
python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=8
"""
NEMO = """\
policy:
  model_name: Qwen/Qwen2.5-1.5B
  megatron_cfg: {enabled: false}
  dtensor_cfg:
    enabled: true
    tensor_parallel_size: 8
  generation:
    vllm_cfg:
      tensor_parallel_size: 8
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
TITAN = "[parallelism]\ndata_parallel_shard_degree = 8\ntensor_parallel_degree = 2\n"
SWIFT = """\
#!/bin/bash
NPROC_PER_NODE=8 megatron rlhf --model Qwen/Qwen2.5-7B-Instruct --tensor_model_parallel_size 4 \\
  --vllm_tensor_parallel_size 8
"""
PATHS = "tensor_model_parallel_size: x\npipeline_model_parallel_size: 2.5\nnum_layers: 46\n"
PATHS += "expert_model_parallel_size: 3\nnum_experts: 8\n"
FEW = "#!/bin/bash\n#SBATCH --gres=gpu:4\nsrun torchrun --nproc_per_node 8 pretrain_gpt.py {}\n"
FEW = FEW.format("--tensor-model-parallel-size 8")


def found(text, name="run.sh"):
    """The findings of a text, without their messages."""
    return [(each.code, each.line, each.edit or each.fix) for each in lint_text(text, str(name)).findings]


def test_sizes_do_not_hide_layers(tmp_path):
    """Sizes that do not fit the world, and stages that do not divide the layers, are both found."""
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    assert found(SMALL, tmp_path / "small.sh") == [
        ("sizes", 7, "--expert_model_parallel_size 8"),
        ("layers", 5, "--pipeline_model_parallel_size 2"),
    ]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (VERL, "run.sh", [("heads", 4, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"),
                          ("heads", 5, "actor_rollout_ref.rollout.tensor_model_parallel_size=4")]),
        (NEMO, "run.yaml", [("heads", 6, "tensor_parallel_size: 4"), ("heads", 9, "tensor_parallel_size: 4")]),
        (SWIFT, "run.sh", [("heads", 3, "--vllm_tensor_parallel_size 4")]),
        (PATHS, "run.yaml", [("not-a-size", 2, None), ("experts", 4, "expert_model_parallel_size: 2")]),
        # Fewer ranks on a node are not proposed where the sizes would not fit them.
        (FEW, "run.sh", [("gpus", 3, None)]),
    ],
)  # fmt: skip
def test_all_findings_of_a_file(text, name, expected):
    """The trainer does not hide the engine of rollouts, and a size that is no number does not hide the others."""
    assert found(text, name) == expected


@pytest.mark.parametrize(
    ("text", "name", "edit"),
    [
        (SHARDS, "a.yaml", "parallelism_config_dp_replicate_size: 2"),
        (TITAN, "a.toml", "data_parallel_shard_degree=4"),
        ("base_model: m\ndatasets: []\ndp_shard_size: 3\n", "a.yaml", "dp_shard_size: 8"),
        ('{"distributed": {"tp_size": 2, "dp_size": 3, "pp_engine": "1f1b"}}', "a.json", '"dp_size": 4'),
        ("#!/bin/bash\ntorchrun --nproc_per_node 8 -m torchtitan.train --parallelism.data_parallel_shard_degree 4\n",
         "a.sh", "--parallelism.data_parallel_replicate_degree 2"),
    ],
)  # fmt: skip
def test_the_error_of_sizes_proposes_what_the_file_has_keys_for(text, name, edit):
    """`show` names a setting of the file's own with which it is read, and keeps the sizes that fit."""
    with pytest.raises(PlanError, match=f"; set {re.escape(edit)}, which fits") as caught:
        read_config(text, name, world_size=None if name == "a.sh" else 8)
    assert "leave dp out" not in str(caught.value)
    assert read_config(applied(text, edit, caught.value.readings[-1].line), name, world_size=8).plan.world_size == 8


def applied(text, edit, line):
    """A text with an edit: the value of the key is replaced, or the setting is added after the line."""
    key, sign, value = re.fullmatch(r'("?[\w.-]+"?)(: | |=)(\S+)', edit).groups()
    lines = text.splitlines(keepends=True)
    pattern = re.compile(rf"((?<![\w.-]){re.escape(key)}[\s:=]+)[^\s,}}]+")
    for number in sorted(range(len(lines)), key=lambda number: number + 1 != line):
        if pattern.search(lines[number]):
            lines[number] = pattern.sub(lambda match: match[1] + value, lines[number], count=1)
            return "".join(lines)
    indent = re.match(r"\s*", lines[line - 1])[0]
    more = f"{indent}{edit}\n" if sign != " " else None
    if more:
        return "".join([*lines[:line], more, *lines[line:]])
    lines[line - 1] = lines[line - 1].replace("\n", f" {edit}\n").replace(f"\\ {edit}", f"{edit} \\")
    return "".join(lines)


HEADS = "vllm serve Qwen/Qwen2.5-7B-Instruct -tp {}\n"
MORE = [
    ("serve.sh", "#!/bin/bash\n" + HEADS.format(8)), ("serve.sh", "#!/bin/bash\n" + HEADS.format(7)),
    ("run.yaml", SHARDS), ("run.sh", VERL), ("run.yaml", NEMO), ("run.sh", SWIFT), ("run.yaml", PATHS), ("run.sh", FEW),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in FOUND] + MORE)
def test_a_fix_is_accepted(name, text):
    """After the fixes of all findings, in the order in which they are printed, none of them is found again."""
    before = lint_text(text, name).findings
    fixed = [each for each in before if each.edit or (each.fix and each.code in ("nodes", "gpus"))]
    for each in fixed:
        text = applied(text, each.edit or each.fix, each.line)
    left = [(each.code, each.line) for each in lint_text(text, name).findings]
    assert left == [(each.code, each.line) for each in before if each not in fixed]


def test_explain():
    """A layout without a finding is shown to be valid: the ranks, and what experts span."""
    text = "#!/bin/bash\ntorchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --tensor-model-parallel-size 2 \\\n"
    text += "  --pipeline-model-parallel-size 2 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1\n"
    ranks, experts, unknown = lint_text(text, "run.sh").valid
    assert ranks == "run.sh: ranks = tp 2 x cp 1 x dp 16 x pp 2 = 64"
    assert experts.startswith("run.sh: expert: etp 1 x ep 16 x edp 2 x pp 2 = 64; ep 16 spans tp·dp: allowed, since ")
    assert experts.endswith("etp x ep x edp = tp x cp x dp = 32")
    assert unknown == "run.sh: the numbers of heads, experts, layers of the model are not known, and not checked"
    assert lint_text(text.replace("8 --nnodes 8", "8"), "run.sh").valid == ()
