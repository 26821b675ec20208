"""The comparison of layouts that is measured: what a round has."""

from bench.compare import LAYOUTS, compared


def test_a_round_compares_the_example():
    """One layout here: the example is the same, every weight and moment is seen, and the memory is that of a peak."""
    found = compared(LAYOUTS[:1])
    assert found["same"]
    assert found["values"] > 40
    assert found["resident"] >= found["before"] > 1 << 20
