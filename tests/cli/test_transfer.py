"""``rankmesh transfer``: bytes by rank and by level, the least possible, as text, JSON and a picture."""

import json
from importlib.metadata import EntryPoints

import pytest

from rankmesh.cli.shell import ExitCode
from rankmesh.readers.models import CONFIGS
from rankmesh.transfer.layouts import sides

TENSORS = {
    "up": {"shape": [64, 16], "dtype": "bfloat16", "source": {"cut": ["tp", None], "at": {"pp": 1}},
           "target": {"cut": [None, "tp"]}},
    "norm": {"shape": [16], "source": {"at": {"pp": [0, 1]}}, "target": {}},
    "table": {"shape": [100, 16], "source": {"cut": ["tp", None], "padded": {"0": 128}},
              "target": {"parts": {"0": [60, 40]}}},
}  # fmt: skip


@pytest.fixture
def tensors(tmp_path):
    """A tensors file."""
    path = tmp_path / "tensors.json"
    path.write_text(json.dumps(TENSORS))
    return path


def test_bytes_are_counted(rankmesh, tensors):
    """Apart: what moves is all of the target, the least possible, and the levels add up to it."""
    ran = rankmesh("transfer", "tp=4,dp=2,pp=2", "tp=2,dp=4", "--tensors", tensors, "--offset", 16, "--json")
    result = json.loads(ran.out)
    assert ran.code == ExitCode.OK
    assert result["bytes"] == result["lower_bound"] == 4 * 2048 + 8 * (64 + 6400)
    assert sum(result["levels"].values()) == result["bytes"]
    assert result["busiest"]["in"][1] == 1024 + 64 + 6400
    rank, sent = result["busiest"]["out"]
    assert result["ranks"]["out"][rank] == sent == max(result["ranks"]["out"])
    assert len(result["digest"]) == 64


def test_levels_and_links_of_a_cluster(rankmesh, tensors):
    """With a cluster: bytes over each level, its busiest unit, seconds; the same digest on every call."""
    arguments = ("transfer", "tp=4,dp=2,pp=2", "tp=2,dp=4", "--tensors", tensors, "--cluster", "host=4,leaf=4")
    one, other = rankmesh(*arguments, "--json"), rankmesh(*arguments)
    result = json.loads(one.out)
    assert list(result["levels"]) == ["host", "leaf"]
    assert sum(result["levels"].values()) == result["bytes"]
    assert result["seconds"] > 0
    assert result["links"][0]["level"] == "leaf"
    assert result["digest"] in other.out
    assert "the least possible is" in other.out


REFUSED = [
    ({}, "no tensor is named"),
    ({"a": {"source": {}}}, "'a' has no shape"),
    ({"a": {"shape": [4], "form": 1}}, "'a' has the key 'form'"),
    ({"a": {"shape": [4], "source": {"cuts": []}}}, "has the key 'cuts', none of cut, at"),
    ({"a": {"shape": [4], "source": {"cut": ["tpp"]}}}, "'a', source: unknown axis 'tpp'"),
    ({"a": {"shape": [4], "source": ["tp"]}}, "not an object with cut"),
]


@pytest.mark.parametrize(("document", "arguments"), REFUSED)
def test_a_file_that_says_nothing_is_refused(rankmesh, tmp_path, document, arguments):
    """One line that names the tensor and what is wrong with it."""
    path = tmp_path / "tensors.json"
    path.write_text(json.dumps(document))
    ran = rankmesh("transfer", "tp=2", "tp=2", "--tensors", path)
    assert (ran.code, ran.out) == (ExitCode.BAD_SPEC, "")
    assert arguments in ran.err


def test_a_file_that_cannot_be_read(rankmesh, tmp_path):
    """An absent file and one that is no JSON are told; YAML is read."""
    assert "cannot be read" in rankmesh("transfer", "tp=2", "tp=2", "--tensors", tmp_path / "no.json").err
    (tmp_path / "bad.json").write_text("{")
    assert "is neither valid JSON" in rankmesh("transfer", "tp=2", "tp=2", "--tensors", tmp_path / "bad.json").err
    (tmp_path / "good.yaml").write_text("up: {shape: [8, 4], source: {cut: [tp, null]}, target: {}}")
    ran = rankmesh("transfer", "tp=2", "dp=2", "--tensors", tmp_path / "good.yaml", "--json")
    assert json.loads(ran.out)["bytes"] == 128


FROM, TO = "megatron:tp=4,pp=2", "vllm:tp=8"


@pytest.fixture
def without_frameworks(monkeypatch):
    """No package offers a side."""
    monkeypatch.setattr(sides, "entry_points", lambda group: EntryPoints(()))


