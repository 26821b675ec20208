"""How each launcher starts a Python command on its ranks, and who they then are.

```
slurm              srun                              8 ranks, two on each of four nodes
openmpi, mpich     mpirun.openmpi, mpiexec.hydra     4 ranks on this host
openmpi in slurm   salloc mpirun.openmpi             4 ranks, two on each of two nodes
c10d, static       torchrun with that rendezvous     4 ranks, two on each of two namespaces
torchrun in slurm  srun torchrun                     4 ranks, two on each of two nodes
```
"""

import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The tests' own programs are found wherever a launcher starts them.
PATH = {"PYTHONPATH": str(Path(__file__).parents[2])}
OPENMPI = ("mpirun.openmpi", "--oversubscribe", "-np")
HYDRA = ("mpiexec.hydra", "-n")
LIMIT = 200
# What the others report of rank 2, which is lost in the second group that is verified.
LOST_IN_USE = "rank 2: it does not answer"
SURVIVES = Path(__file__).with_name("survives.py")
# What the three of four processes say that live.
SURVIVED = {"0": "(1, 0, 84.0)", "2": "(1, 2, 84.0)", "3": "(1, 1, 84.0)"}


def survived(done):
    """What the processes of SURVIVES returned, by their numbers."""
    return dict(re.findall(r"survived (\d) (\(.*?\)|None)", done.stdout))


@dataclass(frozen=True)
class Start:
    """A launcher's ranks: so many on each of these hosts, which meet at a place that begins so.

    ``levels`` are those around the hosts that the ranks can know.
    """

    launcher: str
    hosts: tuple[str, ...]
    each: int
    place: str = ""
    levels: tuple[str, ...] = ()
    # Whether the launcher numbers the hosts in their order, or as they come.
    ordered: bool = True

    @property
    def size(self):
        """How many ranks there are."""
        return len(self.hosts) * self.each


_HERE = socket.gethostname()
_SWITCHES = ("leaf", "spine")
_NODES = ("node1", "node2", "node3", "node4")
# Slurm gives other nodes while the step before still ends on these: a job that expects them asks for them.
FIRST_NODES = ("-w", "node1,node2")
STARTS = {
    "slurm": Start("slurm", _NODES, 2, "node1:", _SWITCHES),
    "torchrun in slurm": Start("torchrun", _NODES[:2], 2, "", _SWITCHES, ordered=False),
    "openmpi": Start("openmpi", (_HERE,), 4, "127.0.0.1:"),
    "mpich": Start("mpich", (_HERE,), 4, "127.0.0.1:29500"),
    "c10d": Start("torchrun", ("hosta", "hostb"), 2, "host", ("network",), ordered=False),
    "static": Start("torchrun", ("hosta", "hostb"), 2, "hosta:", ("network",)),
}


def python(*arguments):
    """A Python command as a launcher takes it."""
    return (sys.executable, *map(str, arguments))


def under_slurm(slurm, *arguments):
    """srun, two tasks on each of four nodes."""
    return [slurm.run("srun", "-N4", "--ntasks-per-node=2", *python(*arguments), limit=LIMIT, **PATH)]


def torchrun_under_slurm(slurm, *arguments):
    """srun, one torchrun on each of two nodes; torchrun's own variables count."""
    # On a cluster torchrun knows its own name; these nodes are all this machine, under other names.
    first = "--rdzv-conf is_host=$((SLURM_NODEID == 0))"
    ends = f"--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29611 {first}"
    command = ("sh", "-c", f'exec {sys.executable} -m torch.distributed.run {ends} "$@"', "sh", *map(str, arguments))
    return [slurm.run("srun", "-N2", *FIRST_NODES, "--ntasks-per-node=1", *command, limit=LIMIT, **PATH)]


def on_two_hosts(hosts, backend, *arguments):
    """torchrun on both hosts, two ranks on each, with a rendezvous."""
    launcher = ("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", backend)
    ends = ("--rdzv-endpoint", f"{hosts[0].name}:29400", "--rdzv-id", "job")
    running = [
        host.start(*launcher, *ends, *(("--node-rank", rank) if backend == "static" else ()), *arguments, **PATH)
        for rank, host in enumerate(hosts)
    ]
    return [ended(process) for process in running]


def ended(process):
    """A process with its output, at its end."""
    out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def chained(start, folder, commands):
    """Commands that a launcher's ranks ran one after the other: what came of each, rank by rank.

    ``start(*words)`` starts Python with these words on each rank.
    """
    for done in start("-m", "tests.launchers.chain", folder, json.dumps(commands)):
        assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    files = [folder / f"{rank}.json" for rank in range(len(list(folder.glob("*.json"))))]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {command: [rank[command] for rank in found] for command in commands}
