"""A folder that the ranks share as a side channel.

```
FOLDER/name-0-arrived/3       rank 3 has arrived: a set is a folder, with an empty file for each participant
FOLDER/name-0-texts/3-0       the first text of rank 3
FOLDER/name-epoch/0           a number is how many files there are
```

A text is written beside its place and then linked there, so that it is there whole or not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rankmesh.rendezvous.channel import LARGEST, ChannelLost, foreign

__all__ = ["FolderChannel"]

_SHORTEST, _LONGEST = 0.001, 0.2
_ATTEMPTS = 20


class FolderChannel:
    """The keys of one job in a folder; made when it is first written to, removed with its last key."""

    remote = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def again(self) -> FolderChannel:
        """The same folder."""
        return self

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    # -- sets ---------------------------------------------------------------------------------------------------

    def arrive(self, key: str, participants: Sequence[int], rank: int, *, asks: bool = True) -> bool:
        """Add a participant to a set; whether the set is complete by that, where it ``asks``: the folder is listed."""
        self._create(self._path(key) / str(rank), "")
        return asks and not self.absent(key, participants)

    def absent(self, key: str, participants: Sequence[int]) -> list[int]:
        here = set(self._names(key))
        return [rank for rank in participants if str(rank) not in here]

    # -- texts --------------------------------------------------------------------------------------------------

    def post(self, key: str, rank: int, text: str) -> None:
        number = 0
        while not self._create(self._path(key) / f"{rank}-{number}", text):
            number += 1

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        places = []
        for name in self._names(key):
            rank, _, number = name.partition("-")
            if not (rank.isdecimal() and number.isdecimal()):
                raise foreign(str(self._path(key)), f"a file {name[:60]!r}, which is no text of a rank")
            places.append((int(rank), int(number), self._path(key) / name))
        found: dict[int, list[str]] = {}
        for writer, _, path in sorted(places):
            if (text := self._text(path)) is not None:
                found.setdefault(writer, []).append(text)
        return found

    def first(self, key: str, text: str) -> str:
        self._create(self._path(key), text)
        return self.read(key) or ""

    announce = first  # who waits looks from time to time

    def write(self, key: str, text: str) -> None:
        self._place(self._path(key), text, os.replace)

    def read(self, key: str) -> str | None:
        return self._text(self._path(key))

    def wait(self, key: str, seconds: float) -> bool:
        path, started = self._path(key), time.monotonic()
        while not path.exists():
            waited = time.monotonic() - started
            if waited >= seconds:
                return False
            time.sleep(min(max(waited / 20, _SHORTEST), _LONGEST, seconds - waited))
        return True

    # -- numbers ------------------------------------------------------------------------------------------------

    def advance(self, key: str, number: int) -> None:
        self._create(self._path(key) / str(number), "")

    def tick(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0, a file for each one; its new value."""
        for _ in range(amount):
            self._create(self._path(key) / f"{os.getpid()}-{time.monotonic_ns()}", "")
        for name in self._names(key)[: max(-amount, 0)]:
            (self._path(key) / name).unlink(missing_ok=True)
        return len(self._names(key))

    # -- files --------------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        for key in (*keys, *sets):
            path = self._path(key)
            for name in self._names(key):
                with suppress(OSError):
                    (path / name).unlink()
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    def _names(self, key: str) -> list[str]:
        try:
            return [entry.name for entry in self._path(key).iterdir() if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ChannelLost(f"{self._path(key)}: {error.strerror}") from error

    def _text(self, path: Path) -> str | None:
        try:
            size = path.stat().st_size
            if size > LARGEST:
                raise foreign(str(path), f"{size} bytes; at most {LARGEST} are read")
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def _create(self, path: Path, text: str) -> bool:
        """Make a file with this text, whole or not at all; whether there was none."""
        try:
            self._place(path, text, os.link)
        except FileExistsError:
            return False
        return True

    def _place(self, path: Path, text: str, move: Callable[[Path, Path], object]) -> None:
        for attempt in range(_ATTEMPTS):
            draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            try:
                draft.parent.mkdir(parents=True, exist_ok=True)
                draft.write_text(text, encoding="utf-8")
                move(draft, path)
            except FileExistsError:
                raise
            except OSError as error:
                # Another rank may have removed the folder, which was empty between two of these calls.
                if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    raise ChannelLost(f"{path}: {error.strerror}") from error
            else:
                return
            finally:
                with suppress(OSError):
                    draft.unlink()
