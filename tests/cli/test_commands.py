import json

import pytest

from rankmesh.cli.look.groups import kind_groups
from rankmesh.cli.look.presets import preset_row
from rankmesh.core import presets
from rankmesh.core.difference import difference
from rankmesh.errors import NotAMember
from rankmesh.readers.source import read


def test_groups_json_is_the_whole_kind(rankmesh) -> None:
    """JSON says what the kind is and lists every group."""
    data = json.loads(rankmesh("groups", "megatron:world=8,tp=2,ep=2,etp=1", "ep", "--json").out)
    assert data == {
        "name": "ep", "axes": ["ep"], "view": "expert", "count": 4, "size": 2, "first": 0,
        "groups": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }  # fmt: skip


def test_groups_of_one_rank(rankmesh) -> None:
    """--rank lists the one group that the rank is in, under its number."""
    assert rankmesh("groups", "tp=2,dp=2", "dp", "--rank", 3).out == "1: [1, 3]\n"
    assert kind_groups(read("tp=2,pp=3"), "pp", rank=3)["groups"] == [[1, 3, 5]]
    with pytest.raises(NotAMember):
        kind_groups(read("pp=3"), "embd", rank=1)


def test_explain_is_the_plans_own_words(rankmesh) -> None:
    """Text and JSON are those of Plan.explain and Plan.describe."""
    plan = read("mixtral-8x7b").plan
    assert rankmesh("explain", "mixtral-8x7b", 5).out == plan.explain(5) + "\n"
    assert json.loads(rankmesh("explain", "mixtral-8x7b", 5, "--json").out) == json.loads(json.dumps(plan.describe(5)))


def test_diff_of_equal_layouts_exits_with_0(rankmesh) -> None:
    """Equal layouts: exit 0, the equal kinds on stdout, the verdict on stderr."""
    ran = rankmesh("diff", "tp=2,dp=4", "tp=2,dp=*", "--world-size", 8)
    assert (ran.code, ran.out) == (0, "equal: tp, dp\n")
    assert ran.err.startswith("the same")


def test_diff_lists_axes_and_ranks(rankmesh) -> None:
    """Different layouts: exit 1, each axis and the first ranks that see another group."""
    ran = rankmesh("diff", "tp=2,dp=4", "dp=4,tp=2")
    assert (ran.code, ran.err) == (1, "")
    assert "tp    2, stride 1  2, stride 4" in ran.out
    assert "[0, 2, 4, 6]  [0, 1, 2, 3]" in ran.out


def test_diff_sets_variables_of_each_side(rankmesh, tmp_path) -> None:
    """--set is for both launch scripts, --set-left and --set-right for one; the same script differs by them alone."""
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nproc-per-node $GPUS pretrain_gpt.py --tensor-model-parallel-size $TP\n")
    arguments = ("diff", script, script, "--set", "GPUS=8")
    assert rankmesh(*arguments, "--set", "TP=2").code == 0
    ran = rankmesh(*arguments, "--set-left", "TP=2", "--set-right", "TP=4")
    assert ran.code == 1
    assert "2, stride 1  4, stride 1" in ran.out


def test_diff_as_json(rankmesh) -> None:
    """JSON says whether they differ, and everything that does."""
    ran = rankmesh("diff", "megatron:world=8,tp=2", "megatron:world=8,tp=4,timeout=60", "--json", "-n", 1)
    data = json.loads(ran.out)
    assert ran.code == 1
    tp = next(kind for kind in data["groups"] if kind["name"] == "tp")
    assert (tp["ranks"], tp["examples"]) == (8, [{"rank": 0, "left": [0, 1], "right": [0, 1, 2, 3]}])
    assert {"kind": "tp", "option": "timeout", "left": None, "right": 60.0} in data["options"]


def test_diff_names_kinds_of_one_side() -> None:
    """A kind that one side lacks is named, with its twin of another name on the other side."""
    found = difference(read("nanotron:world=8,tp=2").plan, read("three_d:world=8,tp=2").plan)
    only = {kind.name: kind.same_as for kind in found.only_left}
    assert only["dp_cp"] == ("dp",)
    assert found.only_right == ()


def test_presets_lists_every_preset(rankmesh) -> None:
    """The table and the JSON have a row for each preset, with its world."""
    data = json.loads(rankmesh("presets", "--json").out)
    assert [row["name"] for row in data] == list(presets.PRESETS)
    assert [row["world_size"] for row in data] == [preset_row(name)["world_size"] for name in presets.PRESETS]
    ran = rankmesh("presets")
    assert all(f"\n{name} " in f"\n{ran.out}" for name in presets.PRESETS)


def test_one_preset_in_detail(rankmesh) -> None:
    """A name gives the sizes and the world; docs/command_line.md, which is compared, has the text."""
    row = preset_row("deepseek-v3")
    assert (row["world_size"], row["sizes"]) == (2048, "tp=1,cp=1,dp=128,pp=16/expert:etp=1,ep=64,edp=2,pp=16")
    assert json.loads(rankmesh("presets", "deepseek-v3", "--json").out) == row
