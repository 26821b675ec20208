"""The defects of Megatron-LM issue 7452: the comparison finds each in Megatron's code, and says so on its page."""

from tests.peers.conftest import REPOSITORY
from tests.peers.fetch import folder

PAGE = REPOSITORY / "docs" / "howto" / "right.md"


def test_page_has_what_is_found(asked_beside):
    """Nine programs: each differs, the same call without the defect does not, and the page has these rows."""
    table = asked_beside("tests.peers.defects", folder("megatron-core", "0.19.2"))
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [str(number) for number in range(3, 12)]
    assert all(row[2] != "nothing" for row in rows)
    assert {row[-1] for row in rows} == {"same"}
    assert sum(row[4] != "none works" for row in rows) == 3
    assert table in PAGE.read_text(encoding="utf-8")
