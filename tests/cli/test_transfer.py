"""``rankmesh transfer``: bytes by rank and by level, the least possible, as text, JSON and a picture."""

import json

import pytest

from rankmesh.cli.shell import ExitCode

TENSORS = {
    "up": {
        "shape": [64, 16],
        "dtype": "bfloat16",
        "source": {"cut": ["tp", None], "at": {"pp": 1}},
        "target": {"cut": [None, "tp"]},
    },
    "norm": {"shape": [16], "source": {"at": {"pp": [0, 1]}}, "target": {}},
    "table": {
        "shape": [100, 16],
        "source": {"cut": ["tp", None], "padded": {"0": 128}},
        "target": {"parts": {"0": [60, 40]}},
    },
}


@pytest.fixture
def tensors(tmp_path):
    """A tensors file."""
    path = tmp_path / "tensors.json"
    path.write_text(json.dumps(TENSORS))
    return path


def test_json_has_the_documented_keys(rankmesh, tensors):
    """Apart: what moves is all of the target, the least possible, and the levels add up to it."""
    ran = rankmesh("transfer", "tp=4,dp=2,pp=2", "tp=2,dp=4", "--tensors", tensors, "--offset", 16, "--json")
    result = json.loads(ran.out)
    assert ran.code == ExitCode.OK
    assert {"bytes", "lower_bound", "levels", "busiest", "digest"} <= result.keys()
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
