import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from rankmesh import Plan
from rankmesh.readers.source import read


def test_a_saved_plan_is_a_spec(rankmesh, tmp_path) -> None:
    """--save writes the plan that every command reads: same digest, same groups."""
    path = tmp_path / "plan.json"
    ran = rankmesh("show", "megatron:world=16,tp=2,pp=2,ep=2", "--save", path)
    assert (ran.code, ran.err) == (0, f"wrote {path}\n")
    assert read(path).plan == read("megatron:world=16,tp=2,pp=2,ep=2").plan
    assert rankmesh("diff", path, "megatron:world=16,tp=2,pp=2,ep=2").code == 0


def test_a_dash_is_stdout_alone(rankmesh) -> None:
    """With -, the picture, the page or the plan is all that stdout holds."""
    assert ET.fromstring(rankmesh("show", "tp=2,dp=2", "--svg", "-").out).tag.endswith("svg")  # noqa: S314  - ours
    for command in ("show", "explore"):
        assert rankmesh(command, "tp=2,dp=2", "--html", "-").out.startswith("<!doctype html>")
    assert Plan.from_json(rankmesh("show", "tp=2,dp=2", "--save", "-").out) == read("tp=2,dp=2").plan


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(("--svg", "x.png"), "x.svg"), (("--html", "x.svg"), "x.html"), (("--save", "x.yaml"), "x.json")],
)
def test_a_name_of_another_kind_is_refused(rankmesh, tmp_path, monkeypatch, arguments, remedy) -> None:
    """A picture is no PNG because its file is called so: nothing is written, the right name is said."""
    monkeypatch.chdir(tmp_path)
    ran = rankmesh("show", "tp=2", *arguments)
    assert ran.code == 2
    assert ran.err.rstrip().endswith(f"name the file {remedy}")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_without_lines(process) -> None:
    """Where the encoding has no lines and dots, a question mark stands for each; the help is printed, too."""
    ran = process("explain", "tp=2,dp=2", "3", PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    assert "  3 = 0 + tp 1?1 + dp 1?2\n" in ran.out
    assert process("show", "--help", PYTHONIOENCODING="ascii").code == 0


@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["show tp=2", "groups tp=2,dp=100000 tp", "show tp=2 --svg /dev/full"])
def test_a_full_disk_is_an_error(arguments: str) -> None:
    """A disk that takes no more is one line and wrong usage, not a defect, and no complaint of the interpreter."""
    with open("/dev/full", "w") as full:  # noqa: PTH123  - a device
        command = [sys.executable, "-m", "rankmesh", *arguments.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "defect" not in done.stderr
    assert "Exception" not in done.stderr


def test_variables_of_a_script(rankmesh, tmp_path) -> None:
    """--set gives a launch script its environment; words that are no variable, and other SPECs, are refused."""
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size $TP\n")
    ran = rankmesh("groups", script, "tp", "--set", "TP=2", "--rank", 7)
    assert ran.out == "3: [6, 7]\n"
    assert "a Megatron launch script with TP=2" in ran.err
    assert rankmesh("explain", script, 0, "--set", "TP=4").code == 0
    assert rankmesh("show", script).code == 3
    assert "write NAME=VALUE" in rankmesh("show", script, "--set", "TP").err
