"""``rankmesh lint``: each finding with a small file, what is no finding, the files of folders, and the four formats."""

import json
import os
from itertools import product
from pathlib import Path

import pytest
import yaml
from tests.docs.pages import ROOT
from tests.readers.test_published import READ
from typer.testing import CliRunner

from rankmesh import PlanError
from rankmesh.cli.app import app
from rankmesh.core import recipes
from rankmesh.readers.tools.finding import CODES
from rankmesh.readers.tools.lint import lint_files, lint_text

RUN = "#!/bin/bash\n{before}\ntorchrun --nproc_per_node 8 {launcher} pretrain_gpt.py \\\n  {sizes}\n"


def script(sizes, before="", launcher=""):
    """A launch script of 8 ranks per node."""
    return RUN.format(before=before, launcher=launcher, sizes=sizes)


TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
FOUND = [
    ("a.sh", script(f"{TP} 3"), ("sizes", 4, "tp=2")),
    ("a.sh", script(f"{TP} 2 \\\n  {EP} 8 {PP} 2 --expert-tensor-parallel-size 1"), ("sizes", 5, "ep=4")),
    ("a.sh", script(f"{TP} 4 {EP} 8"), ("sizes", 4, "etp=1")),
    ("a.sh", script(f"{TP} 2 {TP} 4"), ("contradiction", 4, None)),
    ("a.sh", script(f"{TP} 2", "#SBATCH --nodes=4", "--nnodes 2"), ("nodes", 3, "--nnodes 4")),
    ("a.sh", script(f"{TP} 2", "#SBATCH --gres=gpu:4"), ("gpus", 3, "--nproc_per_node 4")),
    ("a.sh", script(f"{TP} $TP"), ("unset-variable", 4, None)),
    ("a.json", '{"train_batch_size": 64,\n"train_micro_batch_size_per_gpu": 3}',
     ("batch", 1, '"train_batch_size": 63')),
    ("a.sh", script(f"{TP} 2.5"), ("not-a-size", 4, None)),
    ("a.sh", script("--tensor-model-paralel-size 2 " + f"{PP} 2"), ("unknown-size", 4, TP)),
    # Megatron's own programs refuse underscores, which ms-swift and files of arguments take.
    ("a.sh", script("--tensor_model_parallel_size 2"), ("unknown-size", 4, TP)),
    ("a.sh", script(f"{TP} 8 --num-attention-heads 12"), ("heads", 4, "tp=4")),
    ("a.sh", script(f"{TP} 8 --num-attention-heads 48 --num-query-groups 6"), ("heads", 4, "tp=2")),
    ("a.sh", script(f"{EP} 8 --num-experts 60"), ("experts", 4, "ep=4")),
    ("a.sh", script(f"{PP} 8 --num-layers 60"), ("layers", 4, "pp=4")),
    ("a.yaml", "num_layers: 30\ntensor_model_parallel_size: 1\npipeline_model_parallel_size: 4\n",
     ("layers", 3, "pp=3")),
    ("a.yaml", "parallelism:\n  dp: 2\n  tp: 3\n  pp: 2\nmodel: {num_attention_heads: 8}\n", ("heads", 3, "tp=2")),
    ("a.toml", "[parallelism]\ntensor_parallel_degre = 2\npipeline_parallel_degree = 2\n",
     ("unknown-size", 2, "tensor_parallel_degree")),
]  # fmt: skip
UNEVEN = f"{PP} 8 --num-layers 60 --decoder-first-pipeline-num-layers 4"
SWIFT = "#!/bin/bash\nNPROC_PER_NODE=8 megatron sft "
CLEAN = [
    ("a.sh", script(f"{TP} 2 {PP} 2 --num-layers 4 --num-attention-heads 4")),
    ("a.sh", script(UNEVEN)),
    ("a.sh", script(f"{TP} 8 --num-attention-heads 64 --num-query-groups 4")),
    ("a.sh", script(f"{TP} 2", "#SBATCH --nodes=2", "--nnodes $SLURM_NNODES")),
    ("a.sh", script(f"{TP} 2", "#SBATCH --nodes=4", "--nnodes 2").replace("torchrun", "srun -N 2 torchrun")),
    ("a.sh", script(f"{TP} 2", "#SBATCH --gres=nvme:1")),
    ("a.sh", script(f"{TP} 2", "#SBATCH --gres=gpu:8,nvme:1")),
    ("a.sh", SWIFT + "--tensor_model_parallel_size 2\n"),
    # ms-swift's expert_tensor_parallel_size is 1 by default, where Megatron's is the tensor parallel size.
    ("a.sh", SWIFT + "--tensor_model_parallel_size 2 --expert_model_parallel_size 8\n"),
    ("a.sh", "#!/bin/bash\npip install torch # tensor parallel\n"),
    ("a.yaml", "model: {parallel: true}\n"),
    ("a.yaml", "{{ .Values.tp }}: : [\n"),
    ("a.json", '{"tp": 3}'),
]


