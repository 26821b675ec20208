"""Where a script is run: its own namespaces, and an end for all its processes. A program; the standard library alone.

```
sandbox.py own|given FOLDER GRACE LIMIT WRITABLE... -- COMMAND...

own      user, mount, network, pid and ipc namespaces are made here: no network, every file system read-only but FOLDER;
         what is written below WRITABLE, and outside of the system's own folders, goes to overlays in memory
given    the namespaces are those of the caller: bubblewrap's, or none
```

GRACE: seconds that background processes may take after COMMAND has ended. LIMIT: bytes that one file may grow to.
"""

from __future__ import annotations

import ctypes
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
_RDONLY, _RECURSIVE, _HERE, _MOUNT_SETATTR, _DETACH = 1, 0x8000, -100, 442, 2
# Folders of the root that no overlay is laid over.
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr", "var"}
_DEATH_SIGNAL, _NAME, _DROP, _NO_NEW, _SUBREAPER, _LAST_CAPABILITY = 1, 15, 24, 38, 36, 63
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


def enter(folder: str, writable: list[str]) -> None:
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
    others = [str(path) for path in Path("/").iterdir() if path.name not in _SYSTEM and not path.is_symlink()]
    done: list[str] = []
    for number, path in enumerate(sorted({*writable, *others}, key=len)):
        if not any(f"{path}/".startswith(f"{outer}/") for outer in done):
            with suppress(OSError):  # the folder stays read-only
                _overlay(path, f"{memory}/{number}")
                done.append(path)


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


def _run(command: list[str], grace: float, limit: int) -> int:
    """Run a command to its end, and the processes that it leaves for so long; its exit status."""
    _control(_SUBREAPER, 1)
    first = os.fork()
    if first == 0:
        for number in range(_LAST_CAPABILITY + 1):
            _control(_DROP, number)
        _control(_NO_NEW, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
    """Enter, run, end; 125 where the namespaces cannot be made."""
    kind, folder, grace, limit, *rest = sys.argv[1:]
    writable, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    _control(_DEATH_SIGNAL, signal.SIGKILL)
    _control(_NAME, b"rankmesh")  # scripts clean up with `pkill python`, which is not for this process
    if kind == "given":
        return _run(command, float(grace), int(limit))
    here = Path.cwd()
    try:
        enter(folder, writable)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 125
    inner = os.fork()
    if inner == 0:  # the first process of the pid namespace: with it all others end
        _control(_DEATH_SIGNAL, signal.SIGKILL)
        with suppress(OSError):  # a container may hide parts of /proc, and then lets nobody mount another
            _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
        os.chdir(here)
        os._exit(_run(command, float(grace), int(limit)) & 0xFF)
    return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
