"""Private folders: other users of the host can neither read what is in them nor prepare it.

```
created    the folder with mode 0700, its files with 0600
accepted   a folder of this user that nobody else may enter; any other one is refused, as ``Unreadable``
read       regular files of this user, at most so many bytes; a FIFO, a device or a symbolic link is refused at once
```

A folder is opened once, and every call works on that folder, whatever takes its place at the path meanwhile.

>>> PrivateFolder("/")  # doctest: +ELLIPSIS
Traceback (most recent call last):
rankmesh.core.documents.Unreadable: ...
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankmesh.core.documents import Unreadable, check_regular, limited, opened

__all__ = ["PrivateFolder", "make_folder", "open_file", "sync_folder", "write_whole"]


class PrivateFolder:
    """A private folder that is there, at a path or ``within`` another one. Close it, or use it as a context manager.

    Raises ``Unreadable`` for a folder that is not private, ``FileNotFoundError`` where there is none.
    """

    def __init__(self, path: str | Path, within: PrivateFolder | None = None) -> None:
        folder = None if within is None else within.descriptor
        self.descriptor: int = opened(path, os.O_RDONLY | os.O_DIRECTORY, _check_folder, folder=folder, follow=False)

    @classmethod
    def create(cls, path: str | Path, within: PrivateFolder | None = None) -> PrivateFolder:
        """Open a private folder, after making it where there is none."""
        if within is None:
            make_folder(Path(path))
        else:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=within.descriptor)
        return cls(path, within)

    def names(self) -> list[str]:
        """The names in the folder, in any order."""
        return os.listdir(self.descriptor)  # noqa: PTH208  - a Path has no descriptor

    def has(self, name: str) -> bool:
        """Whether there is something of a name."""
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return True
        return False

    def open(self, name: str) -> int:
        """A descriptor to read a file. Raises ``Unreadable`` for anything but a regular file of this user."""
        return open_file(name, self.descriptor)

    def read(self, name: str, size: int, start: int = 0) -> bytes:
        """The bytes of a file from ``start`` on. Raises ``Unreadable`` where these are more than ``size``."""
        with os.fdopen(self.open(name), "rb") as file:
            file.seek(start)
            return limited(file, size)

    def create_file(self, name: str) -> int:
        """A descriptor to read and write a new file. Raises ``FileExistsError`` where there is one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self.descriptor)

    def write(self, name: str, content: bytes, move: Callable[..., object] = os.replace) -> None:
        """Write a file that is there whole or not at all; ``move`` is ``os.link`` to refuse to replace one."""
        write_whole(name, content, folder=self.descriptor, mode=0o600, move=move)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with the files in it, if it is there."""
        with suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except (IsADirectoryError, PermissionError):
                with PrivateFolder(name, self) as folder:
                    for each in folder.names():
                        folder.remove(each)
                os.rmdir(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Close the folder; it is closed once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; one that is there stays as it is."""
    with suppress(FileExistsError):
        try:
            path.mkdir(0o700)
        except FileNotFoundError:
            make_folder(path.parent)
            path.mkdir(0o700)


def open_file(path: str | Path, folder: int | None = None) -> int:
    """A descriptor to read a file, which may be relative to an open ``folder``.

    Raises ``Unreadable`` for anything but a regular file of this user.
    """
    return opened(path, os.O_RDONLY, _check_file, folder=folder, follow=False)


def _check_folder(found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise Unreadable("is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is not a folder")
    _check_owner(found)
    if found.st_mode & 0o077:
        raise Unreadable(f"has mode {stat.S_IMODE(found.st_mode):04o}, by which other users may enter it")


def _check_file(found: os.stat_result) -> None:
    check_regular(found.st_mode)
    _check_owner(found)


def _check_owner(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Unreadable(f"belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")


def write_whole(
    path: str | Path,
    content: bytes,
    *,
    folder: int | None = None,
    mode: int = 0o666,
    move: Callable[..., object] = os.replace,
    durable: bool = False,
) -> None:
    """Write a file beside its place and move it there: it is there whole or not at all.

    Its path may be relative to an open ``folder``. Whatever is at the place of the draft is never written to.
    ``durable``: the same if the machine fails at any moment; once this returns, the file is on the disk.
    """
    base, name = os.path.split(path)
    draft = os.path.join(base, f".{name}.{os.getpid()}.{time.monotonic_ns()}")  # noqa: PTH118
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(draft, flags, mode, dir_fd=folder), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        move(draft, path, src_dir_fd=folder, dst_dir_fd=folder)
        if durable:
            sync_folder(base, folder)
    finally:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)


def sync_folder(path: str | Path, folder: int | None = None) -> None:
    """Have the names in a folder written to the disk, where its file system can."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
