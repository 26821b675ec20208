"""What a notebook shows of values in the last line of a cell, and one notebook, executed."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rankmesh as rm
from rankmesh.core.notebook import ROWS

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "layouts.ipynb"


class Tables(HTMLParser):
    """The cells of every table, row by row; tags that are not closed are an error."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        """A table, a row or a cell begins."""
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        """What ends is what began last."""
        assert self._open.pop() == tag

    def handle_data(self, data):
        """Text belongs to the last cell."""
        if self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def tables(value):
    """The tables that a notebook shows of a value."""
    return Tables(value._repr_html_()).tables


def transfer(size):
    """Weights that are cut by rows, to be cut by columns."""
    mesh = rm.Mesh(tp=size, dp=2)
    sides = [rm.Sharding(mesh, cut, shape=(8 * size, 8 * size)) for cut in (("tp", None), (None, "tp"))]
    return rm.Transfer(*({"<up>": side} for side in sides))


def test_a_small_mesh_is_drawn():
    """Sizes and strides of each layout, and every rank in its place, by the formula and the rank map."""
    mesh = rm.Mesh(tp=2, cp=2, dp=2, rank_map=[1, 0, 2, 3, 4, 5, 6, 7]).with_view("expert", ep=8)
    sizes, drawn = tables(mesh)
    assert sizes[1:] == [["mesh", "tp", "2", "1"], ["mesh", "cp", "2", "2"], ["mesh", "dp", "2", "4"],
                         ["expert", "ep", "8", "1"]]  # fmt: skip
    assert drawn[0][:3] == ["", "tp=0 cp=0 dp=0", "tp=1 cp=0 dp=0"]
    assert drawn[1] == ["", "1", "0", "2", "3", "4", "5", "6", "7"]
    _, wide = tables(rm.Mesh(tp=4, dp=3, offset=4))
    assert wide[1:] == [["dp=0", "4", "5", "6", "7"], ["dp=1", "8", "9", "10", "11"], ["dp=2", "12", "13", "14", "15"]]
    assert len(tables(rm.Mesh(tp=8, dp=64))) == 1


def test_a_plan_is_a_table_of_its_kinds():
    """One row a kind, with its first group; the title has twelve digits of the digest."""
    plan = rm.read("tp=2,dp=4")
    (kinds,) = tables(plan)
    assert kinds == [["group", "axes", "view", "groups", "size", "first group"],
                     ["tp", "tp", "", "4", "2", "[0, 1]"], ["dp", "dp", "", "2", "4", "[0, 2, 4, 6]"]]  # fmt: skip
    assert f"digest {plan.digest[:12]}<" in plan._repr_html_()


@pytest.mark.parametrize(
    "make",
    [
        lambda size: rm.Mesh(tp=8, dp=size // 8),
        lambda size: rm.recipes.megatron(world_size=size, tp=8, pp=2, ep=4),
        lambda size: rm.Cluster.parse("host=8,leaf=*", world_size=size),
        lambda size: rm.place(rm.read(f"dp={size // 8},tp=8"), rm.Cluster.parse(f"host=8,leaf={size // 8}")),
        lambda size: transfer(size // 128),
    ],
)
def test_large_worlds_are_small_in_a_notebook(make):
    """Of 16,384 ranks there is no more to see than of 2,048, and it is valid HTML."""
    less, more = make(2048)._repr_html_(), make(16384)._repr_html_()
    assert Tables(less).tables
    assert max(map(len, Tables(more).tables)) <= ROWS + 2
    assert len(more) < 1.3 * len(less) < 8_000


def test_names_are_text():
    """A tensor's name that looks like a tag is shown, not obeyed."""
    assert "&lt;up&gt;" in transfer(2)._repr_html_()
    assert tables(transfer(2))[0][1] == ["<up>", "1", "16/tp x 16 on tp=2,dp=2", "16 x 16/tp on tp=2,dp=2"]


def test_reprs_fit_a_line():
    """Costs have three digits, a digest twelve, and no rank map is listed."""
    cluster = rm.Cluster.parse("host=8,leaf=4")
    placed = rm.place(rm.read("dp=4,tp=8"), cluster, within={"tp": "host"})
    assert repr(cluster) == "Cluster(32 devices, 4 hosts of 8, levels host leaf)"
    before, after = r"\d[\d.]{0,3} [mµ]?s before", r"\d[\d.]{0,3} [mµ]?s after"
    pattern = rf"Placed\(tp-dp, 32 ranks, {before}, {after}, digest {placed.plan.digest[:12]}\)"
    assert re.fullmatch(pattern, repr(placed)), repr(placed)
    assert re.fullmatch(r"KindCost\(tp: [\d.]+ ms within host, before [\d.]+ ms within leaf\)", repr(placed.kinds[1]))


def test_words_are_shown_as_they_are():
    """explain and report are strings whose lines a notebook shows as lines, without quotes."""
    plan = rm.read("tp=2,dp=2")
    output = plan.explain(3)
    assert isinstance(output, str)
    assert repr(output) == str(output) == "\n".join(output.splitlines())
    assert repr(output).startswith("rank 3 of 4: tp=1, dp=1\n")
    assert output + "" == output
    assert repr(rm.place(plan, rm.Cluster.parse("host=4")).report()).count("\n") > 2


def test_live_groups_are_a_table():
    """The groups of this rank and what they share; of closed ones that they are closed. The report is readable, too."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        with rm.connect("tp=2,dp=4") as groups:
            ((head, *rows),) = tables(groups)
            assert head[:4] == ["group", "size", "position", "communicator"]
            assert [row[:2] + row[-1:] for row in rows] == [["tp", "2", "[2, 3]"], ["dp", "4", "[1, 3, 5, 7]"]]
            report = groups.report()
            assert repr(report) == str(report)
            assert f"plan {groups.plan.digest[:12]}," in repr(report)
        assert "closed" in groups._repr_html_()
    finally:
        dist.destroy_process_group()


def test_the_notebook_runs(tmp_path):
    """Every cell of the example runs in a kernel, and ends in a table or in lines of text; saved outputs are none."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in cells)
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1]["data"] for cell in cells]
    assert all("<table>" in data.get("text/html", "") or "\n" in data["text/plain"] for data in shown)
    assert shown[0]["text/plain"] == "Mesh(tp=2, cp=2, dp=2, pp=2)"
    assert shown[2]["text/plain"].startswith("rank 13 of 64: ")
