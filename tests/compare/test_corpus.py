"""The corpus: programs that are right are never blamed, and wrong ones are found by their line and repaired."""

import inspect

import pytest
from tests.compare.right import RIGHT
from tests.compare.wrong import WRONG

from rankmesh import sim


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RIGHT)
def test_right_program_is_the_same(name):
    """No difference, whatever the layout: no false alarm."""
    program, layouts = RIGHT[name]
    result = sim.compare(program, layouts)
    assert result.same, result.report()


def line_of(program):
    """The line of a wrong program that should be named."""
    lines, start = inspect.getsourcelines(program)
    marked = [start + number for number, line in enumerate(lines) if line.rstrip().endswith("# wrong")]
    assert len(marked) == 1
    return f"wrong.py:{marked[0]}"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_program_is_found(name):
    """The line, the group and the operation that made it differ, and the change that makes it right."""
    program, layouts, repair, group = WRONG[name]
    result = sim.compare(program, layouts)
    first = result.first
    assert not result.same
    assert (first.site, first.group, first.repair) == (line_of(program), group, repair), result.report()
    assert (first.operation is None) == (group is None)
    assert first.settles == (repair is not None)
    assert result.report().startswith("could not be repaired: ") == (repair is None)


@pytest.mark.parametrize("name", ["mlp", "experts", "tied"])
def test_order_of_ranks_changes_nothing(name, monkeypatch):
    """A comparison of a right program is right in random orders of its ranks, too."""
    program, layouts = RIGHT[name]
    from rankmesh.sim.comparison import runner

    original = runner.run
    seeds = iter(range(1, 100))
    monkeypatch.setattr(runner, "run", lambda *given, **named: original(*given, order=next(seeds), **named))
    assert sim.compare(program, layouts).same
