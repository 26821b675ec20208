"""Where a script is run: its own namespaces, and an end for all its processes. A program; the standard library alone.

```
sandbox.py own|given FOLDER GRACE LIMIT WRITABLE... -- COMMAND...

own      user, mount, network, pid and ipc namespaces are made here: no network, every file system read-only but FOLDER;
         what is written below WRITABLE goes to an overlay in memory
given    the namespaces are those of the caller: bubblewrap's, or none
```

GRACE: seconds that background processes may take after COMMAND has ended. LIMIT: bytes that one file may grow to.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 0x40000, 2, 4
_RDONLY, _RECURSIVE, _HERE, _MOUNT_SETATTR = 1, 0x8000, -100, 442
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
    kept = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    for number, path in enumerate(writable):
        upper, work = f"{memory}/upper{number}", f"{memory}/work{number}"
        Path(upper).mkdir()
        Path(work).mkdir()
        try:
            _mount("overlay", path, "overlay", _NOSUID, f"lowerdir={path},upperdir={upper},workdir={work},userxattr")
        except OSError:
            continue  # the folder stays read-only
        if folder.startswith(f"{path.rstrip('/')}/"):  # our own folder is below, and the overlay hides it
            _mount(f"/proc/self/fd/{kept}", folder, flags=_BIND | _REC)
    os.close(kept)


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
