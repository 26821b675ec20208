"""Run a command in a sandbox, and end all its processes. A program; the standard library alone.

```
sandbox.py KIND FOLDER GRACE LIMIT WRITABLE... -- VISIBLE... -- COMMAND...

namespaces   user, mount, network, pid and ipc namespaces are made here: no network, every file system read-only but
             FOLDER; what is written below WRITABLE, and outside of the system's own folders, goes to overlays in memory
bubblewrap   bubblewrap has made the namespaces
none         no sandbox: only the processes and the size of files are limited
```

A read-only mount does not stop a process from talking to sockets, FIFOs and devices of the host. So `/run` and `/tmp`
are empty in a sandbox but for FOLDER, WRITABLE and VISIBLE, `/dev` has harmless devices, `/proc` is read-only, and the
only sockets that can be made are those that the network namespace contains: IP and netlink. FOLDER/standin is mounted
over each program that FOLDER/originals.json names, and the program where it says.

GRACE: seconds that background processes may take after COMMAND has ended. LIMIT: bytes that one file may grow to.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 0x40000, 2, 4
# Folders of the host that hold the sockets and FIFOs of its services.
HIDDEN = ("/run", "/var/run", "/tmp")  # noqa: S108
_DEVICES = re.compile(r"null|zero|full|random|urandom|nvidia.*|kfd|dri")
_RDONLY, _RECURSIVE, _HERE, _MOUNT_SETATTR, _DETACH = 1, 0x8000, -100, 442, 2
# Folders of the root that no overlay is laid over.
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr", "var"}
_DEATH_SIGNAL, _NAME, _DROP, _NO_NEW, _SUBREAPER, _LAST_CAPABILITY = 1, 15, 24, 38, 36, 63
# By machine: the architecture that seccomp reports, the number of socket(2), the first number of another interface.
_CALLS = {"x86_64": (0xC000003E, 41, 0x40000000), "aarch64": (0xC00000B7, 198, 0xFFFFFFFF)}
_SECCOMP, _FILTER, _IO_URING, _INET, _INET6, _NETLINK = 22, 2, 425, 2, 10, 16
_IMPOSSIBLE = 125
_LIBC = ctypes.CDLL(None, use_errno=True)


def _call(done: int) -> None:
    if done != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _control(option: int, value: int | bytes) -> None:
    """One setting of this process; there are none of these beside Linux."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    _call(_LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None))


def _read_only(path: str, on: bool, flags: int = 0) -> None:
    attributes = struct.pack("QQQQ", _RDONLY if on else 0, 0 if on else _RDONLY, 0, 0)
    _call(_LIBC.syscall(_MOUNT_SETATTR, _HERE, path.encode(), flags, attributes, len(attributes)))


def enter(folder: str, writable: list[str], visible: list[str]) -> None:
    """Make the namespaces. Raises ``OSError`` where the machine does not let this user."""
    user, group = os.getuid(), os.getgid()
    _call(_LIBC.unshare(_NEWUSER | _NEWNS | _NEWIPC | _NEWNET | _NEWPID))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    _mount("none", "/", flags=_REC | _PRIVATE)
    _mount(folder, folder, flags=_BIND)
    memory = f"{folder}/memory"
    Path(memory).mkdir(exist_ok=True)
    _mount("tmpfs", memory, "tmpfs", _NOSUID | _NODEV, "size=256m,mode=700")
    _read_only("/", True, _RECURSIVE)
    for path in (folder, memory):
        _read_only(path, False)
    hidden = _hide([folder, *writable, *visible])
    _devices(f"{memory}/dev")
    others = [str(path) for path in Path("/").iterdir() if path.name not in _SYSTEM and not path.is_symlink()]
    done: list[str] = []
    for number, path in enumerate(sorted({*writable, *others} - hidden, key=len)):
        if not any(f"{path}/".startswith(f"{outer}/") for outer in done):
            with suppress(OSError):  # the folder stays read-only
                _overlay(path, f"{memory}/{number}")
                done.append(path)
    kept = json.loads(Path(folder, "originals.json").read_text(encoding="utf-8"))
    for program, original in kept.items():
        _mount(program, original, flags=_BIND)
    for program in kept:
        _mount(f"{folder}/standin", program, flags=_BIND)


def _hide(visible: list[str]) -> set[str]:
    """Lay an empty folder in memory over each hidden one, with the visible folders in it; return which it is done for.

    A folder that is itself visible, since the script is in it, keeps its files.
    """
    found = {path for path in HIDDEN if Path(path).is_dir() and not Path(path).is_symlink()} - {*visible}
    for hidden in found:
        inside = sorted({path for path in visible if path.startswith(f"{hidden}/") and Path(path).is_dir()}, key=len)
        kept = {path: os.open(path, os.O_PATH) for path in inside}
        _mount("tmpfs", hidden, "tmpfs", _NOSUID | _NODEV, "size=64m,mode=1777")
        for path, descriptor in kept.items():
            Path(path).mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{descriptor}", path, flags=_BIND | _REC)
            os.close(descriptor)
    return found


