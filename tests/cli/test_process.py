import resource
import subprocess
import sys

import pytest

import rankmesh as package

LARGE = "megatron:world=131072,tp=8,cp=2,pp=8,ep=8,etp=1"


def test_version(process) -> None:
    """--version prints name and version."""
    assert process("--version").out == f"rankmesh {package.__version__}\n"


def test_exit_codes_reach_the_shell(process) -> None:
    """A process ends in the named code, with one line on stderr and no traceback."""
    assert process("diff", "tp=2", "tp=4").code == 1
    ran = process("show", "tp=2,dp=*")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert "Traceback" not in ran.err


def test_a_reader_that_leaves_is_no_error() -> None:
    """`rankmesh groups ... | head -1` says nothing on stderr and ends as other commands do, 128 + SIGPIPE."""
    command = [sys.executable, "-m", "rankmesh", "groups", "tp=2,dp=100000", "tp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "0: [0, 1]\n"
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=30) == 141


@pytest.mark.long
def test_show_of_131072_ranks_costs_little_more_than_of_128(process) -> None:
    """The whole command, start of the interpreter included: less than twice the processor time of the small one."""

    def seconds(spec: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process("show", spec).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds(LARGE), seconds("megatron:world=128,tp=2,pp=2,ep=2")) for _ in range(2)]
    assert min(large for large, _ in pairs) < 2 * max(small for _, small in pairs)