SGLANG = "python -m sglang.launch_server --model-path"
VERL = "python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 "
VERL += "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"
# Commands with a size that the engine refuses for this model, or for its own other sizes.
WRONG = [
    ("vllm serve Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 8", ("heads", 2, "tp=4")),
    ("vllm serve --model openai/gpt-oss-20b -tp 24", ("heads", 2, "tp=16")),
    ("python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B -tp 6", ("heads", 2, "tp=4")),
    (f"{SGLANG} Qwen/Qwen3-8B --tp 24 --dp 4 --enable-dp-attention", ("heads", 2, "tp=16")),
    (f"{SGLANG} m --tp 8 --dp 3 --enable-dp-attention", ("sizes", 2, "attn_dp=2")),
    (f"{SGLANG} m --tp 8 --ep 3", ("sizes", 2, "ep=2")),
    (f"{SGLANG} openai/gpt-oss-20b --tp 64 --ep 64", ("experts", 2, "ep=32")),
    (f"{SGLANG} m --tp 8 --nnodes 3", ("nodes", 2, None)),
    (VERL, ("heads", 2, "sp=4")),
    # Another number of nodes than Slurm's.
    ("#SBATCH --nodes=4\ntorchrun --nnodes 2 a.py", ("nodes", 3, "--nnodes 4")),
    ("#SBATCH --nodes=4\naccelerate launch --num_machines 2 a.py", ("nodes", 3, "--num_machines 4")),
    ("#SBATCH --nodes=4\ndeepspeed --num_nodes 2 a.py", ("nodes", 3, "--num_nodes 4")),
    ("#SBATCH --nodes=4\nNNODES=2 NPROC_PER_NODE=8 llamafactory-cli train a.yaml", ("nodes", 3, "NNODES=4")),
    # The devices of CUDA_VISIBLE_DEVICES are the GPUs of a node.
    ("CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve m -tp 8", ("gpus", 2, "tp=4")),
    ("export CUDA_VISIBLE_DEVICES=0,1\nsglang serve --model-path m --tp 4", ("gpus", 3, "tp=2")),
    ("CUDA_VISIBLE_DEVICES=4,5 torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2",
     ("gpus", 2, "--nproc_per_node 2")),
]  # fmt: skip
ALLOWED = [
    "vllm serve Qwen/Qwen3-8B -tp 16",  # heads of keys are copied
    "vllm serve Qwen/Qwen3-8B -pp 5",  # stages may differ
    "vllm serve Qwen/Qwen3-30B-A3B -tp 4 -dp 3 --enable-expert-parallel",  # experts are in no size of its own
    f"{SGLANG} openai/gpt-oss-20b --tp 64 --ep 64 --ep-num-redundant-experts 32",
    f"{SGLANG} Qwen/Qwen2.5-7B --tp 8 --dp 2 --enable-dp-attention",
    "vllm serve org/merged-Qwen2.5-7B-x -tp 8",  # not known
    f"{SGLANG} m --config sizes.yaml --nnodes 2",
    "CUDA_VISIBLE_DEVICES=$1 vllm serve m -tp 8",  # a list that is not known is none
    "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve m -tp 8",
    # A file that is not there and a world size that only the machine has leave the layout open.
    "accelerate launch --config_file none.yaml train.py",
    "accelerate launch train.py",
    "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file none.toml",
    "./run_train.sh --parallelism.tensor_parallel_degree=3",
    "docker pull vllm/vllm-openai:v1",
]
FOUND += [("a.sh", f"#!/bin/bash\n{command}\n", expected) for command, expected in WRONG]
CLEAN += [("a.sh", f"#!/bin/bash\n{command}\n") for command in ALLOWED]
CLEAN += [(path.name, path.read_text()) for path in sorted((ROOT / "tests" / "readers" / "files").iterdir())]


