"""A folder that the ranks share as a side channel.

```
FOLDER/name-0-arrived/3       rank 3 has arrived: a set is a folder, with an empty file for each participant
FOLDER/name-0-texts/3-0       the first text of rank 3
FOLDER/name-epoch/0           a number is how many files there are
```

A text is written beside its place and then linked there, so that it is there whole or not at all. The folder is private
(`rankmesh.core.private`): the ranks are processes of one user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rankmesh.core.documents import Unreadable
from rankmesh.core.private import PrivateFolder
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
        """Return this channel: a folder has no connection."""
        return self

    @contextmanager
    def _opened(self, *sets: str, create: bool = False) -> Iterator[PrivateFolder]:
        """Return the folder, or the one of a set in it. ``FileNotFoundError`` where there is none."""
        make = PrivateFolder.create if create else PrivateFolder
        try:
            with ExitStack() as stack:
                folder = stack.enter_context(make(self._folder))
                for key in sets:
                    folder = stack.enter_context(make(_name(key), folder))
                yield folder
        except (FileNotFoundError, FileExistsError):
            raise
        except (Unreadable, OSError) as error:
            raise ChannelLost(f"{self._folder} {error}") from error

    # -- sets ---------------------------------------------------------------------------------------------------

    def arrive(self, key: str, participants: Sequence[int], rank: int, *, asks: bool = True) -> bool:
        """Add a participant to a set; whether the set is complete by that, where it ``asks``: the folder is listed."""
        self._create(str(rank), "", key)
        return asks and not self.absent(key, participants)

    def absent(self, key: str, participants: Sequence[int]) -> list[int]:
        here = set(self._names(key))
        return [rank for rank in participants if str(rank) not in here]

    # -- texts --------------------------------------------------------------------------------------------------

    def post(self, key: str, rank: int, text: str) -> None:
        number = 0
        while not self._create(f"{rank}-{number}", text, key):
            number += 1

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        places = []
        for name in self._names(key):
            rank, _, number = name.partition("-")
            if not (rank.isdecimal() and number.isdecimal()):
                raise foreign(f"{self._folder}/{_name(key)}", f"a file {name[:60]!r}, which is not a text of a rank")
            places.append((int(rank), int(number), name))
        found: dict[int, list[str]] = {}
        for writer, _, name in sorted(places):
            if (text := self._text(name, key)) is not None:
                found.setdefault(writer, []).append(text)
        return found

    def first(self, key: str, text: str) -> str:
        self._create(_name(key), text)
        return self.read(key) or ""

    announce = first  # who waits looks from time to time

    def write(self, key: str, text: str) -> None:
        self._place(_name(key), text, os.replace)

    def read(self, key: str) -> str | None:
        return self._text(_name(key))

    def wait(self, key: str, seconds: float) -> bool:
        started = time.monotonic()
        while _name(key) not in self._names():
            waited = time.monotonic() - started
            if waited >= seconds:
                return False
            time.sleep(min(max(waited / 20, _SHORTEST), _LONGEST, seconds - waited))
        return True

    # -- numbers ------------------------------------------------------------------------------------------------

    def advance(self, key: str, number: int) -> None:
        self._create(str(number), "", key)

    def tick(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0, a file for each one; its new value."""
        for _ in range(amount):
            self._create(f"{os.getpid()}-{time.monotonic_ns()}", "", key)
        for name in self._names(key)[: max(-amount, 0)]:
            with suppress(FileNotFoundError), self._opened(key) as folder:
                folder.remove(name)
        return len(self._names(key))

    # -- files --------------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        with suppress(FileNotFoundError), self._opened() as folder:
            for key in (*keys, *sets):
                with suppress(OSError):
                    folder.remove(_name(key))
        with suppress(OSError):
            self._folder.rmdir()

    def _names(self, *sets: str) -> list[str]:
        with suppress(FileNotFoundError), self._opened(*sets) as folder:
            return [name for name in folder.names() if not name.startswith(".")]
        return []

    def _text(self, name: str, *sets: str) -> str | None:
        with suppress(FileNotFoundError), self._opened(*sets) as folder:
            try:
                return folder.read(name, LARGEST).decode(errors="replace")
            except Unreadable as error:
                raise foreign(f"{self._folder}/{name}", f"what {error}") from error
            except OSError:
                return None
        return None

    def _create(self, name: str, text: str, *sets: str) -> bool:
        """Make a file with this text, whole or not at all; whether there was none."""
        try:
            self._place(name, text, os.link, *sets)
        except FileExistsError:
            return False
        return True

    def _place(self, name: str, text: str, move: Callable[..., object], *sets: str) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                with self._opened(*sets, create=True) as folder:
                    folder.write(name, text.encode(), move)
            except FileNotFoundError as error:  # noqa: PERF203
                # Another rank may have removed the folder, which was empty between two of these calls.
                if attempt == _ATTEMPTS - 1:
                    raise ChannelLost(f"{self._folder}: {error.strerror}") from error
            else:
                return


def _name(key: str) -> str:
    return key.replace("/", "-")
