"""The commands with a training config as SPEC: the plan on stdout, the lines that were read on stderr and as data."""

import json
from pathlib import Path

import pytest

from rankmesh import PlanError
from rankmesh.readers.source import read

FILES = Path(__file__).parents[1] / "readers" / "files"
SCRIPT = str(FILES / "megatron.sh")


@pytest.mark.parametrize("arguments", [("show", SCRIPT), ("groups", SCRIPT, "tp"), ("explain", SCRIPT, 5)])
def test_the_lines_are_words_on_stderr_and_data_in_json(rankmesh, arguments):
    """Each planning command says what it read, and with --json has it under ``config``."""
    answer = str(read(SCRIPT).config) + "\n"
    assert f"{SCRIPT}:22: --tensor-model-parallel-size = 4 (tp, from line 10)" in answer
    plain, data = rankmesh(*arguments), rankmesh(*arguments, "--json")
    assert (plain.code, plain.err) == (0, answer)
    assert plain.out
    assert "read as" not in plain.out
    assert (data.code, data.err) == (0, answer)
    config = json.loads(data.out)["config"]
    assert (config["format"], config["path"]) == ("megatron", SCRIPT)
    assert config["notes"] == [{"line": line or None, "text": text} for line, text in read(SCRIPT).config.notes]
    line = {"line": 22, "key": "--tensor-model-parallel-size", "value": "4", "argument": "tp", "also": [10]}
    assert line in config["lines"]


def test_diff_names_both_files(rankmesh):
    """A config is compared with a recipe, and says its lines; data has each side's own."""
    same = "megatron:world=32,tp=4,pp=2,ep=4,etp=1"
    assert rankmesh("diff", SCRIPT, same).code == 0
    data = json.loads(rankmesh("diff", SCRIPT, FILES / "nanotron.yaml", "--json").out)
    assert data["left_config"]["format"] == "megatron"
    assert data["right_config"]["format"] == "nanotron"


@pytest.mark.parametrize(("rank", "responds"), [(None, True), ("0", True), ("3", False)])
def test_check_reads_configs_too_and_one_rank_speaks(rankmesh, monkeypatch, rank, responds):
    """``check`` proves the plan of a config; inside a job only rank 0 says what was read."""
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        for name, value in {"RANK": rank, "WORLD_SIZE": "8", "MASTER_ADDR": "node0"}.items():
            monkeypatch.setenv(name, value)
    verified = []

    def verify(plan, **_):
        verified.append(plan)
        raise PlanError("enough")

    monkeypatch.setattr("rankmesh.debug.verification.check.check", verify)
    result = rankmesh("check", FILES / "nanotron.yaml")
    assert verified == [read(str(FILES / "nanotron.yaml")).plan]
    assert ("read as a nanotron config" in result.err) is responds
