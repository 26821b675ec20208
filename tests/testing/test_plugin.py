"""The plugin in a pytest of its own: what users see."""

import re
from importlib.metadata import entry_points

import pytest

# Each test starts a pytest of its own.
pytestmark = [pytest.mark.long, pytest.mark.timeout(350)]

pytest_plugins = ["pytester"]

HEAD = """
import pytest, torch
import torch.distributed as dist
"""

WELL = (
    HEAD
    + """
@pytest.fixture
def five():
    return 5

@pytest.mark.ranks("tp=2,dp=2")
@pytest.mark.parametrize("scale", [1, 2])
def test_sum(groups, five, scale):
    number = torch.tensor(five * scale)
    dist.all_reduce(number, group=groups["tp"].pg)
    assert number == 2 * five * scale
    assert groups["dp"].ranks in [(0, 2), (1, 3)]

class TestMethods:
    @pytest.mark.ranks(2)
    def test_world(self):
        assert dist.get_world_size() == 2

@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not on this machine")

def scaled(number):
    return dist.get_rank() * number

def place(groups):
    return groups["tp"].rank

def test_values(ranks):
    assert ranks(scaled, 3, 10) == [0, 10, 20]
    assert ranks(place, "tp=2,dp=2") == [0, 1, 0, 1]
"""
)

BADLY = (
    HEAD
    + """
@pytest.mark.ranks("tp=2,dp=2")
def test_one_rank_is_wrong(groups):
    assert dist.get_rank() != 2

def wrong(groups):
    if dist.get_rank() == 1:
        raise ValueError("out of range")
    return dist.get_rank()

def test_function(ranks):
    ranks(wrong, "tp=2")

@pytest.mark.ranks("tp=2,dp=2")
def test_diverges(groups):
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(1), group=groups["dp"].pg)
"""
)


@pytest.fixture
def run(pytester):
    """Run pytest on a file of tests, in a process of its own."""
    installed = entry_points(group="pytest11", name="rankmesh")
    plugin = [] if installed else ["-p", "rankmesh.testing.plugin"]

    def run(text, *arguments):
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess(*plugin, "-p", "no:randomly", *arguments, timeout=300)

    return run


def test_simulated(run):
    """Marked tests, methods, parameters, fixtures, skips, the fixture `ranks`, on simulated ranks, under xdist."""
    result = run(WELL, "-n", "2")
    result.assert_outcomes(passed=4, skipped=1)


def test_processes(run):
    """4 ranks: the same file passes on real gloo processes, each of which makes its own fixtures."""
    result = run(WELL, "--rankmesh=gloo", "-rs", "-k", "not 1")
    result.assert_outcomes(passed=3, skipped=1, deselected=1)
    assert "not on this machine" in result.stdout.str()


def test_a_simulated_failure(run):
    """The report shows the line of the test and names the rank; a divergence also group, calls and lines."""
    result = run(BADLY)
    result.assert_outcomes(failed=3)
    text = result.stdout.str()
    assert ">       assert dist.get_rank() != 2" in text
    assert "RanksFailed: rank 2 of 4 failed: AssertionError: assert 2 != 2" in text
    assert "RanksFailed: rank 1 of 2 failed: ValueError: out of range" in text
    assert re.search(r"rank 1  waits in all_reduce .* on dp@tp1 of ranks \[1, 3\], at .*:\d+ in test_diverges", text)
    assert "rank 3  has returned" in text
    assert "rankmesh/sim" not in text
    assert "traceback entries are hidden" not in text


def test_a_failure_of_processes(run):
    """2 ranks: the report of processes names the rank that failed first, and shows its line."""
    result = run(BADLY, "--rankmesh=gloo", "-k", "function", "--rankmesh-timeout=20")
    result.assert_outcomes(failed=1, deselected=2)
    text = result.stdout.str()
    assert "rank 1 of 2 failed (gloo): ValueError: out of range" in text
    assert 'raise ValueError("out of range")' in text


def test_nccl_without_devices(run):
    """Tests that need more GPUs than there are skip, and say how many are needed."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are devices")
    result = run(BADLY, "--rankmesh=nccl", "-rs")
    result.assert_outcomes(skipped=3)
    assert "2 ranks need 2 GPUs with nccl" in result.stdout.str()


ORDERS = (
    HEAD
    + """
