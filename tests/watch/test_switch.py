"""``RANKMESH=watch``: programs that were not written for rankmesh are watched, and nothing is imported without it."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from tests import limits
from tests.peers.fetch import folder

import rankmesh as rm
from rankmesh.debug.watch.live_names import live_names
from rankmesh.debug.watch.recorder import prepare
from rankmesh.debug.watch.setting import Setting, setting

HERE = Path(__file__).parent
WATCH = (sys.executable, "-m", "rankmesh", "watch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def started(command, cwd, **environment):
    """A process without a watch, but for what is given; its two outputs are one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH")}
    kept |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, cwd=cwd, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*command, cwd, **environment):
    """What a command printed on both outputs, and its status."""
    with started(command, cwd, **environment) as process:
        try:
            return process.communicate(timeout=limits.LONG)[0], process.returncode
        finally:
            process.kill()


def test_torch_loads_it():
    """The entry point of torch.backends is the file that is loaded."""
    (entry,) = (one for one in entry_points(group="torch.backends") if one.name == "rankmesh")
    assert entry.value == "rankmesh_watch:load"


def test_nothing_is_imported_without_the_variable(tmp_path):
    """A process without RANKMESH has neither rankmesh nor numpy nor torch by it."""
    code = "import sys, rankmesh_watch; rankmesh_watch.load(); print({'rankmesh', 'numpy', 'torch'} & {*sys.modules})"
    assert run(sys.executable, "-c", code, cwd=tmp_path) == ("set()\n", 0)
    code = "import sys, torch; print([name for name in sys.modules if name.partition('.')[0] == 'rankmesh'])"
    assert run(sys.executable, "-c", code, cwd=tmp_path) == ("[]\n", 0)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        ({"RANKMESH": "watch", "SLURM_JOB_ID": "71"}, Setting(Path("rankmesh-watch/71"))),
        ({"RANKMESH": "watch", "TORCHELASTIC_RUN_ID": "none"}, Setting(Path("rankmesh-watch/job"))),
        ({"RANKMESH": "watch:dir=/shared/a,after=1.5,then=exit"}, Setting(Path("/shared/a"), 1.5, "exit")),
        ({"RANKMESH": "watch:dir=a,slow=0"}, Setting(Path("a"), slow=0.0)),
        ({"RANKMESH": "watch:dir=a,slow=300"}, Setting(Path("a"), slow=300.0)),
        ({"RANKMESH_RECORD": "calls"}, Setting(Path("calls"))),
        ({"RANKMESH": "watch:then=abort", "RANKMESH_RECORD": "calls"}, Setting(Path("calls"), None, "abort")),
    ],
)
def test_settings(environment, wanted):
    """What the environment asks for; RANKMESH_RECORD is an older name."""
    assert setting(environment) == wanted


@pytest.mark.parametrize(
    ("value", "slow", "timed"),
    [
        ("", False, False),
        ("", True, True),
        ("watch", False, True),
        ("watch:slow=0", True, False),
        ("wach", False, False),
    ],
)
def test_durations_are_recorded_for_slow_ranks(monkeypatch, value, slow, timed):
    """NCCL times its calls where slow ranks are looked for, unless the environment says otherwise."""
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANKMESH", value)
    prepare(slow=slow)
    assert ("TORCH_NCCL_ENABLE_TIMING" in os.environ) == timed


@pytest.mark.parametrize(
    "text",
    [
        *("wach", "watch:after=soon", "watch:after=0", "watch:then=kill", "watch:directory=a"),
        *("watch:guard=often", "watch:guard", "watch:slow=often", "watch:slow=-1"),
    ],
)
def test_a_setting_that_cannot_be_read(text):
    """A value that is not known is an error in a command."""
    with pytest.raises(rm.ConnectError):
        setting({"RANKMESH": text})


