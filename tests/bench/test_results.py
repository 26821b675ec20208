"""Medians and ratios of made-up figures, and the pages of the recorded ones."""

import pytest

from bench.report import PAGES, page
from bench.results import compare


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_the_recorded_figures(name):
    """Each page is what the JSON files say, byte for byte."""
    pytest.importorskip("jinja2")
    assert PAGES[name].read_text(encoding="utf-8") == page(name)


def test_ratio_is_of_medians_and_spreads_over_rounds():
    """The ratio of the medians, between the lowest and the highest ratio of one round; none of a count that is zero."""
    both = compare([{"t": 1.0, "n": 0}, {"t": 2.0, "n": 0}, {"t": 9.0, "n": 0}], [{"t": t, "n": 3} for t in (4, 6, 9)])
    assert both.ratios.keys() == {"t"}
    assert (both.ratios["t"].median, both.ratios["t"].low, both.ratios["t"].high) == (3.0, 1.0, 4.0)