from hypothesis import given, settings, strategies as st

@pytest.mark.ranks(4, orders=20)
def test_depends_on_the_order():
    if dist.get_rank() == 0:
        number = torch.zeros(1)
        assert [dist.recv(number) for _ in range(3)] == [1, 2, 3]
    else:
        dist.send(torch.zeros(1), 0)

@pytest.mark.ranks(3)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9))
def test_examples(number):
    total = torch.tensor(number)
    dist.all_reduce(total)
    assert total == 3 * number

@pytest.mark.ranks("tp=3")
@settings(max_examples=5, deadline=None)
@given(number=st.integers(0, 9))
def test_examples_on_groups(groups, number):
    total = torch.tensor(number)
    dist.all_reduce(total, group=groups["tp"].pg)
    assert total == 3 * number

@settings(max_examples=5, deadline=None)
@given(number=st.integers(1, 3))
def test_examples_of_worlds(ranks, number):
    assert ranks(dist.get_rank, number) == list(range(number))

@pytest.mark.ranks("tp=2")
@settings(max_examples=50, deadline=None)
@given(number=st.integers(0, 9))
def test_one_rank_fails(groups, number):
    assert number < 3 or groups["tp"].rank == 0

@pytest.mark.ranks(2, timeout=0.3)
def test_spins():
    while dist.get_rank():
        pass

@pytest.mark.ranks(2)
def test_is_not_harmed():
    dist.barrier()
"""
)


def test_orders_examples_and_spinning_ranks(run):
    """Random orders find what depends on the order, and say how to run it again; hypothesis works; spinning is told."""
    result = run(ORDERS)
    result.assert_outcomes(passed=4, failed=3)
    text = result.stdout.str()
    assert "number=3" in text
    seed = re.search(r"--rankmesh-order=(\d+)", text)
    assert "rank 1 made no progress for 0.3 s" in text
    again = run(ORDERS, f"--rankmesh-order={seed[1]}", "-k", "depends")
    again.assert_outcomes(failed=1, deselected=6)


EXPECTED = (
    HEAD
    + """
@pytest.mark.ranks(2)
def test_one_rank_skips():
    if dist.get_rank() == 1:
        pytest.skip("not here")
    dist.barrier()

@pytest.mark.xfail
@pytest.mark.ranks(2)
def test_one_rank_fails():
    assert dist.get_rank() == 0

@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2)
def test_nobody_fails():
    dist.barrier()

@pytest.mark.ranks(2)
def test_expects_it_itself():
    pytest.xfail("known")
"""
)


@pytest.mark.parametrize("mode", ["sim", "gloo"])
def test_skips_and_expected_failures(run, mode):
    """2 ranks: what one rank skips or fails as expected is so for the test, on threads and on processes alike."""
    run(EXPECTED, f"--rankmesh={mode}").assert_outcomes(skipped=1, xfailed=2, failed=1)


UNUSED = """
import sys

def test_plain():
    assert "torch" not in sys.modules
"""

MISUSED = """
import unittest
import pytest

def test_no_mark(groups): ...

@pytest.mark.ranks(4)
def test_no_layout(groups): ...

@pytest.mark.ranks("tp=2", speed=3)
def test_bad_option(): ...

@pytest.mark.ranks()
def test_no_ranks(): ...

@pytest.mark.ranks(2)
async def test_coroutine(): ...

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self): ...
"""


def test_quiet_when_unused(run):
    """Where no test runs on ranks, torch is not loaded and nothing is said."""
    result = run(UNUSED, "-q")
    result.assert_outcomes(passed=1)
    assert "rankmesh" not in result.stdout.str().partition("==")[0]


def test_misuse_is_an_error(run):
    """`groups` without a layout, and marks that cannot be read, say what to write."""
    result = run(MISUSED)
    text = result.stdout.str()
    assert text.count("@pytest.mark.ranks('tp=2,dp=2')") >= 2
    assert "speed" in text
    assert "a coroutine is not awaited on a rank" in text
    assert "unittest calls it itself" in text
    result.assert_outcomes(failed=2, errors=4)
