"""Random layouts that are predicted, then measured: what is drawn, what the file has first, and its section."""

from dataclasses import asdict, replace

import pytest

import rankmesh as rm
from bench.layouts import COUNT, complete, drawn, load_example, predicted, predictions
from bench.layouts_text import another_draw, layouts_section


@pytest.fixture(autouse=True, scope="module")
def _example():
    """The example's vocabulary is part of what is predicted."""
    load_example()


def _cluster():
    cluster = rm.Cluster.parse("host=2,leaf=2,spine=2")
    return cluster.with_levels([replace(level, bandwidth=6e6, uplink=6e6, latency=1e-3) for level in cluster.levels])


def test_the_same_layouts_are_drawn():
    """30 of eight ranks, each once, the same in each run."""
    layouts = drawn(COUNT)
    assert layouts == drawn(COUNT)
    assert len(set(map(str, layouts))) == COUNT
    assert {each.plan.world_size for each in layouts} == {8}


def test_predictions_come_before_measurements():
    """The file is saved with all predictions before the first layout is measured, and after each."""
    layouts, saved = drawn(3), []
    found = predictions(layouts, _cluster())
    complete(
        found,
        lambda layout: (2.0, [1.5, 1.0]),
        lambda now: saved.append([(row["predicted"], row.get("measured")) for row in now["rows"]]),
    )
    seconds = [predicted(each, _cluster()) for each in layouts]
    assert saved[0] == [(one, None) for one in seconds]
    assert len(saved) == 4
    assert saved[-1] == [(one, 1.0) for one in seconds]
    assert [found["rows"][0][name] for name in ("tp", "dp")] == [asdict(layouts[0])[name] for name in ("tp", "dp")]


def test_the_section_hides_nothing():
    """Every row is there; one that was not measured says so, and counts for nothing."""
    found = predictions(drawn(3), _cluster())
    for row, ratio in zip(found["rows"], (0.95, 0.86), strict=False):
        row |= {"measured": row["predicted"] / ratio, "load": [0.5, 1.0]}
    text = "\n".join(layouts_section(found))
    assert "Of 2 measured, 1 are within 10 % and 2 within 15 %." in text
    assert text.count("not measured |") == 1
    assert "| 0.86 |" in text
    assert "on an emulated cluster of 4 hosts with 2 ranks each in 2 racks" in text


def test_another_draw_has_its_seed_and_ratios():
    """Its seed, how many are near, and each ratio; the draw is another one."""
    assert drawn(12, 31) != drawn(12)
    found = predictions(drawn(3, 31), _cluster(), 31)
    for row, ratio in zip(found["rows"], (1.2, 0.95), strict=False):
        row |= {"measured": row["predicted"] / ratio}
    text = "\n".join(another_draw(found))
    assert "Another draw of 3 layouts (`--seed 31 --count 3`)" in text
    assert "Of 2 measured, 1 are within 10 % and 1 within 15 %. Ratios: 0.95, 1.20." in text
