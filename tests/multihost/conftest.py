"""Two hosts on one machine: network namespaces that are joined by a veth pair, each with a name of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PORT = 29400
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_", "GLOO_", "RANKMESH_")


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=20).stdout


class Host:
    """One host: its namespace, its name, the address of its eth0; processes end with it."""

    def __init__(self, space, name, address):
        self.space, self.name, self.address = space, name, address
        self.files = Path("/etc/netns") / space
        self.running = []

    def start(self, *command, name=None, **environment):
        """Start a Python command there; ``name`` is what the host takes itself for."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.space, "unshare", "--uts"),
                *("sh", "-c", 'hostname "$0" && exec "$@"', name or self.name),
                *(sys.executable, *map(str, command)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, "OMP_NUM_THREADS": "1", **environment},
        )
        self.running.append(process)
        return process

    def kill(self):
        """Kill every process of the host, at once and without a word."""
        for _ in range(100):
            processes = _ip("netns", "pids", self.space).split()
            if not processes:
                return
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.02)

    def remove(self):
        """Leave nothing behind: processes, pipes, namespace, files."""
        with suppress(subprocess.SubprocessError):
            self.kill()
        for process in self.running:
            process.kill()
            process.communicate()
        with suppress(subprocess.SubprocessError):
            _ip("netns", "del", self.space)
        shutil.rmtree(self.files, ignore_errors=True)


def _build(hosts):
    table = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    for host in hosts:
        _ip("netns", "add", host.space)
        host.files.mkdir(parents=True)
        (host.files / "hosts").write_text(table, encoding="utf-8")
        (host.files / "resolv.conf").write_text("", encoding="utf-8")
    first, second = (host.space for host in hosts)
    _ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
    for host in hosts:
        _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", host.space, "link", "set", link, "up")


@contextmanager
def two_hosts():
    """Two hosts, hosta and hostb; skipped where this machine does not let us make them."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"two hosts are network namespaces: {tool} is missing (iproute2, util-linux)")
    run = f"rankmesh-{os.getpid()}-{secrets.token_hex(3)}"
    both = tuple(Host(f"{run}-{token}", f"host{token}", f"10.213.0.{number}") for number, token in ((1, "a"), (2, "b")))
    try:
        try:
            _build(both)
        except (subprocess.SubprocessError, OSError) as error:
            output = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"two hosts are network namespaces, which are not permitted here: {output.strip()}")
        yield both
    finally:
        for host in both:
            host.remove()


@pytest.fixture
def hosts():
    """Two hosts for one test."""
    with two_hosts() as both:
        yield both


@pytest.fixture
def torchrun(hosts):
    """Start the same torchrun command on both hosts, with so many ranks on each."""

    def start(ranks, *command):
        launcher = (
            *("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", ranks),
            *("--rdzv-backend", "c10d", "--rdzv-id", "check", "--rdzv-endpoint", f"{hosts[0].name}:{PORT}"),
        )
        return [host.start(*launcher, *command) for host in hosts]

    return start
