"""Layouts that are read from engines' and trainers' own loaders, beside what these loaders make of real weights."""

import json
from pathlib import Path

import pytest
from tests.peers import engines_beside, engines_table, fetch

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    """Every row of the program, once: models under sides, and transfers between sides."""
    return engines_table.measured(Path(fetch.engines()))


def test_every_model_under_every_side_is_exact_or_refused(rows):
    """7 models, 12 sides: each view of each rank's parameters is what the side's loader put there, every element."""
    cells = [row for row in rows if "side" in row]
    assert len(cells) == len(engines_beside.MODELS) * sum(map(len, engines_beside.SIDES.values()))
    assert [row for row in cells if row["result"] == "wrong"] == []
    assert all(row["compared"] >= row["tensors"] > 0 for row in cells if row["result"] == "exact")
    assert all(row["why"] for row in cells if row["result"] == "refused")


def test_transfers_from_each_side_fill_the_parameters_of_each_other(rows):
    """Whole parameters, padding included, equal what the target's own loader made of the same weights."""
    moved = [row for row in rows if "from" in row]
    assert moved
    assert [row for row in moved if row["wrong"] or not row["tensors"]] == []


def test_the_table_of_the_page_is_the_measured_one(rows):
    """The page lists which cells are exact, and why the others are refused."""
    page = (REPOSITORY / "docs" / "reference" / "layouts.md").read_text(encoding="utf-8")
    assert engines_table.table(rows) in page


def test_the_rows_are_json(rows):
    """What the frameworks print between the rows is no row."""
    assert json.loads(json.dumps(rows)) == rows