def test_what_moves_between_two_frameworks(rankmesh, without_frameworks):
    """llama3-8b from Megatron tp=4, pp=2 to vLLM tp=8 on the same GPUs: by hand, each rank lacks 7/8 of its eighth."""
    ran = rankmesh("transfer", "--model", "llama3-8b", FROM, TO, "--json")
    result = json.loads(ran.out)
    assert (ran.code, result["tensors"], result["left_out"]) == (ExitCode.OK, 291, {})
    equal = {one["names"]: one for one in result["equal"]}
    assert len(equal) == 12
    up = equal["model.layers.{0..31}.mlp.up_proj.weight"]
    assert (up["tensors"], up["shape"], up["bytes"]) == (32, [14336, 4096], 32 * 14336 * 4096 * 2)
    # Rank r of vLLM has eighth r; it has it of a stage already where it is in quarter r % 4: r // 2 == r % 4, r // 4.
    kept = sum(r // 2 == r % 4 for r in range(8)) * 16
    assert up["moved"] == (32 * 8 - kept) * 14336 // 8 * 4096 * 2
    assert result["bytes"] == result["lower_bound"] == sum(one["moved"] for one in equal.values())
    apart = json.loads(rankmesh("transfer", "--model", "llama3-8b", FROM, TO, "--offset", 8, "--json").out)
    norms = 65 * 4096 * 2
    assert apart["bytes"] == sum(one["bytes"] for one in equal.values()) + 7 * norms


def test_equal_layers_are_one_line(rankmesh, without_frameworks):
    """The text has a pattern for each kind of tensor; experts are in it, too."""
    shown = rankmesh("transfer", "-m", "qwen3-30b-a3b", "megatron:tp=2,ep=2,dp=2,pp=2", "vllm:tp=8", "--ranks", 1).out
    assert "model.layers.{0..47}.mlp.experts.{0..127}.up_proj.weight" in shown
    assert len(shown.splitlines()) < 50


@pytest.mark.long
def test_layouts_in_files_are_sides(rankmesh, without_frameworks, tmp_path):
    """What ``rankmesh layout --json`` prints is a source or a target, with views and split axes: the same moves."""
    files = []
    for side in ("megatron:tp=2,pp=2,ep=2,dp=2", "sglang:tp=8,dp=2,ep=2"):
        ran = rankmesh("layout", "qwen3-30b-a3b", "--side", side, "--json")
        assert ran.err.startswith("note: from rankmesh's own table")
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(ran.out, encoding="utf-8")
    one = json.loads(rankmesh("transfer", *files, "--json").out)
    sides_given = ("megatron:tp=2,pp=2,ep=2,dp=2", "sglang:tp=8,dp=2,ep=2")
    assert one == json.loads(rankmesh("transfer", "-m", "qwen3-30b-a3b", *sides_given, "--json").out)
    assert one == json.loads(rankmesh("transfer", "-m", "qwen3-30b-a3b", files[0], sides_given[1], "--json").out)
    files[0].write_text('{"side": "toy"}', encoding="utf-8")
    ran = rankmesh("transfer", *files)
    assert (ran.code, "has no 'meshes'" in ran.err) == (ExitCode.BAD_SPEC, True)


def test_what_only_one_side_has_is_left_out_by_name(rankmesh, without_frameworks, tmp_path):
    """Heads that Megatron cuts, and the output of a model whose tables are tied on one side."""
    config = dict(CONFIGS["llama3-8b"], num_key_value_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = rankmesh("transfer", "--model", tmp_path, FROM, TO)
    assert "left out: model.layers.{0..31}.self_attn.k_proj.weight: megatron: 4 ranks of tp cut across" in ran.out
    assert len(json.loads(rankmesh("transfer", "--model", tmp_path, FROM, TO, "--json").out)["left_out"]) == 3 * 32


def test_what_is_missing_to_plan_is_named(rankmesh, without_frameworks):
    """No tensors; sizes that do not fit; a model or a side that nobody knows."""
    ran = rankmesh("transfer", FROM, TO)
    assert (ran.code, "add --model llama3-8b" in ran.err) == (ExitCode.BAD_SPEC, True)
    ran = rankmesh("transfer", "-m", "llama3-8b", "megatron:tp=3", TO)
    assert (ran.code, "tp=3 does not divide the 32 heads" in ran.err) == (ExitCode.BAD_SPEC, True)
    ran = rankmesh("transfer", "-m", "llama3-8b", "megatron:pp=5", TO)
    assert (ran.code, "pp=5 does not divide the 32 layers" in ran.err) == (ExitCode.BAD_SPEC, True)
    assert "plans up to" in rankmesh("transfer", "-m", "llama3-8b", "vllm:dp=9000000", TO).err
    ran = rankmesh("transfer", "-m", "gpt-oss-20b", FROM, TO)
    assert (ran.code, "is known for llama, mistral" in ran.err) == (ExitCode.USAGE, True)
