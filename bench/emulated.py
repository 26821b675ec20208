"""A cluster on one machine: hosts are network namespaces with names and limited links, racks are bridges with a trunk.

```
netns node1 ── veth, tbf ── bridge rack0 ── veth, tbf (trunk) ── bridge rack1 ── veth, tbf ── netns node10
```

Connections use cubic, Linux's default congestion control, whichever the machine has. With bbr, the default of some
machines, rings took 2 to 8 % longer here: it probes for bandwidth, and does not fill a link of so short a round trip.

Ranks are forked into their namespaces from a process that has loaded torch once. It takes root; whatever was made is
removed in the end.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from bench.processes import run_ranks
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.host_names import natural

__all__ = ["Emulated", "emulated", "problem", "require"]

_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000
_PORT = 29431
_CONGESTION = "cubic"


def _do(*given: str) -> None:
    subprocess.run(given, check=True, capture_output=True, text=True, timeout=30)  # noqa: S603  - iproute2


def problem() -> str | None:
    """Return why hosts cannot be emulated here, None where they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (iproute2)"
    name = f"rankmesh-try-{os.getpid()}"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "add", "x", "type", "veth", "peer", "name", "y")
        _do("ip", "-n", name, "link", "set", "x", "up")
        _do("ip", "-n", name, "route", "add", "10.77.0.0/24", "dev", "x", "congctl", _CONGESTION)
        limit = ("tbf", "rate", "1mbit", "burst", "32kb", "latency", "50ms")
        _do("tc", "-n", name, "qdisc", "add", "dev", "x", "root", *limit)
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces with limited links are not permitted ({getattr(error, 'stderr', None) or error})"
    finally:
        with suppress(subprocess.SubprocessError, OSError):
            _do("ip", "netns", "del", name)
    return None


