"""The commands with a training config as SPEC: the plan on stdout, the lines that were read on stderr and as data."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankmesh import PlanError
from rankmesh.cli.app import app
from rankmesh.readers.source import read

FILES = Path(__file__).with_name("files")
SCRIPT = str(FILES / "megatron.sh")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """A terminal of 100 columns without colours."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "RANKMESH_DEBUG", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments):
    """The result of one command in this process."""
    return CliRunner().invoke(app, [str(token) for token in arguments], prog_name="rankmesh")


@pytest.mark.parametrize("arguments", [("show", SCRIPT), ("groups", SCRIPT, "tp"), ("explain", SCRIPT, 5)])
def test_the_lines_are_words_on_stderr_and_data_in_json(arguments):
    """Each planning command says what it read, and with --json has it under ``config``."""
    answer = str(read(SCRIPT).config) + "\n"
    assert f"{SCRIPT}:22: --tensor-model-parallel-size = 4 (tp, from line 10)" in answer
    plain, data = run(*arguments), run(*arguments, "--json")
    assert (plain.exit_code, plain.stderr) == (0, answer)
    assert plain.stdout
    assert "read as" not in plain.stdout
    assert (data.exit_code, data.stderr) == (0, answer)
    config = json.loads(data.stdout)["config"]
    assert (config["format"], config["path"]) == ("megatron", SCRIPT)
    line = {"line": 22, "key": "--tensor-model-parallel-size", "value": "4", "argument": "tp", "also": [10]}
    assert line in config["lines"]


def test_diff_names_both_files():
    """A config is compared with a recipe, and says its lines; data has each side's own."""
    same = "megatron:world=32,tp=4,pp=2,ep=4,etp=1"
    assert run("diff", SCRIPT, same).exit_code == 0
    data = json.loads(run("diff", SCRIPT, FILES / "nanotron.yaml", "--json").stdout)
    assert data["left_config"]["format"] == "megatron"
    assert data["right_config"]["format"] == "nanotron"


@pytest.mark.parametrize(("rank", "responds"), [(None, True), ("0", True), ("3", False)])
def test_check_reads_configs_too_and_one_rank_speaks(monkeypatch, rank, responds):
    """``check`` proves the plan of a config; inside a job only rank 0 says what was read."""
    if rank is not None:
        for name, value in {"RANK": rank, "WORLD_SIZE": "8", "MASTER_ADDR": "node0"}.items():
            monkeypatch.setenv(name, value)
    verified = []

    def verify(plan, **_):
        verified.append(plan)
        raise PlanError("enough")

    monkeypatch.setattr("rankmesh.debug.verification.check.check", verify)
    result = run("check", FILES / "nanotron.yaml")
    assert verified == [read(str(FILES / "nanotron.yaml")).plan]
    assert ("read as a nanotron config" in result.stderr) is responds


def test_a_refused_config_is_one_line_and_exit_3(tmp_path):
    """File, line, rule and remedy on one line of stderr; nothing on stdout."""
    path = tmp_path / "run.sh"
    path.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP\n")
    result = run("show", path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert result.stderr.startswith(f"error: {path}:1: --tensor-model-parallel-size = $TP; ")
