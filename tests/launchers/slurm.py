"""A Slurm of four nodes on this machine: a controller, four daemons and their munge, in a folder that goes with it.

```
leaf1: node1 node2      spine: leaf1 leaf2        node1 is 127.0.0.11, node2 127.0.0.12, ...
leaf2: node3 node4                                for the tasks alone: their /etc/hosts is one of a mount namespace
```
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.sockets import free_port

NODES = 4

CONFIG = """\
ClusterName=rankmesh
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
MessageTimeout=60
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
NodeName=node[1-4] NodeHostname={host} NodeAddr=127.0.0.1[1-4] Port=[{first}-{last}] CPUs=4
PartitionName=all Nodes=node[1-4] Default=YES MaxTime=10 State=UP
"""
TOPOLOGY = "SwitchName=leaf1 Nodes=node[1-2]\nSwitchName=leaf2 Nodes=node[3-4]\nSwitchName=spine Switches=leaf[1-2]\n"


class Slurm:
    """The cluster, from its start to its end."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        port = free_port()
        names = {"host": socket.gethostname().split(".")[0], "folder": folder}
        ports = {"port": port, "first": port + 1, "last": port + NODES}
        for name in ("state", *(f"spool/node{node}" for node in range(1, NODES + 1))):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIG.format(**names, **ports), encoding="utf-8")
        (folder / "topology.conf").write_text(TOPOLOGY, encoding="utf-8")
        known = Path("/etc/hosts").read_text(encoding="utf-8")
        nodes = "".join(f"127.0.0.1{node} node{node}\n" for node in range(1, NODES + 1))
        (folder / "hosts").write_text(known + nodes, encoding="utf-8")
        # What a node's resolver knows where nobody told it of the cluster: not the names of the nodes.
        (folder / "no-hosts").write_text(known, encoding="utf-8")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def start(self):
        """Start the daemons, and wait until all nodes are idle."""
        munge = [
            f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file")
        ]
        munge += [f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed"]
        self._daemon("munged", "--foreground", "--force", *munge)
        while not (self.folder / "munge.socket").exists():
            time.sleep(0.05)
        config = ("-f", f"{self.folder}/slurm.conf")
        self._daemon("slurmctld", "-D", "-c", *config)
        hosts = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        for node in range(1, NODES + 1):
            self._daemon("unshare", "--mount", "sh", "-c", hosts, "sh", "slurmd", "-D", "-N", f"node{node}", *config)
        end = time.monotonic() + 30
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(NODES):
            assert time.monotonic() < end, (self.folder / "log").read_text(encoding="utf-8")[-3000:]
            time.sleep(0.2)

    def _daemon(self, *command):
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        with (self.folder / "log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "start_new_session": True, "env": {**os.environ, "PATH": path}}
            # It ends with this process, however that ends.
            self.daemons.append(subprocess.Popen(("setpriv", "--pdeathsig", "TERM", *command), **how))

    def environment(self, **more):
        """The environment of Slurm's own commands."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCH", "MASTER_"))
        }
        return {**kept, "SLURM_CONF": f"{self.folder}/slurm.conf", "OMP_NUM_THREADS": "1", **more}

    def run(self, *command, limit=150, **more):
        """One of Slurm's commands, bounded from outside; what it starts ends with it."""
        return bounded(command, limit, self.environment(**more), self.folder)

    def batch(self, out, *command, limit=150, **more):
        """A batch job to its end, as it ended, with what it wrote; ``sbatch --wait`` itself would look seldom."""
        submitted = self.run("sbatch", "--parsable", "-o", out, *command, **more)
        assert submitted.returncode == 0, submitted.stderr
        end = time.monotonic() + limit
        while not (ended := self._ended(submitted.stdout.strip())) and time.monotonic() < end:
            time.sleep(0.3)
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        assert ended, f"the batch job was not done after {limit} s\n{text}"
        return subprocess.CompletedProcess(command, int(ended != "COMPLETED"), text, ended)

    def _ended(self, job):
        """How a job ended; empty while it runs."""
        state = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job).stdout)[1]
        return "" if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") else state

    def stop(self):
        """End every job and every daemon."""
        self.run("scancel", "--state=RUNNING", "--user=root", limit=20)
        time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            _end(daemon)
        shutil.rmtree(self.folder, ignore_errors=True)


def _end(daemon):
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def bounded(command, limit, environment, folder):
    """A command with its output, killed with all that it started when it takes too long."""
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{command} was not done after {limit} s\n{out[-2000:]}\n{err[-3000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