def codes(text, name="a.sh"):
    """The findings of a text, without their words."""
    return [(found.code, found.line, found.fix) for found in lint_text(text, name).findings]


@pytest.mark.parametrize(("name", "text", "expected"), FOUND)
def test_each_finding_has_its_code_line_and_fix(name, text, expected):
    """A small file with one mistake has one finding, at its line, with a fix where there is one."""
    assert codes(text, name) == [expected]


def test_each_code_has_an_example():
    """The examples above have every code."""
    assert {expected[0] for *_, expected in FOUND} == set(CODES)


@pytest.mark.parametrize(("name", "text"), CLEAN)
def test_no_finding_and_no_note(name, text):
    """A layout that runs, and a file that states none, have neither findings nor notes."""
    assert lint_text(text, name) == lint_text("", name)


def test_what_only_a_run_decides_is_a_note():
    """A size that a branch sets is a note, which names `show --run`."""
    found = lint_text(script(f"{TP} $TP", "if true; then TP=2; fi"), "a.sh")
    assert (found.findings, len(found.notes)) == ((), 1)
    assert "show --run a.sh" in found.notes[0]


@pytest.mark.parametrize(("text", "name"), [(text, name) for text, name, *_ in READ])
def test_published_files_have_no_finding(text, name):
    """Files of public repositories that are read have no findings."""
    assert lint_text(text, name).findings == ()


def test_sizes_are_refused_exactly_where_megatron_has_no_plan():
    """Of all small sizes, those without a plan have a finding, whose fix makes a plan."""
    for tp, pp, ep in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 8)):
        arguments = {"tp": tp, "pp": pp, "ep": ep, "etp": 1}
        try:
            recipes.megatron(8, **arguments)
            fits = True
        except PlanError:
            fits = False
        found = codes(script(f"{TP} {tp} {PP} {pp} {EP} {ep} --expert-tensor-parallel-size 1"))
        assert [code for code, *_ in found] == ([] if fits else ["sizes"])
        for _, _, fix in found:
            if fix is not None:
                name, value = fix.split("=")
                recipes.megatron(8, **{**arguments, name: int(value)})


