"""Real launchers: what they need, and the skip that says so where it is not there."""

import importlib.util
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from tests.launchers.slurm import Slurm, bounded
from tests.multihost.conftest import hosts  # noqa: F401  - two namespaces, for torchrun

ROOT = Path(__file__).parents[2]
RUN = "RANKMESH_LAUNCHERS"
# A program of its own that Ray runs, with no tests in it.
collect_ignore = ["ray_job.py"]
BIN = Path(sys.executable).parent

# The four lines of the README, with what each rank then says.
SCRIPT = textwrap.dedent("""\
    import os, sys, torch, torch.distributed as dist, rankmesh as rm

    before = dict(os.environ)
    with rm.init(timeout=60) as me, rm.connect(sys.argv[1]) as groups:
        x = torch.ones(1, device=me.device)
        dist.all_reduce(x, group=groups["dp"].pg)
        told = (me.launcher, me.rank, me.world_size, me.local_rank, me.local_world_size, me.host, me.launch.meeting)
        os.write(1, (" ".join(map(str, ("told", *told, int(x.item())))) + "\\n").encode())  # one line, whole
    assert dict(os.environ) == before and not dist.is_initialized()
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


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of four nodes; skipped without Slurm, or without the right to start it."""
    needs("a Slurm of four nodes", "slurmctld", "slurmd", "srun", "munged", "unshare")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of four nodes: its daemons need root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def script(tmp_path):
    """The file with the four lines."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path):
    """Run a command without any launcher's variables, bounded from outside."""
    known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI", "RAY_")

    def start(*command, limit=90, **more):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(known)}
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        return bounded(command, limit, {**kept, **allowed, **more}, tmp_path)

    return start


def told(done):
    """What the ranks of the script said, by rank: launcher, size, local rank and size, host, meeting, sum."""
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if "told" in line]
    words = [line[line.index("told") + 1 :] for line in lines]
    return {int(line[1]): (line[0], *map(int, line[2:5]), *line[5:7], int(line[7])) for line in words}
