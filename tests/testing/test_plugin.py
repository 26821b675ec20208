"""The plugin in a pytest of its own: what users see."""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points

import pytest
import torch

from rankmesh.testing.processes import run_function, run_test

pytestmark = [pytest.mark.long, pytest.mark.timeout(350)]

WELL = """
import pytest, torch
import torch.distributed as dist

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

BADLY = """
import pytest, torch
import torch.distributed as dist

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


ORDERS = """
import pytest, torch
import torch.distributed as dist

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
def test_one_number_fails(groups, number):
    assert number < 3 or groups["tp"].rank == 0

@pytest.mark.ranks(2, timeout=0.3)
def test_spins():
    while dist.get_rank():
        pass

@pytest.mark.ranks(2)
def test_is_not_harmed():
    dist.barrier()
"""


EXPECTED = """
import pytest, torch
import torch.distributed as dist

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


@dataclass(frozen=True)
class Run:
    """How each test of a run ended, by its name, but for those that were skipped; their number; and the output."""

    ended: dict[str, str]
    skipped: int
    text: str


def _run(folder, files, *arguments):
    """Run pytest on files of tests, in a process of its own."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    installed = entry_points(group="pytest11", name="rankmesh")
    plugin = [] if installed else ["-p", "rankmesh.testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-rA", *plugin, "-p", "no:randomly", *arguments]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False).stdout
    ended = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) \S+::(\w+(?:\[.*?\])?)", text, re.MULTILINE)
    return Run({name: how for how, name in ended}, sum(map(int, re.findall(r"(\d+) skipped", text))), text)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What pytest says of tests on simulated ranks that do not pass, or not all."""
    files = {"badly": BADLY, "orders": ORDERS, "expected": EXPECTED, "misused": MISUSED}
    return _run(tmp_path_factory.mktemp("simulated"), files)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What pytest says of tests on gloo processes."""
    files = {"well": WELL, "badly": BADLY, "expected": EXPECTED}
    which = ("-k", "not sum[1] and not wrong and not diverges", "--rankmesh-timeout=20")
    return _run(tmp_path_factory.mktemp("processes"), files, "--rankmesh=gloo", *which)


def test_simulated(tmp_path):
    """Marked tests, methods, parameters, fixtures, skips, the fixture `ranks`, on simulated ranks, under xdist."""
    run = _run(tmp_path, {"well": WELL}, "-n", "1")
    assert run.ended == dict.fromkeys(("test_sum[1]", "test_sum[2]", "test_world", "test_values"), "PASSED")
    assert run.skipped == 1


def test_processes(processes):
    """4 ranks: the same file passes on real gloo processes, each of which makes its own fixtures."""
    assert [processes.ended[name] for name in ("test_sum[2]", "test_world", "test_values")] == ["PASSED"] * 3
    assert "not on this machine" in processes.text


def test_a_simulated_failure(simulated):
    """The report shows the line of the test and names the rank; a divergence also group, calls and lines."""
    failed = ("test_one_rank_is_wrong", "test_function", "test_diverges")
    assert [simulated.ended[name] for name in failed] == ["FAILED"] * 3
    text = simulated.text
    assert ">       assert dist.get_rank() != 2" in text
    assert "RanksFailed: rank 2 of 4 failed: AssertionError: assert 2 != 2" in text
    assert "RanksFailed: rank 1 of 2 failed: ValueError: out of range" in text
    assert re.search(r"rank 1  waits in all_reduce .* on dp@tp1 of ranks \[1, 3\], at .*:\d+ in test_diverges", text)
    assert "rank 3  has returned" in text
    assert "rankmesh/sim" not in text.partition(" test_depends_on_the_order ")[0]  # hypothesis names our lines
    assert "traceback entries are hidden" not in text


def test_a_failure_of_processes(processes):
    """2 ranks: the report of processes names the rank that failed first, and shows its line."""
    assert processes.ended["test_function"] == "FAILED"
    assert "rank 1 of 2 failed (gloo): ValueError: out of range" in processes.text
    assert 'raise ValueError("out of range")' in processes.text


def test_nccl_without_devices():
    """What needs more GPUs than there are is skipped, and says how many are needed."""
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are devices")
    for run, what in ((run_test, (None, 2)), (run_function, (torch.ones, 2, ()))):
        with pytest.raises(pytest.skip.Exception, match="2 ranks need 2 GPUs with nccl"):
            run(*what, "nccl", 1.0)


@pytest.mark.nightly
def test_orders_examples_and_spinning_ranks(simulated, tmp_path):
    """Random orders find what depends on the order, and say how to run it again; hypothesis works; spinning is told."""
    examples = ("test_examples", "test_examples_on_groups", "test_examples_of_worlds", "test_is_not_harmed")
    assert [simulated.ended[name] for name in examples] == ["PASSED"] * 4
    failed = ("test_depends_on_the_order", "test_one_number_fails", "test_spins")
    assert [simulated.ended[name] for name in failed] == ["FAILED"] * 3
    assert "number=3" in simulated.text
    assert "rank 1 made no progress for 0.3 s" in simulated.text
    seed = re.search(r"--rankmesh-order=(\d+)", simulated.text)
    again = _run(tmp_path, {"orders": ORDERS}, f"--rankmesh-order={seed[1]}", "-k", "depends")
    assert again.ended == {"test_depends_on_the_order": "FAILED"}


@pytest.mark.parametrize("mode", ["simulated", "processes"])
def test_skips_and_expected_failures(request, mode):
    """2 ranks: what one rank skips or fails as expected is so for the test, on threads and on processes alike."""
    run = request.getfixturevalue(mode)
    expected = ("test_one_rank_fails", "test_expects_it_itself", "test_nobody_fails")
    assert [run.ended[name] for name in expected] == ["XFAIL", "XFAIL", "FAILED"]
    assert re.search(r"^SKIPPED .* not here$", run.text, re.MULTILINE)


def test_quiet_when_unused(tmp_path):
    """Where no test runs on ranks, torch is not loaded and nothing is said."""
    run = _run(tmp_path, {"unused": UNUSED}, "-q")
    assert run.ended == {"test_plain": "PASSED"}
    assert "rankmesh" not in run.text.partition("==")[0]


def test_misuse_is_an_error(simulated):
    """`groups` without a layout, and marks that cannot be read, say what to write."""
    errors = ("test_no_mark", "test_no_layout", "test_coroutine", "test_method")
    assert [simulated.ended[name] for name in errors] == ["ERROR"] * 4
    assert [simulated.ended[name] for name in ("test_bad_option", "test_no_ranks")] == ["FAILED"] * 2
    assert simulated.text.count("@pytest.mark.ranks('tp=2,dp=2')") >= 2
    assert "speed" in simulated.text
    assert "a coroutine is not awaited on a rank" in simulated.text
    assert "unittest calls it itself" in simulated.text
