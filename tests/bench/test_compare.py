"""The comparison of layouts that is measured: what a round has, and how its section states it."""

from bench.compare import LAYOUTS, compared
from bench.compare_text import compare_section


def test_a_round_compares_the_example():
    """One layout here: the example is the same, every weight and moment is seen, and the memory is that of a peak."""
    found = compared(LAYOUTS[:1])
    assert found["same"]
    assert found["values"] > 40
    assert found["seconds"] > 0.0
    assert found["resident"] >= found["before"] > 1 << 20
    assert len(LAYOUTS) == 8


def test_the_section_states_medians():
    """Median, lowest and highest of the rounds; a result that differs is not hidden."""
    run = {"seconds": 2.0, "processor": 1.5, "resident": 400 << 20, "before": 300 << 20, "same": True, "values": 48}
    found = {
        "layouts": ["tp=2", "dp=2"],
        "cores": 2,
        "torch": "2.13.0",
        "load": [0.5, 2.0],
        "runs": [run, run | {"seconds": 4.0}, run | {"seconds": 3.0, "processor": 2.5}],
    }
    text = "\n".join(compare_section(found))
    assert "| same | 3.0 (2.0 – 4.0) | 1.5 (1.5 – 2.5) | 400 MiB |" in text
    assert "under 2 layouts of up to 16 ranks and on one process, 48 values: tp=2, dp=2." in text
    assert "load 0.5 before, 2.0 after" in text
    found["runs"].append(run | {"same": False})
    assert "| differs |" in "\n".join(compare_section(found))
