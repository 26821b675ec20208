"""``@pytest.mark.same_result``: the plugin in a pytest of its own."""

import re
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest
import torch.distributed as dist
from rankmesh import sim

LAYOUTS = ["tp=2", "dp=2", "tp=2,dp=2"]

def total(groups, kind, scale):
    x = scale * sim.random(groups, "x", (8, 4), ("dp", None)).sum()
    dist.all_reduce(x, group=groups[kind].pg)
    sim.see("total", x)

@pytest.fixture
def scale():
    return 2.0

@pytest.mark.same_result(layouts=LAYOUTS)
def test_right(groups, scale):
    total(groups, "dp", scale)

class TestMethods:
    @pytest.mark.same_result(LAYOUTS, tolerance=1e-9)
    @pytest.mark.parametrize("kind", ["dp", "tp"])
    def test_kinds(self, groups, kind, scale):
        total(groups, kind, scale)

@pytest.mark.same_result(layouts=["tp=2,dp=1"])
def test_fails(groups):
    sim.see("one", 1.0)
    assert groups["tp"].size == 1
"""


@pytest.fixture
def run(pytester):
    """A pytest of its own on a text."""
    known = any(entry.value == "rankmesh.testing.plugin" for entry in entry_points(group="pytest11"))

    def of(text):
        pytester.makepyfile(test_it=text)
        plugin = () if known else ("-p", "rankmesh.testing.plugin")
        return pytester.runpytest_subprocess(*plugin, "-p", "no:randomly", timeout=100)

    return of


@pytest.mark.long
def test_marked_tests_compare(run):
    """A right test passes, a wrong one fails with the report, one that raises fails as it does on ranks."""
    result = run(TESTS)
    result.assert_outcomes(passed=2, failed=2)
    text = result.stdout.str()
    assert "total differs under tp=2, on ranks 0, 1" in text
    assert re.search(r"test_it\.py:9: the all-reduce over tp made it differ", text)
    assert "fix: make it on dp" in text
    assert "under tp=2,dp=1: rank 0 of 2 failed: AssertionError" in text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mark", "word"),
    [
        ("same_result()", "cannot be read"),
        ("same_result(['tp=2'], order=3)", "cannot be read"),
        ("same_result(['tp=2'])\n@pytest.mark.ranks('tp=2')", "has the marks ranks and same_result"),
    ],
)
def test_marks_that_cannot_be_read(run, mark, word):
    """Refused, with what it takes."""
    result = run(f"import pytest\n@pytest.mark.{mark}\ndef test_it(groups):\n    pass\n")
    result.assert_outcomes(errors=1) if "ranks(" in mark else result.assert_outcomes(failed=1)
    assert word in result.stdout.str()