def _devices(place: str) -> None:
    """Replace the devices of the host by those that change nothing, and those that count GPUs."""
    Path(place, "shm").mkdir(parents=True)
    for device in (path for path in Path("/dev").iterdir() if _DEVICES.fullmatch(path.name)):
        target = Path(place, device.name)
        target.mkdir() if device.is_dir() else target.touch()
        _mount(str(device), str(target), flags=_BIND | _REC)
    for name, descriptor in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        Path(place, name).symlink_to(f"/proc/self/fd{descriptor}")
    _mount(place, "/dev", flags=_BIND | _REC)


def _overlay(path: str, memory: str) -> None:
    """Let what is written below a folder go to memory; what is mounted below it stays as it is."""
    for name in ("upper", "work"):
        Path(memory, name).mkdir(parents=True)
    below: list[str] = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mounted = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        if mounted.startswith(f"{path.rstrip('/')}/") and not any(mounted.startswith(f"{one}/") for one in below):
            below.append(mounted)
    kept = {mounted: os.open(mounted, os.O_PATH) for mounted in dict.fromkeys(below)}
    try:
        options = f"lowerdir={path},upperdir={memory}/upper,workdir={memory}/work,userxattr"
        _mount("overlay", path, "overlay", _NOSUID, options)
        try:
            for mounted, descriptor in kept.items():
                _mount(f"/proc/self/fd/{descriptor}", mounted, flags=_BIND | _REC)
        except OSError:
            _call(_LIBC.umount2(path.encode(), _DETACH))
            raise
    finally:
        for descriptor in kept.values():
            os.close(descriptor)


def _refuse_sockets() -> None:
    """Allow sockets of IP and netlink only: the network namespace contains no paths of Unix sockets, and no VSOCK.

    Raises ``OSError`` where the kernel filters no calls. On machines of other kinds only the folders are hidden.
    """
    if sys.platform != "linux" or os.uname().machine not in _CALLS:
        return
    architecture, socket, foreign = _CALLS[os.uname().machine]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    steps = [  # code, steps to skip if true, if false, operand
        (load, 0, 0, 4),
        (equal, 0, 10, architecture),
        (load, 0, 0, 0),
        (at_least, 8, 0, foreign),
        (equal, 6, 0, _IO_URING),
        (equal, 0, 4, socket),
        (load, 0, 0, 16),
        (equal, 2, 0, _INET),
        (equal, 1, 0, _INET6),
        (equal, 0, 1, _NETLINK),
        (end, 0, 0, 0x7FFF0000),  # allowed
        (end, 0, 0, 0x50000 | errno.EACCES),
        (end, 0, 0, 0x80000000),  # the process ends: calls by another interface
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    _call(_LIBC.prctl(_SECCOMP, _FILTER, program, 0, 0))


def _run(command: list[str], kind: str, grace: float, limit: int) -> int:
    """Run a command to its end, and the processes that it leaves for so long; its exit status."""
    _control(_SUBREAPER, 1)
    first = os.fork()
    if first == 0:
        for number in range(_LAST_CAPABILITY + 1):
            _control(_DROP, number)
        _control(_NO_NEW, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if kind != "none":
            try:
                _refuse_sockets()
            except OSError:
                os._exit(_IMPOSSIBLE)
        os.execvp(command[0], command)  # noqa: S606  - the script that the user asked to run
    status, until = 0, 0.0
    while True:
        try:
            child, ended = os.waitpid(-1, os.WNOHANG if until else 0)
        except ChildProcessError:
            return status
        if child == first:
            status, until = os.waitstatus_to_exitcode(ended), time.monotonic() + grace
        elif child == 0:
            if time.monotonic() > until:
                return status
            time.sleep(0.01)


def main() -> int:
    """Enter, run, end; 125 where the sandbox cannot be made."""
    kind, folder, grace, limit, *rest = sys.argv[1:]
    writable, rest = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    visible, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    _control(_DEATH_SIGNAL, signal.SIGKILL)
    _control(_NAME, b"rankmesh")  # scripts clean up with `pkill python`, which is not for this process
    if kind != "namespaces":
        return _run(command, kind, float(grace), int(limit))
    here = Path.cwd()
    try:
        enter(folder, writable, visible)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return _IMPOSSIBLE
    inner = os.fork()
    if inner == 0:  # the first process of the pid namespace: with it all others end
        _control(_DEATH_SIGNAL, signal.SIGKILL)
        with suppress(OSError):  # a container may hide parts of /proc, and then lets nobody mount another
            _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _RDONLY)
        os.chdir(here)
        os._exit(_run(command, kind, float(grace), int(limit)) & 0xFF)
    return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
