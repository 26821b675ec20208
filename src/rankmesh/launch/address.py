"""The rendezvous address: a name that resolves, or the address that Slurm has of the node.

```
getaddrinfo(node1)          resolves                    the launch as it is
scontrol getaddrs node1     node1: 10.0.0.1:6818        the launch with 10.0.0.1, since Slurm 23.11
scontrol show node node1    NodeAddr=10.0.0.1 ...       the launch with 10.0.0.1, of any Slurm
```
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankmesh.errors import ConnectError, quoted
from rankmesh.launch.started import Launch

__all__ = ["addresses_of", "family_of", "host_and_port", "is_local", "name_of", "resolved"]

# How long Slurm may take to answer, in seconds: a busy controller answers late, and one that is gone never.
_SLURM = 5.0
_NAME = re.compile(r"\w[\w.-]*")
_ADDRESS = re.compile(r"^\S+: \[?([^\]\s]+?)\]?:[0-9]+$", re.MULTILINE)
_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


def resolved(launch: Launch, seconds: float = _SLURM, environment: Mapping[str, str] = os.environ) -> Launch:
    """Return the launch with a rendezvous address that resolves on this host, inside a Slurm job by asking Slurm.

    Asking Slurm takes ``seconds`` at most. Raises ``ConnectError`` where the place does not resolve.
    """
    try:
        addresses_of(launch.address, launch.port)
    except (OSError, UnicodeError) as error:
        why = f"({getattr(error, 'strerror', None) or error})"
        if environment.get("SLURM_JOB_ID"):
            address, problem = _of_slurm(str(launch.address), min(seconds, _SLURM))
            if address is not None:
                return replace(launch, address=address)
            why = f"{why}, and Slurm does not know its address ({problem})"
        name = next((f"{name}=" for name in ("MASTER_ADDR", "PET_MASTER_ADDR") if name in launch.evidence), "host ")
        raise ConnectError(
            f"{name}{launch.address} on rank {launch.rank} does not resolve {why}; set MASTER_ADDR to a name or an "
            "address by which every rank reaches the host of rank 0",
            address=launch.address,
            rank=launch.rank,
        ) from error
    return launch


def _of_slurm(node: str, seconds: float) -> tuple[str | None, str]:
    """Return the address that Slurm has of a node, else None and why."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None, "scontrol is not on the PATH"
    if not _NAME.fullmatch(node):
        return None, f"{quoted(node)} is not the name of a node"
    end = time.monotonic() + seconds
    for asked, pattern in ((("getaddrs", node), _ADDRESS), (("show", "node", node), _NODE_ADDRESS)):
        try:
            done = subprocess.run(  # noqa: S603  - Slurm's own command, with a name that was checked
                (scontrol, *asked),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(0.1, end - time.monotonic()),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            return None, f"scontrol did not answer within {seconds:.3g} s" if late else f"scontrol: {error}"
        found = pattern.search(done.stdout.decode("utf-8", "replace"))
        if found is not None and _resolves(found[1]):
            return found[1], ""
    return None, f"scontrol show node {node} names no address that resolves"


def host_and_port(text: str) -> tuple[str, int] | None:
    """Return the host and the port that an address names, None if it does not; IPv6 with brackets or without.

    >>> host_and_port("10.0.0.1:29700"), host_and_port("[::1]:29700"), host_and_port("node1")
    (('10.0.0.1', 29700), ('::1', 29700), None)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in range(1, 1 << 16):
        return None
    return (host[1:-1] if host[0] == "[" and host[-1] == "]" else host), int(port)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address.

    >>> family_of("::1").name, family_of("10.0.0.1").name
    ('AF_INET6', 'AF_INET')
    """
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def name_of(host: str | None) -> str | bytes | None:
    """Return a host as ``socket`` takes it best: of a text it loads Python's IDNA codec, which takes 8 ms.

    >>> name_of("node1"), name_of("bücher.example")
    (b'node1', 'bücher.example')
    """
    return host.encode() if host is not None and host.isascii() else host


def addresses_of(host: str | None, port: int | None = None) -> list[tuple[int, Any]]:
    """Return the addresses of a host by which TCP reaches it, each with its family; raise ``OSError`` without one."""
    found = socket.getaddrinfo(name_of(host), port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def is_local(family: int, place: Any) -> bool:
    """Return whether an address with port 0, as ``getaddrinfo`` gives it, is one of this host's."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _resolves(address: str) -> bool:
    if address in ("0.0.0.0", "::"):  # noqa: S104  - a node in the cloud that has none yet
        return False
    try:
        addresses_of(address)
    except (OSError, UnicodeError):
        return False
    return True
