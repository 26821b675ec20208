"""What a notebook shows of values in the last line of a cell, and one notebook, executed."""

import re
from pathlib import Path

import pytest

import rankmesh as rm

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "layouts.ipynb"


def test_reprs_fit_a_line():
    """Costs have three digits, a digest twelve, and no rank map is listed."""
    cluster = rm.Cluster.parse("host=8,leaf=4")
    placed = rm.place(rm.read("dp=4,tp=8"), cluster, within={"tp": "host"})
    assert repr(cluster) == "Cluster(32 devices, 4 hosts of 8, levels host leaf)"
    before, after = r"\d[\d.]{0,3} [mµ]?s before", r"\d[\d.]{0,3} [mµ]?s after"
    pattern = rf"Placed\(tp-dp, 32 ranks, {before}, {after}, digest {placed.plan.digest[:12]}\)"
    assert re.fullmatch(pattern, repr(placed)), repr(placed)
    assert re.fullmatch(
        r"KindCost\(tp: [\d.]+ [mµ]?s within host, before [\d.]+ [mµ]?s within leaf\)", repr(placed.kinds[1])
    )


def test_words_are_shown_as_they_are():
    """explain and report are strings whose lines a notebook shows as lines, without quotes."""
    plan = rm.read("tp=2,dp=2")
    output = plan.explain(3)
    assert isinstance(output, str)
    assert repr(output) == str(output) == "\n".join(output.splitlines())
    assert repr(output).startswith("rank 3 of 4: tp=1, dp=1\n")
    assert output + "" == output
    assert repr(rm.place(plan, rm.Cluster.parse("host=4")).report()).count("\n") > 2


def test_the_notebook_runs(tmp_path):
    """Every cell of the example runs in a kernel, and shows a line or several; saved outputs are none."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in cells)
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1]["data"] for cell in cells]
    assert shown[0]["text/plain"] == "Mesh(tp=2, cp=2, dp=2, pp=2)"
    assert shown[2]["text/plain"].startswith("rank 13 of 64: ")
