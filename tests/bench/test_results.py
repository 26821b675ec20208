"""The recorded figures and their document; medians and ratios of made-up figures."""

import json
from pathlib import Path

import pytest

from bench.markdown import markdown, recorded_transfers
from bench.results import Comparison, Results, compare, results_from
from bench.scale_text import scale_section
from bench.tables import tables

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "bench" / "results.json"


def results(*comparisons):
    """Results of a made-up run."""
    machine = {"system": "Linux", "cores": 2, "python": "3.12", "load": {"before": 0.1, "after": 0.2}}
    return Results(machine, {"rankmesh": "1", "torch": "2"}, {"rounds": 3}, comparisons)


def test_the_document_is_that_of_the_recorded_figures():
    """docs/benchmarks.md is what bench/results.json says, byte for byte."""
    if not RECORDED.exists():
        pytest.skip("an installed package has no recorded figures")
    recorded = results_from(json.loads(RECORDED.read_text(encoding="utf-8")))
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == markdown(recorded, recorded_transfers())


def test_what_was_not_measured_has_no_section(monkeypatch):
    """A program whose figures are not there leaves no line in the document."""
    without = markdown(results())
    monkeypatch.setattr("bench.markdown._SECTIONS", {"absent": scale_section})
    assert "## The store of a large job" in without
    assert "## The store of a large job" not in markdown(results())


def test_a_missing_peer_is_reported():
    """A peer that is not installed has its reason in the table, and no ratio."""
    item = Comparison("dry", "7 kinds", 64, "Grid", compare([{"built": 1.0}], []), {"theirs": "not installed"})
    (table,) = tables(results(item))
    assert table.rows == (("64", "7 kinds", "1 s", "not installed", "Grid", "-"),)


def test_results_survive_json():
    """What is written is what is read."""
    both = compare([{"built": 1.0}, {"built": 2.0}], [{"built": 4.0}, {"built": 6.0}])
    made = results(Comparison("dry", "7 kinds", 64, "Grid", both))
    assert results_from(json.loads(json.dumps(made.to_dict()))) == made


def test_ratio_is_of_medians_and_spreads_over_rounds():
    """The ratio of the medians, between the lowest and the highest ratio of one round."""
    both = compare([{"t": 1.0}, {"t": 2.0}, {"t": 9.0}], [{"t": 4.0}, {"t": 6.0}, {"t": 9.0}])
    ratio = both.ratios["t"]
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 1.0, 4.0)


def test_nothing_is_divided_by_zero():
    """A count that is zero on our side has no ratio."""
    assert compare([{"n": 0}], [{"n": 3}]).ratios == {}
