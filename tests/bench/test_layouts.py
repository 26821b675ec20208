"""Random layouts that are predicted, then measured: what is drawn, and what the file has first."""

from dataclasses import asdict, replace

import pytest

import rankmesh as rm
from bench.cluster import load_example
from bench.layouts import COUNT, complete, drawn, predicted, predictions


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
        lambda layout: [1.5, 1.0],
        lambda now: saved.append([(row["predicted"], row.get("measured")) for row in now["rows"]]),
    )
    seconds = [predicted(each, _cluster()) for each in layouts]
    assert saved[0] == [(one, None) for one in seconds]
    assert len(saved) == 4
    assert saved[-1] == [(one, 1.0) for one in seconds]
    assert [found["rows"][0][name] for name in ("tp", "dp")] == [asdict(layouts[0])[name] for name in ("tp", "dp")]