def require() -> None:
    """End this program if hosts cannot be emulated; whatever ends it later leaves no namespaces behind."""
    why = problem()
    if why is not None:
        raise SystemExit(f"error: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


@dataclass
class Emulated:
    """A cluster that is there: ``racks`` of host names, ``ranks`` on each host, link and trunk in Mbit/s.

    ``burst``: kB that a link carries at once after a pause; ``queue``: milliseconds of waiting from which it drops.
    """

    racks: Sequence[Sequence[str]]
    ranks: int
    link: int
    trunk: int | None
    burst: int = 64
    queue: int = 50
    run: str = field(default_factory=lambda: f"rm{secrets.token_hex(2)}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts in natural order, in which ranks fill them."""
        return tuple(sorted((host for rack in self.racks for host in rack), key=natural))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts) * self.ranks

    @property
    def cluster(self) -> Cluster:
        """The cluster as rankmesh describes it, not measured yet."""
        levels = ["host", "leaf"] if self.trunk is None else ["host", "leaf", "spine"]
        rack = {host: f"rack{number}" for number, names in enumerate(self.racks) for host in names}
        tops = {} if self.trunk is None else {"spine": "spine"}
        hosts = [{"name": host, "devices": self.ranks, "leaf": rack[host], **tops} for host in self.hosts]
        return Cluster.from_dict({"levels": [{"name": name} for name in levels], "hosts": hosts})

    def space(self, host: str) -> str:
        """Return the namespace of a host."""
        return f"{self.run}-{host}"

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def build(self) -> None:
        """Make the namespaces, the links and the bridges."""
        switch = f"{self.run}-switch"
        _do("ip", "netns", "add", switch)
        for number, rack in enumerate(self.racks):
            bridge = f"rack{number}"
            _do("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            _do("ip", "-n", switch, "link", "set", bridge, "up")
            for host in rack:
                self._join(switch, bridge, host)
        if self.trunk is not None:
            _do("ip", "-n", switch, "link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1")
            for number in (0, 1):
                _do("ip", "-n", switch, "link", "set", f"trunk{number}", "master", f"rack{number}", "up")
                self._limit(switch, f"trunk{number}", self.trunk)

    def _join(self, switch: str, bridge: str, host: str) -> None:
        space, port = self.space(host), f"p{self.hosts.index(host)}"
        _do("ip", "netns", "add", space)
        _do("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        _do("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _do("ip", "-n", space, "link", "set", link, "up")
        network = ("10.77.0.0/24", "dev", "eth0", "src", self.address(host))
        _do("ip", "-n", space, "route", "change", *network, "congctl", _CONGESTION)
        _do("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        self.set_link(host, self.link)

    def _limit(self, space: str, link: str, rate: int) -> None:
        limit = ("rate", f"{rate}mbit", "burst", f"{self.burst}kb", "latency", f"{self.queue}ms")
        _do("tc", "-n", space, "qdisc", "replace", "dev", link, "root", "tbf", *limit)

    def set_link(self, host: str, rate: int) -> None:
        """Give one host's link another rate, both ways."""
        self._limit(self.space(host), "eth0", rate)
        self._limit(f"{self.run}-switch", f"p{self.hosts.index(host)}", rate)

    def cut(self, host: str | None = None) -> None:
        """Take down the link of a host, or the trunk between the racks."""
        space, link = (f"{self.run}-switch", "trunk0") if host is None else (self.space(host), "eth0")
        _do("ip", "-n", space, "link", "set", link, "down")

    def part(self, sides: Sequence[Sequence[str]], how: Sequence[str], *, one_way: bool = False) -> None:
        """Have the hosts of each side refuse what those of the others send; ``one_way``: the first side alone does.

        ``how`` is iptables' target: ``DROP``, or ``REJECT --reject-with tcp-reset``.
        """
        for side in sides[:1] if one_way else sides:
            for host in side:
                for other in {name for names in sides for name in names}.difference(side):
                    rule = ("-A", "INPUT", "-s", self.address(other), "-p", "tcp", "-j", *how)
                    _do("ip", "netns", "exec", self.space(host), "iptables", "-w", *rule)

    def enter(self, rank: int) -> None:
        """Make this process a rank: on its host, with the variables of a launcher."""
        host = self.hosts[rank // self.ranks]
        _enter(self.space(host), host)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(rank % self.ranks),
            LOCAL_WORLD_SIZE=str(self.ranks),
            MASTER_ADDR=self.address(self.hosts[0]),
            MASTER_PORT=str(_PORT),
            GLOO_SOCKET_IFNAME="eth0",
        )

    def remove(self) -> None:
        """Leave nothing behind."""
        for space in (*map(self.space, self.hosts), f"{self.run}-switch"):
            with suppress(subprocess.SubprocessError):
                _do("ip", "netns", "del", space)

    def on_ranks(self, work: Callable[..., Any], *arguments: Any, limit: float = 600.0) -> list[Any]:
        """Run ``work(*arguments)`` on each rank of an initialised world; return the values, raise an error of one."""

        @contextmanager
        def world(rank: int) -> Iterator[None]:
            import torch

            import rankmesh as rm

            self.enter(rank)
            torch.set_num_threads(1)
            with rm.init("gloo", timeout=120):
                yield

        return list(run_ranks(self.size, lambda _: work(*arguments), world, limit=limit).checked())


def _enter(space: str, name: str) -> None:
    """Move this process into a namespace, and give its host a name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}", "rb") as file:  # noqa: PTH123  - a descriptor is what the call takes
        if libc.setns(file.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    if libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), f"cannot call this host {name}")


@contextmanager
def emulated(
    racks: Sequence[Sequence[str]],
    *,
    ranks: int = 2,
    link: int = 200,
    trunk: int | None = None,
    burst: int = 64,
    queue: int = 50,
) -> Iterator[Emulated]:
    """Emulate a cluster inside this block."""
    made = Emulated(racks, ranks, link, trunk, burst, queue)
    try:
        made.build()
        yield made
    finally:
        made.remove()
