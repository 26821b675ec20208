"""Private folders: other users of the host can neither read what is in them nor prepare it.

```
created    the folder with mode 0700, its files with 0600
accepted   a folder of this user that nobody else may enter; any other one is refused, as ``Unreadable``
read       regular files of this user, at most so many bytes; a FIFO, a device or a symbolic link is refused at once
```

>>> PrivateFolder("/")  # doctest: +ELLIPSIS
Traceback (most recent call last):
rankmesh.core.documents.Unreadable: ...
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from rankmesh.core.documents import Unreadable, check_regular, limited, opened

__all__ = ["PrivateFolder", "open_file", "write_whole"]


class PrivateFolder(ExitStack):
    """A private folder that is there, at a path or ``within`` another one; it is open until ``close()``.

    Every call works on the folder that was opened, whatever takes its place at the path meanwhile. Raises
    ``Unreadable`` for a folder that is not private, ``FileNotFoundError`` where there is none.
    """

    def __init__(self, path: str | Path, within: PrivateFolder | None = None) -> None:
        super().__init__()
        folder = None if within is None else within.descriptor
        self.descriptor: int = opened(path, os.O_RDONLY | os.O_DIRECTORY, _check_folder, folder=folder, follow=False)
        self.callback(os.close, self.descriptor)

    @classmethod
    def create(cls, path: str | Path, within: PrivateFolder | None = None) -> PrivateFolder:
        """Open a private folder, after making it where there is none."""
        with suppress(FileExistsError):
            if within is None:
                Path(path).mkdir(0o700, parents=True)
            else:
                os.mkdir(path, 0o700, dir_fd=within.descriptor)
        return cls(path, within)

    def names(self) -> list[str]:
        """Return the names in the folder, in any order."""
        return os.listdir(self.descriptor)  # noqa: PTH208  - a Path has no descriptor

    def read(self, name: str, size: int) -> bytes:
        """Return the bytes of a file. Raises ``Unreadable`` where it has more than ``size``, or is not this user's."""
        with os.fdopen(self.open(name), "rb") as file:
            return limited(file, size)

    def open(self, name: str) -> int:
        """Return a descriptor to read a file. Raises ``Unreadable`` for anything but a regular file of this user."""
        return open_file(name, self.descriptor)

    def create_file(self, name: str) -> int:
        """Return a descriptor to read and write a new file. Raises ``FileExistsError`` where there is one."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there whole or not at all."""
        write_whole(name, content, folder=self.descriptor)

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


def _check_folder(found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise Unreadable("is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is not a folder")
    _check_owner(found)
    if found.st_mode & 0o077:
        raise Unreadable(f"has mode {stat.S_IMODE(found.st_mode):04o}, by which other users may enter it")


def _check_file(found: os.stat_result) -> None:
    check_regular(found)
    _check_owner(found)


def _check_owner(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Unreadable(f"belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")


def open_file(path: str | Path, folder: int | None = None) -> int:
    """Return a descriptor to read a file of this user, whose path may be relative to an open ``folder``."""
    return opened(path, os.O_RDONLY, _check_file, folder=folder, follow=False)


def write_whole(path: str | Path, content: bytes, *, folder: int | None = None, mode: int = 0o600) -> None:
    """Write a file with this mode beside its place and move it there: it is there whole or not at all.

    Its path may be relative to an open ``folder``.
    """
    base, name = os.path.split(path)
    draft = os.path.join(base, f".{name}.{os.getpid()}.{time.monotonic_ns()}")  # noqa: PTH118
    try:
        # What somebody else has put at the place of the draft, such as a link, is not written to.
        made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        with os.fdopen(made, "wb") as file:
            file.write(content)
        os.replace(draft, path, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
