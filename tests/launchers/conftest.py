"""Real launchers: what they need, and the skip that says so where it is not there."""

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.launchers.slurm import Slurm, bounded
from tests.multihost.conftest import hosts  # noqa: F401  - two namespaces, for torchrun

ROOT = Path(__file__).parents[2]
RUN = "RANKMESH_LAUNCHERS"
# Programs of their own; there are no tests in them.
collect_ignore = ["ray_actors.py", "ray_host.py", "ray_job.py", "survives.py"]
BIN = Path(sys.executable).parent

# The four lines of the README, with what each rank then says.
SCRIPT = textwrap.dedent("""\
    import os, sys, torch, torch.distributed as dist, rankmesh as rm

    before = dict(os.environ)
    with rm.init(timeout=60) as me, rm.connect(sys.argv[1]) as groups:
        x = torch.ones(1, device=me.device)
        dist.all_reduce(x, group=groups["dp"].pg)
        report = (me.launcher, me.rank, me.world_size, me.local_rank, me.local_world_size, me.host, me.launch.meeting)
        os.write(1, (" ".join(map(str, ("rank-report", *report, int(x.item())))) + "\\n").encode())  # one line, whole
    assert dict(os.environ) == {"GLOO_ENABLE_STORE_V2_API": "1", **before} and not dist.is_initialized()
""")


def _check(missing, what):
    if missing:
        pytest.skip(f"{what}: {', '.join(missing)} is missing; make test-launchers installs it")
    if not os.environ.get(RUN):
        pytest.skip(f"{what}: takes minutes; make test-launchers runs it ({RUN}=1)")


def needs(what, *programs, modules=()):
    """Skip where a program or a module is missing, or where nobody asked for tests with real launchers."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    _check(missing + [name for name in modules if importlib.util.find_spec(name) is None], what)


def _running(mark):
    """The processes that carry the mark in their environment, without this one."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(place.name) != os.getpid() and mark.encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: command for pid, command in found.items() if command}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left():
    """After all tests no process runs that they started, and no host is left."""
    mark = f"RANKMESH_TEST_RUN={secrets.token_hex(8)}"
    os.environ.update([mark.split("=")])
    # Told to end, pytest would leave at once: what runs is ended first, as after an interrupt.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)
    end = time.monotonic() + 15
    while (left := _running(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, left
    assert not list(Path("/run/netns").glob(f"rankmesh-{os.getpid()}-*"))


@pytest.fixture(scope="session")
def ray():
    """A Ray of this machine; the variables by which a program finds it."""
    needs("Ray", modules=("ray", "pandas"))
    # Ray tells what two workers say alike once: the words of one rank would be lost.
    how = {
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # Its sockets lie in there, whose names must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = (sys.executable, Path(__file__).with_name("ray_host.py"), folder)
        with subprocess.Popen(command, text=True, env={**os.environ, **how}, **pipes) as host:
            address = host.stdout.readline().strip()
            assert address, "Ray did not start"
            yield {**how, "RAY_ADDRESS": address}
            host.stdin.close()
            host.wait(30)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of four nodes; skipped without Slurm, or without the right to start it."""
    needs("a Slurm of four nodes", "slurmctld", "slurmd", "srun", "munged", "unshare", "setpriv")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of four nodes: its daemons need root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    """The file with the four lines."""
    path = tmp_path_factory.mktemp("four-lines") / "job.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Run a command without any launcher's variables, bounded from outside."""
    folder = tmp_path_factory.mktemp("run")
    known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI", "RAY_")

    def start(*command, limit=150, **more):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(known)}
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        return bounded(command, limit, {**kept, **allowed, **more}, folder)

    return start


def reported(done):
    """What the ranks of the script said, that ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return reported_by_rank(done.stdout)


def reported_by_rank(text):
    """What the ranks of the script said, by rank: launcher, size, local rank and size, host, meeting, sum."""
    lines = [line.split() for line in text.splitlines() if "rank-report" in line]
    message = [line[line.index("rank-report") + 1 :] for line in lines]
    return {int(line[1]): (line[0], *map(int, line[2:5]), *line[5:7], int(line[7])) for line in message}
