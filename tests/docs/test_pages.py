"""What the README and the documentation say is what happens."""

import re

import pytest
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.running import Reader, same

from rankmesh.readers.recording.record import sandbox_kind

DRAWINGS = ROOT / "docs" / "images"
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    """No colours, whatever runs the tests."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "RANKMESH_DEBUG", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


# make test-all follows every page.
FIRST = ("README", "concepts")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page.stem in FIRST else pytest.mark.long) for page in PAGES], ids=_name
)
def test_a_page_is_right(page, ranks, tmp_path, monkeypatch):
    """Every example, command and drawing of a page, followed in its order, gives what the page shows."""
    if page.stem == "configs" and sandbox_kind() == "none":
        pytest.skip("this machine allows no sandbox, in which a script of this page runs")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, ranks)
    wrong = [line for block in blocks(page.read_text(encoding="utf-8")) for line in reader.follow(block)]
    assert not wrong, "\n".join(wrong)
    for drawing in tmp_path.glob("*.svg"):
        assert drawing.read_bytes() == (DRAWINGS / drawing.name).read_bytes(), f"{drawing.name} is old"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_block_is_left_out(page):
    """Every block of a page is followed, or says why not, or which test runs it, and that test reads this page."""
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.kind != "unknown", f"line {block.line}: {block.language or 'no language'}: run it, or mark it"
        if block.run_by:
            source = (ROOT / block.run_by).read_text(encoding="utf-8")
            assert page.stem in source, f"line {block.line}: {block.run_by} does not speak of {page.stem}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_of_a_page_lead_to_files(page):
    """Every relative link and picture of a page is a file of the repository, where pages are read, too."""
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        target = link[0] or link[1]
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), target


def test_a_wrong_page_is_noticed(tmp_path):
    """The checks can fail: a wrong result, a wrong output, a wrong status, and a block that nothing runs."""
    reader = Reader(tmp_path)
    assert reader.follow(Block("python", ">>> 1 + 1\n3\n", 1))
    assert reader.follow(Block("console", "$ echo one\ntwo\n", 1))
    assert reader.follow(Block("console", "$ false\n", 1))
    assert reader.follow(Block("console", "$ rankmesh groups tp=2 tp\n0: [0, 2]\n", 1))
    assert not reader.follow(Block("console", "$ false\n", 1, exits=1))
    assert [block.kind for block in blocks("```sh\nmake\n```\n\n<!-- not run: why -->\n```sh\nmake\n```\n")] == [
        "unknown",
        "marked",
    ]


def test_times_do_not_count():
    """Two runs that differ in their times alone, and in the width of their columns, print the same; words do count."""
    assert same("tp  117.7 ms  all\n── ─────\n", "tp 9.1 ms all\n── ─\n")
    assert not same("tp  117.7 ms  all\n", "dp 9.1 ms all\n")
    assert not same("a  b\n", "a b\n")
    assert same("one\n...\nfour\n", "one\ntwo\nthree\nfour\n")