@pytest.mark.long
@pytest.mark.parametrize(
    ("value", "line", "files"),
    [
        ("wach", "rankmesh: this job is not watched: RANKMESH='wach' cannot be read; set RANKMESH=watch", 0),
        (
            "watch:dir=here,slow=often,then=kill",
            "rankmesh: slow=often and then=kill of RANKMESH cannot be read: ignored",
            2,
        ),
    ],
)
def test_a_job_with_a_setting_that_cannot_be_read(tmp_path, value, line, files):
    """One line tells it for all ranks, and the job runs as without the option, or without a watch."""
    statuses, printed = ended(begin(tmp_path, "again", RANKMESH=value))
    assert statuses == [0, 0], printed
    assert sum(text.count("cannot be read") for text in printed) == 1, printed
    assert any(line in text for text in printed), printed
    assert len([*tmp_path.rglob("rank*.json.gz")]) == files


PROGRAMS = {
    "plain": "world",
    "megatron": "DATA_PARALLEL_GROUP [1, 3]",
    "fsdp": "mesh_dp [1, 3]",
    "accelerate": "world",
    "deepspeed": "EXPERT_DATA_PARALLEL_GROUP[ep_size_2] [1, 3]",
}
# What `make test` does not install: `make test-peers` has their releases.
PEERS = {"accelerate", "deepspeed"}


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("mistake", ["absent", "late", "dead"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_unmodified_programs(tmp_path, program, mistake, monkeypatch):
    """4 ranks under torchrun, of which rank 3 hangs the job: the log and the folder name it, its group and its line."""
    if program in PEERS:
        if "RANKMESH_PEERS" not in os.environ:
            pytest.skip("no releases of others here: make test-peers")
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{folder(program)}")
    # A loaded machine takes seconds to make the groups: a call that is under way for so long is no hang yet.
    command = (*WATCH, "--after", "12", "--then", "exit", "--dir", "hangs", "--", *TORCHRUN, "4")
    printed, status = run(*command, HERE / "unmodified.py", program, mistake, cwd=tmp_path)
    assert status != 0
    # A rank that is late is slow, first.
    lines = [line for line in re.findall("^rankmesh: (.*)", printed, re.MULTILINE) if not line.startswith("slow: ")]
    assert sum("rankmesh doctor" in line for line in lines) == 1, printed
    verdict = json.loads((tmp_path / "hangs/verdict.json").read_text(encoding="utf-8"))
    assert verdict["verdict"] == lines[0]
    first = verdict["causes"][0]
    assert first["ranks"] == [3], verdict
    # Whoever came first waits: rank 1 for this step's call, or rank 2, already in the next step, for that one's.
    came_first = mistake != "absent" and first["members"] == [2, 3]
    assert came_first or first["group"] == PROGRAMS[program], verdict
    # The next collective of accelerate's step is in the same group: that of the backward pass.
    skipped = {"different"} if program == "accelerate" else {"absent", "late"}
    assert first["cause"] in (skipped if mistake == "absent" else {mistake}), verdict
    if mistake != "dead":
        # Torch names frames only once it has its compiler: of a job that fails at once the folder has the lines.
        line = f"{HERE / 'unmodified.py'}:"
        assert line in json.dumps(first) or line in run(*WATCH[:3], "doctor", "hangs", cwd=tmp_path)[0]
    metrics = (tmp_path / "hangs/rankmesh.prom").read_text(encoding="utf-8")
    assert re.search(r"^rankmesh_hang\{.*\} 1$", metrics, re.MULTILINE)
    assert f'rank="3",state="{first["cause"]}"' in metrics


def test_names_that_a_framework_has_for_its_groups(monkeypatch):
    """Groups that torch has no description of have the name of the global or the key that holds them."""

    class NamedGroup(dist.ProcessGroup):
        group_name = "7"

    one, other = NamedGroup.__new__(NamedGroup), NamedGroup.__new__(NamedGroup)
    other.group_name = "8"
    module = ModuleType("deepspeed.utils.groups")
    vars(module).update(_DATA_PARALLEL_GROUP=one, _EXPERT_PARALLEL_GROUP={"ep_size_2": other}, mesh=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", module)
    assert live_names() == {"7": "DATA_PARALLEL_GROUP", "8": "EXPERT_PARALLEL_GROUP[ep_size_2]"}


def begin(place, program, options="", **environment):
    """The two ranks of a program of healthy.py, started, without a launcher."""
    environment = {"RANKMESH": f"watch:dir=hangs{options}", **environment}
    command = (sys.executable, HERE / "healthy.py", program)
    return [started((*command, str(rank), place / "meeting"), place, **environment) for rank in range(2)]


def ended(ranks):
    """The statuses of the ranks, and what each has printed."""
    printed = [rank.communicate(timeout=limits.LONG)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], printed


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "statuses"),
    [("again", [0, 0]), ("loads", [0, 0]), ("spawns", [0, 0]), ("inits", [0, 0]), ("exits", [3, 4])],
)
def test_a_job_that_does_not_hang(tmp_path, program, statuses):
    """2 ranks end as without the watch and print nothing; their recordings are in its folder."""
    assert ended(begin(tmp_path, program, ",then=exit")) == (statuses, ["", ""])
    speed = {"slow.json", "rankmesh.prom"}  # of a job that takes longer than a few seconds
    assert {path.name for path in (tmp_path / "hangs").iterdir()} - speed == {"rank0.json.gz", "rank1.json.gz"}


@pytest.mark.long
def test_a_program_that_fails(tmp_path):
    """A rank that fails has its own status and error, although the others wait for it: its end is not a hang."""
    statuses, printed = ended(begin(tmp_path, "fails", ",then=exit"))
    assert statuses == [1, 1], printed
    assert "RuntimeError: a wrong batch" in printed[1]
    assert not any("ends this process" in text for text in printed), printed


@pytest.mark.long
def test_a_request_does_not_end_a_job(tmp_path):
    """SIGUSR1 while one rank is behind for a while: a diagnosis, after which the job goes on to its end."""
    ranks = begin(tmp_path, "waits", ",then=exit")
    assert ranks[1].stdout.readline() == "ready\n"
    ranks[0].send_signal(signal.SIGUSR1)
    statuses, printed = ended(ranks)
    assert statuses == [0, 0], printed
    assert "rank 1 behind by 1 call of world" in printed[0]
    metrics = (tmp_path / "hangs/rankmesh.prom").read_text(encoding="utf-8")
    assert re.search(r"^rankmesh_hang\{.*\} 0$", metrics, re.MULTILINE)
    assert 'state="late"' in metrics


@pytest.mark.long
def test_another_world_of_a_process(tmp_path):
    """A hang in the second world of two processes, whose groups have the names of the first one's."""
    statuses, printed = ended(begin(tmp_path, "hangs_in_another_world", ",after=2,then=exit"))
    # The call of rank 0 fails if rank 1 ends first.
    assert statuses[1] == 7, printed
    assert statuses[0] in (1, 7), printed
    assert "late: rank 1 behind by 1 call of world" in printed[0]


@pytest.mark.long
def test_a_check_under_the_variable(tmp_path):
    """A check watches over its ranks itself: the variable adds no second watch."""
    printed, status = run(*WATCH[:3], "check", "tp=2", cwd=tmp_path, RANKMESH="watch:dir=hangs,after=0.1,then=exit")
    assert status == 0, printed
    assert not (tmp_path / "hangs").exists()


def test_a_torch_that_loads_nothing(tmp_path):
    """`rankmesh watch` refuses an environment in which torch loads no entry points."""
    printed, status = run(*WATCH, "--", "true", cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert status == 2, printed
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the watch" in printed
    assert run(*WATCH, "--", "true", cwd=tmp_path) == ("", 0)