@pytest.mark.parametrize(
    ("comment", "left"),
    [("# rankmesh: ignore[heads]", 0), ("# rankmesh: ignore", 0), ("#rankmesh: ignore[layers, heads]", 0),
     ("# rankmesh: ignore[layers]", 1), ("# rankmesh: ignored", 1)],
)  # fmt: skip
def test_comments_ignore_codes(comment, left):
    """A comment after a line is of that line, one on a line of its own of the file."""
    text = "tensor_model_parallel_size: 3{}\nnum_attention_heads: 32{}\n"
    assert len(codes(text.format(f"  {comment}", ""), "a.yaml")) == left
    assert len(codes(f"{comment}\n" + text.format("", ""), "a.yaml")) == left
    assert len(codes(text.format("", f"  {comment}"), "a.yaml")) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one finding, and with what is not checked."""
    bad = script(f"{TP} 3")
    for name in ("bad.sh", ".git/bad.sh", ".venv/bad.sh", "sub/launch", "page.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(bad)
    (tmp_path / "sub" / "README").write_text("tensor parallel (of 8\n")
    (tmp_path / "sub" / "model.json").write_bytes(b"\0parallel")
    (tmp_path / "large.sh").write_text(bad + "#" * (1 << 20))
    (tmp_path / "sub" / "again").symlink_to(tmp_path)
    (tmp_path / "sub" / "again.sh").symlink_to(tmp_path / "bad.sh")
    os.mkfifo(tmp_path / "pipe.sh")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(*arguments):
    """Run the command in this process."""
    return CliRunner().invoke(app, ["lint", *arguments], prog_name="rankmesh")


def test_a_folder_is_walked_once(folder):
    """Links, hidden folders, pages, large and binary files are left out; a script without an ending is not."""
    found = lint_files([".", "bad.sh"])
    assert [Path(each.file) for each in found.findings] == [Path("bad.sh"), Path("sub/launch")]
    assert found.notes == ()


def test_a_named_file_that_is_not_read_is_a_note(folder):
    """Files that are named, and are not text, are large or are pipes, have a note each."""
    assert [len(lint_files([name]).notes) for name in ("large.sh", "sub/model.json", "pipe.sh")] == [1, 1, 1]


def test_exit_status(folder):
    """0 without findings, 1 with them, 2 for a path that does not exist and a format that is unknown."""
    words = (["page.md", "sub/README"], ["bad.sh"], ["none"], ["."], ["sub/README"], [".", "--format", "xml"])
    assert [lint(*each).exit_code for each in words] == [1, 1, 2, 1, 0, 2]


def test_formats(folder):
    """Text has a line for each finding; JSON, SARIF and workflow commands have its parts."""
    assert lint("bad.sh").stdout.startswith("bad.sh:4: sizes ")
    assert lint("bad.sh", "--format", "github").stdout.startswith("::error file=bad.sh,line=4,title=rankmesh sizes::")
    (row,) = json.loads(lint("bad.sh", "--json").stdout)
    assert list(row) == ["file", "line", "code", "message", "fix", "layout", "edit"]
    assert (row["file"], row["line"], row["code"], row["fix"], row["layout"]) == ("bad.sh", 4, "sizes", "tp=2", None)
    sarif = json.loads(lint("bad.sh", "--format", "sarif").stdout)
    assert (sarif["version"], sarif["runs"][0]["tool"]["driver"]["name"]) == ("2.1.0", "rankmesh")
    (result,) = sarif["runs"][0]["results"]
    assert result["ruleId"] == "sizes"
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "bad.sh"},
        "region": {"startLine": 4},
    }


def test_formats_without_findings(folder):
    """JSON and SARIF are documents, text and workflow commands are empty."""
    outputs = [lint("sub/README", "--format", form).stdout for form in ("text", "github", "json", "sarif")]
    assert (outputs[:2], json.loads(outputs[2]), json.loads(outputs[3])["runs"][0]["results"]) == (["", ""], [], [])


def test_layout_of_a_finding_is_a_spec():
    """Where the file has a plan that its model does not fit, the finding has it as a SPEC."""
    (found,) = lint_text(script(f"{TP} 8 --num-attention-heads 12"), "a.sh").findings
    assert found.layout == "megatron:world=8,tp=8"


def test_a_huge_size_is_refused_soon():
    """Numbers that no cluster has do not make lint count down from them."""
    text = "tensor_model_parallel_size: 999999937\nnum_attention_heads: 999999929\n"
    assert [code for code, *_ in codes(text, "a.yaml")] in ([], ["heads"])


def test_the_hook_and_the_action_start_the_command():
    """The files at the root are YAML, and run `rankmesh lint`."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert hook["entry"] == "rankmesh lint"
    assert "rankmesh lint" in action["runs"]["steps"][-1]["run"]
