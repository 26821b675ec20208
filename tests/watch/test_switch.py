"""``RANKMESH=watch``: programs that were not written for rankmesh are watched, and nothing is imported without it."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

import rankmesh as rm
from rankmesh.debug.watch.live_names import live_names
from rankmesh.debug.watch.setting import Setting, setting

HERE = Path(__file__).parent
WATCH = (sys.executable, "-m", "rankmesh", "watch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def run(*command, cwd, limit=100, **environment):
    """What a command printed on both outputs, and its status."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    return done.stdout, done.returncode


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
        ({"RANKMESH_RECORD": "calls"}, Setting(Path("calls"))),
        ({"RANKMESH": "watch:then=abort", "RANKMESH_RECORD": "calls"}, Setting(Path("calls"), None, "abort")),
    ],
)
def test_settings(environment, wanted):
    """What the environment asks for; RANKMESH_RECORD is an older name."""
    assert setting(environment) == wanted


@pytest.mark.parametrize("text", ["wach", "watch:after=soon", "watch:after=0", "watch:then=kill", "watch:directory=a"])
def test_a_setting_that_cannot_be_read(text):
    """A value that is not known is an error in a command."""
    with pytest.raises(rm.ConnectError):
        setting({"RANKMESH": text})


def test_a_job_with_a_setting_that_cannot_be_read(tmp_path):
    """A job runs as without the variable, and says why it is not watched."""
    code = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"
    (tmp_path / "job.py").write_text(code, encoding="utf-8")
    printed, status = run(*TORCHRUN, "job.py", cwd=tmp_path, RANKMESH="wach")
    assert status == 0, printed
    assert printed.count("this process is not watched: RANKMESH='wach' cannot be read") == 4


PROGRAMS = {"plain": "world", "megatron": "DATA_PARALLEL_GROUP [1, 3]", "fsdp": "mesh_dp [1, 3]"}


@pytest.mark.few(2)
@pytest.mark.parametrize("mistake", ["late", "absent", "dead"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_unmodified_programs(tmp_path, program, mistake):
    """4 ranks under torchrun, of which rank 3 hangs the job: the log and the folder name it, its group and its line."""
    command = (*WATCH, "--after", "4", "--then", "exit", "--dir", "hangs", "--", *TORCHRUN)
    printed, status = run(*command, HERE / "unmodified.py", program, mistake, cwd=tmp_path)
    assert status != 0
    lines = re.findall("^rankmesh: (.*)", printed, re.MULTILINE)
    assert sum("rankmesh doctor" in line for line in lines) == 1, printed
    verdict = json.loads((tmp_path / "hangs/verdict.json").read_text(encoding="utf-8"))
    assert verdict["verdict"] == lines[0]
    first = verdict["causes"][0]
    assert (first["ranks"], first["group"]) == ([3], PROGRAMS[program]), verdict
    assert first["cause"] in ({"absent", "late"} if mistake == "absent" else {mistake}), verdict
    assert mistake == "dead" or f"{HERE / 'unmodified.py'}:" in json.dumps(first)


def test_names_that_a_framework_has_for_its_groups(monkeypatch):
    """Groups that torch has no description of have the name of the global or the key that holds them."""

    class NamedGroup(dist.ProcessGroup):
        group_name = "7"

    one, other = NamedGroup.__new__(NamedGroup), NamedGroup.__new__(NamedGroup)
    other.group_name = "8"
    module = ModuleType("deepspeed.utils.groups")
    vars(module).update(_DATA_PARALLEL_GROUP=one, _EXPERT_PARALLEL_GROUP={"ep_size_2": other}, mesh=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", module)
    assert live_names() == {"7": "DATA_PARALLEL_GROUP", "8": "ep_size_2"}
