"""Tables of columns: what they cost."""

import io

from rich.console import Console

from rankmesh.cli.columns import Column, print_columns


class _Cells(list):
    """Cells that count how often they are read from the first to the last."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def test_a_column_is_read_as_often_whatever_its_length():
    """10 and 1,000 rows: the width of a column is found once, so the time grows with the rows and not their square."""
    found = []
    for rows in (10, 1000):
        cells = _Cells(f"cell {row}" for row in range(rows))
        console = Console(file=io.StringIO(), width=80)
        print_columns(console, [Column("head", cells)])
        assert f"cell {rows - 1}\n" in console.file.getvalue()
        found.append(cells.reads)
    assert found[0] == found[1] < 8
