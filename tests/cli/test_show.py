import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from rankmesh.readers.source import read
from rankmesh.viz import overview

SPEC = "megatron:world=16,tp=2,cp=2,pp=2,ep=2"


def test_shown_states_each_kind_once_in_plan_order() -> None:
    """The overview gives plain facts: name, axes, count, size, pattern and first groups."""
    tp, cp, dp, pp, dp_cp, embd = overview(read("tp=2,cp=2,dp=2,pp=2")).kinds
    assert (tp.count, tp.size, tp.stride, tp.examples[:2]) == (8, 2, "2x1", ((0, 1), (2, 3)))
    assert (dp_cp.axes, dp_cp.count, dp_cp.size, dp_cp.stride) == (("dp", "cp"), 4, 4, "4x2")
    assert (embd.part, str(embd.communicator), embd.examples[0]) == ("ends", "shares pp", (0, 8))
    assert [cp.name, dp.name, pp.name] == ["cp", "dp", "pp"]


def test_members_limits_the_ranks_listed(rankmesh) -> None:
    """--members K lists K ranks of a group; an axis is data, too."""
    data = json.loads(rankmesh("show", "dp=16", "--members", 3, "--json").out)
    assert data["kinds"][0]["examples"] == [[0, 1, 2]]
    assert data["layouts"][0]["axes"] == [{"name": "dp", "size": 16, "stride": 1, "shared": False}]


def test_gpus_per_node_counts_crossings(rankmesh) -> None:
    """With --gpus-per-node each kind says how many groups cross, how many nodes, how many hops."""
    data = json.loads(rankmesh("show", "tp=2,dp=8", "--gpus-per-node", 4, "--json").out)
    tp, dp = (kind["crossings"] for kind in data["kinds"])
    assert tp == {"groups": 8, "crossing": 0, "nodes": 1, "hops": 0}
    assert dp == {"groups": 2, "crossing": 2, "nodes": 4, "hops": 4}


def test_a_preset_brings_its_title_source_and_node_size(rankmesh) -> None:
    """A preset's header says what it is and where it was published, and its nodes are known; others have none."""
    ran = rankmesh("show", "llama3-405b")
    assert "Llama 3 405B" in ran.out
    assert "source: The Llama 3 Herd of Models" in ran.out
    assert "16,384 ranks, 2,048 nodes of 8" in ran.out
    assert "cross nodes" in ran.out
    assert "cross nodes" not in rankmesh("show", "tp=2,dp=2").out


def test_a_large_mesh_is_not_drawn(rankmesh) -> None:
    """More than 64 ranks have no places; docs/concepts.md, which is compared, has the whole text of 32 ranks."""
    assert "pp=1" not in rankmesh("show", "tp=2,dp=32,pp=2").out


def test_groups_keeps_these_kinds(rankmesh) -> None:
    """--groups keeps rows, comma-separated or repeated; communicators stay those of the plan."""
    data = json.loads(rankmesh("show", SPEC, "--groups", "tp,pp", "--groups", "ep", "--json").out)
    assert [kind["name"] for kind in data["kinds"]] == ["tp", "pp", "ep"]
    assert data["communicators_total"] == 53


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("spec", [SPEC, "llama3-405b", "mixtral-8x22b-128k"])
def test_lines_fit_the_terminal(rankmesh, monkeypatch: pytest.MonkeyPatch, width: int, spec: str) -> None:
    """No line is wider than the terminal, and no number is cut in two."""
    monkeypatch.setenv("COLUMNS", str(width))
    ran = rankmesh("show", spec, "-g", 8)
    assert max(map(len, ran.out.splitlines())) <= width
    assert not re.search(r"\d…", ran.out)


def test_svg_and_html_are_written_and_announced_on_stderr(rankmesh, tmp_path: Path) -> None:
    """--svg and --html write files; stdout stays the data."""
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    ran = rankmesh("show", SPEC, "--svg", svg, "--html", html, "--groups", "tp,pp", "--json")
    assert (ran.code, ran.err) == (0, f"wrote {svg}\nwrote {html}\n")
    json.loads(ran.out)
    assert len(ET.parse(svg).getroot().findall(".//*[@class='kind']")) == 2  # noqa: S314  - our own file
    assert f'"spec": "{SPEC}"' in html.read_text(encoding="utf-8")
