from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from rankmesh.core import Mesh
from rankmesh.errors import UnknownGroup
from rankmesh.readers.source import read
from rankmesh.viz import grid, picture
from rankmesh.viz.sheet import colours, sheet

MESHES = [
    *(Mesh(dp=1), Mesh(dp=7), Mesh(dp=20), Mesh(tp=1, dp=4), Mesh(tp=2, dp=3), Mesh(tp=2, cp=2, dp=2, pp=2)),
    *(Mesh(tp=16, pp=3), Mesh(tp=4, dp=3, pp=2, ep=2)),
    *(Mesh(tp=2, dp=2, offset=5), Mesh(tp=2, dp=2, rank_map=(3, 1, 0, 2))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("width", [1, 4, 8])
def test_every_rank_is_drawn_once_in_the_order_of_positions(mesh: Mesh, width: int) -> None:
    """The cells, block by block and row by row, are the ranks in the order of their positions."""
    drawn = sheet(mesh, width=width)
    cells = [rank for block in drawn.blocks for row in block.rows for rank in row.ranks]
    assert cells == [mesh.rank_range.rank(position) for position in range(mesh.size)]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_the_text_picture_holds_every_rank(mesh: Mesh) -> None:
    """Each rank is a word of the text, under labels that are its coordinate."""
    message = [token for line in grid(mesh).splitlines() for token in line.split() if token.isdigit()]
    assert sorted(map(int, message)) == list(range(mesh.offset, mesh.offset + mesh.size))


def test_labels_are_coordinates() -> None:
    """Column, row and block labels together are the coordinate of the rank."""
    mesh = Mesh(tp=2, cp=2, dp=3, pp=2)
    drawn = sheet(mesh, width=4)
    for block in drawn.blocks:
        for row in block.rows:
            for column, rank in enumerate(row.ranks):
                labels = [header[column] for header in drawn.headers] + [row.label, block.label]
                assert dict(label.split("=") for label in labels) == {
                    axis: str(position) for axis, position in mesh.coordinate(rank).items()
                }


def _cells(text: str) -> list[tuple[str, str, str | None]]:
    """The rank, the colour and the group of every cell of a picture."""
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(text)  # noqa: S314  - our own text
    found = []
    for cell in root.iter(f"{space}g"):
        if cell.get("class") == "cell":
            message = [text.text or "" for text in cell.findall(f"{space}text")]
            found.append((message[0], cell[1].get("fill", ""), message[1] if len(message) > 1 else None))
    return found


def test_groups_have_colours_of_their_own() -> None:
    """Cells of one group have one colour, cells of two groups two; ranks in no group are white."""
    plan = read("tp=2,dp=2,pp=4").plan
    cells = _cells(picture(plan, ["embd"], gpus_per_node=8))
    assert [int(rank) for rank, _, _ in cells] == list(range(16))
    for rank, fill, group in cells:
        if plan.groups("embd").has(int(rank)):
            assert group == f"g{plan.groups('embd').index_of(int(rank))}"
        else:
            assert (fill, group) == ("#ffffff", None)
    assert len({fill for _, fill, group in cells if group}) == len(plan.groups("embd"))


def test_nodes_are_outlined() -> None:
    """Heavy lines separate nodes, and only nodes: two nodes of one row share an inner side."""
    one, two = (picture(read("tp=8").plan, gpus_per_node=size) for size in (8, 4))
    assert one.count("v36") == 2
    assert two.count("v36") == 4


@pytest.mark.parametrize("count", [12, 36, 128])
def test_colours_differ(count: int) -> None:
    """Many groups still have a colour each."""
    assert len(set(colours(count))) == count


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mesh", "part", "message"),
    [
        (Mesh(tp=8, pp=16, dp=128), Mesh(tp=8, pp=16, dp=1), "dp=0 of 128"),
        (Mesh(tp=8, dp=128, pp=16), [tp + 1024 * pp for pp in range(16) for tp in range(8)], "dp=0 of 128"),
        (Mesh(dp=513), Mesh(dp=64), "dp=0 to 63 of 513"),
        (Mesh(tp=2, dp=1024), Mesh(tp=2, dp=32), "dp=0 to 31 of 1024"),
        (Mesh(tp=600, dp=600), Mesh(tp=64), "tp=0 to 63 of 600, dp=0 of 600"),
        (Mesh(tp=8, dp=64), Mesh(tp=8, dp=64), ""),
    ],
)
def test_what_repeats_is_drawn_once(mesh, part, message) -> None:
    """Of a large mesh the largest axes are cut to what is enough to see; its groups keep their numbers and colours."""
    ranks = list(range(part.size)) if isinstance(part, Mesh) else part
    plan = read(str(mesh)).plan
    for kind in list(plan.kinds)[:2]:
        text = picture(plan, [kind], gpus_per_node=8)
        assert (f"are drawn ({message})" in text) == bool(message)
        cells = _cells(text)
        assert [int(rank) for rank, _, _ in cells] == ranks
        groups = plan.groups(kind)
        assert all(group == f"g{groups.index_of(int(rank))}" for rank, _, group in cells)
        for one, other in combinations(cells[:40], 2):
            assert (one[1] == other[1]) == (one[2] == other[2])


def test_what_cannot_be_pictured_is_refused() -> None:
    """A kind that the plan does not have is an error with its rule."""
    with pytest.raises(UnknownGroup):
        picture(read("dp=4").plan, ["tp"])
