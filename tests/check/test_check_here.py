"""``rankmesh check`` alone: it starts its ranks, proves every group, and says which rank failed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.limits import until

MAKEFILE = Path(__file__).parents[2] / "Makefile"
SABOTAGE = Path(__file__).with_name("sabotage.py")


def _run(*arguments, limit=150, environment=None):
    """One command in a process group of its own, ended from outside when it takes too long."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{arguments} was not done after {limit} s")
    assert not _alive(process.pid), "a rank outlived the command"
    return process.returncode, out, err


def _alive(session):
    """Processes of a session that are still there."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if "Z" not in line]


def test_every_group_is_verified():
    """8 ranks: each group of each kind is proved on each member by each operation; the time told is the command's.

    The process that forks them has one thread at each fork: no rank inherits a lock that another thread held.
    """
    look = "import os; os.register_at_fork(before=lambda: print(len(os.listdir('/proc/self/task')), end=' '))"
    arguments = ["check", "megatron:world=8,tp=2,pp=2,ep=2,etp=1", "--json"]
    run = f"import sys; sys.argv[1:] = {arguments}; from rankmesh.cli import main; main()"
    started = time.perf_counter()
    # numpy's threads, which end themselves at a fork, are not there to be counted.
    status, out, err = _run("-c", f"{look}\n{run}", environment={"OPENBLAS_NUM_THREADS": "1"})
    threads, _, text = out.partition("{")
    assert (status, threads.split()) == (0, ["1"] * 8), err
    result = json.loads("{" + text)
    assert result["ok"] is True
    assert (result["failures"], result["verdict"]) == ([], "")
    kinds = {kind["name"]: kind for kind in result["kinds"]}
    assert len(kinds) == 20
    assert all(kind["proved"] == kind["groups"] and kind["ranks"] == kind["expected"] for kind in kinds.values())
    assert kinds["tp"]["operations"] == ["all-reduce", "all-gather", "broadcast"]
    assert kinds["pp"]["operations"][-1] == "send/recv"
    assert 0.3 < result["seconds"] / (time.perf_counter() - started) < 1  # loading torch and forking ranks included


LISTENS = """
import rankmesh as rm
from tests.sockets import named

rm.check(rm.read("tp=2"), progress=lambda *_: print(*(place for place, what in named()[0] if what == "listens")))
"""


@pytest.mark.long
def test_the_store_of_ranks_that_are_started_here_is_for_this_host():
    """2 ranks: the process that starts them listens at the loopback address, and nowhere else."""
    status, out, err = _run("-c", LISTENS)
    assert (status, out.splitlines()[-1].count("(")) == (0, 1), err
    assert out.splitlines()[-1].startswith("('127.0.0.1', ")


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_check_that_is_ended_leaves_nothing(number, tmp_path):
    """8 ranks of a check that gets a signal after they have begun: no process and no folder are left."""
    process = subprocess.Popen(
        [sys.executable, SABOTAGE, "stays"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # What runs in the background of a shell ignores SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(lambda: list(tmp_path.glob("rankmesh-ranks-*/output-7")))
    process.send_signal(number)
    assert process.wait(20) != 0
    assert not _alive(process.pid)
    assert not list(tmp_path.glob("rankmesh-ranks-*"))


@pytest.mark.nightly  # docs/tutorial.md shows the table of another layout
def test_the_demo_checks_its_layout():
    """16 ranks of the Makefile's layout: the last line of the table says that every group was proved."""
    spec = re.search(r"^SPEC \?= (.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)[1]
    status, out, err = _run("-m", "rankmesh", "check", spec)
    assert status == 0, err
    assert out.splitlines()[-1] == "every group was proved: 125 groups of 20 kinds on 16 ranks (gloo)"


@pytest.mark.nightly
def test_inside_a_job_the_ranks_that_are_left_are_the_jobs():
    """2 ranks under torchrun: a * is filled from the size of the job; a SPEC of another size keeps its own error."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rankmesh", "check")
    status, out, err = _run(*launch, "tp=1,dp=*", "--json")
    assert status == 0, err
    assert json.loads(out)["world_size"] == 2
    assert {kind["name"]: kind["groups"] for kind in json.loads(out)["kinds"]} == {"tp": 2, "dp": 1}
    status, out, err = _run(*launch, "tp=3,dp=*")
    assert status != 0
    assert "world_size" in err


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("killed", 5, "lost rank 3: it was ended by SIGKILL"),
        ("exits", 5, "lost rank 3: it ended with status 7"),
        ("raises", 4, "rank 3 failed: ProofError: received nothing, by sabotage"),
    ],
)
def test_a_failing_rank_is_named(how, status, message):
    """8 ranks: the rank that died or failed first is named, with a status of its own and no traceback."""
    code, out, err = _run(SABOTAGE, how)
    assert (code, message in err) == (status, True), err
    assert "Traceback" not in err
    assert "every group was proved" not in out


@pytest.mark.long
def test_a_wrong_group_fails_its_verification():
    """8 ranks whose tp and pp are swapped everywhere: the proof sees other members than the plan's."""
    code, out, _ = _run(SABOTAGE, "swapped", "--json")
    result = json.loads(out)
    assert code == 4
    assert result["ok"] is False
    assert {failure["kind"] for failure in result["failures"]} <= {"ProofError", "stopped"}
    assert any("members gave" in failure["message"] for failure in result["failures"])


@pytest.mark.long
def test_a_world_too_large_for_one_machine_is_refused():
    """16,384 ranks are not started here: the command says how to run inside a job."""
    code, out, err = _run("-m", "rankmesh", "check", "llama3-405b")
    assert (code, out) == (3, "")
    assert "16384" in err
    assert "torchrun" in err
