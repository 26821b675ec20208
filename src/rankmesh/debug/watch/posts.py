"""Where ranks leave word for each other while nothing else works: a folder, the store, or both.

```
             folder (shared by all)         store (a connection of its own)
ask          .watch/TOKEN/ask-0             ask/0          a rank asks all for their recordings
said         .../said-0-3                   said/0         who has spoken: the store tells all of them in one answer
claim        .../gather-0, made once        gather/0       who gathers
```

Neither is relied on: the store goes with rank 0, and a folder may be another one on each host. What thousands of ranks
ask is one question each, whatever the size of their world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # absent from its __all__

__all__ = ["FolderPost", "StorePost"]

_Result = TypeVar("_Result")

# Seconds that a store may take to answer.
_PATIENT = 5.0


class FolderPost:
    """Word in a folder."""

    def __init__(self, folder: Path, token: str) -> None:
        self._place = folder / ".watch" / token

    def put(self, key: str, content: bytes = b"") -> None:
        """Leave word under a key."""
        _tried(lambda: self._made(key).write_bytes(content), 0)

    def get(self, key: str) -> bytes | None:
        """The word under a key, None where there is none."""
        return _tried(lambda: self._path(key).read_bytes(), None)

    def has(self, key: str) -> bool:
        """Whether there is word under a key."""
        return _tried(lambda: self._path(key).exists(), False)

    def join(self, key: str, rank: int) -> None:
        """Be one of those who have joined under a key."""
        self.put(f"{key}/{rank}")

    def count(self, key: str) -> int | None:
        """How many have joined; None where that cannot be known."""
        joined = self.joined(key)
        return None if joined is None else len(joined)

    def joined(self, key: str) -> set[int] | None:
        """Who has joined; None where that cannot be known."""
        start = f"{self._path(key).name}-"
        return _tried(lambda: {int(path.name[len(start) :]) for path in self._place.glob(f"{start}*")}, None)

    def forget(self, key: str, rank: int, *, shared: bool) -> None:
        """Take away that this rank has joined; each has a file of its own, and they share none."""
        self.clear([f"{key}/{rank}"])

    def claim(self, key: str) -> bool | None:
        """Whether this rank is the first to claim a key; None where that cannot be known."""
        try:
            self._made(key).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return None
        return True

    def clear(self, keys: Iterable[str]) -> None:
        """Take away what was left under these keys, and the folders with the last of them."""
        for key in keys:
            _tried(lambda key=key: self._path(key).unlink(missing_ok=True), None)  # type: ignore[misc]
        for folder in (self._place, self._place.parent):
            _tried(folder.rmdir, None)

    def _made(self, key: str) -> Path:
        self._place.mkdir(parents=True, exist_ok=True)
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self._place / key.replace("/", "-")


class StorePost:
    """Word in the job's store; one that is gone, or stands still, answers nothing."""

    def __init__(self, store: Any, token: str) -> None:
        self._store = PrefixStore(f"rankmesh/watch/{token}", store)
        self._asking: threading.Thread | None = None

    def _ask(self, act: Callable[[], _Result], otherwise: _Result) -> _Result:
        """What the store answers; while it owes an answer, it is not asked again.

        A thread asks: where the way to the store is cut, torch's client does not come back at its timeout. Where the
        store only stood still for a while, as for a name server that does not answer, it is there again after that.
        """
        answers: list[_Result] = []
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(
                target=_answer, args=(act, answers), daemon=True, name="rankmesh-watch-store"
            )
            self._asking.start()
            self._asking.join(_PATIENT)
        return answers[0] if answers else otherwise

    def put(self, key: str, content: bytes = b"") -> None:
        """Leave word under a key."""
        self._ask(lambda: self._store.set(key, content), None)  # type: ignore[arg-type]  # bytes are taken as they are

    def get(self, key: str) -> bytes | None:
        """The word under a key, None where there is none."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None, None)

    def has(self, key: str) -> bool | None:
        """Whether there is word under a key; None where that cannot be known."""
        return self._ask(lambda: bool(self._store.check([key])), None)

    def join(self, key: str, rank: int) -> None:
        """Be one of those who have joined under a key."""
        self._ask(lambda: self._store.append(key, f"{rank} "), None)  # type: ignore[attr-defined]  # absent from its stub
        self._ask(lambda: self._store.add(f"{key}/count", 1), 0)

    def count(self, key: str) -> int | None:
        """How many have joined, in a few bytes; None where that cannot be known."""
        return self._ask(lambda: int(self._store.add(f"{key}/count", 0)), None)

    def joined(self, key: str) -> set[int] | None:
        """Who has joined; None where that cannot be known."""
        listed = self._ask(lambda: self._store.get(key) if self._store.check([key]) else b"", None)
        return None if listed is None else {int(rank) for rank in listed.split()}

    def forget(self, key: str, rank: int, *, shared: bool) -> None:
        """Take away who has joined, with the last of them."""
        if shared:
            self.clear([key, f"{key}/count"])

    def claim(self, key: str) -> bool | None:
        """Whether this rank is the first to claim a key; None where that cannot be known."""
        return self._ask(lambda: self._store.add(key, 1) == 1, None)

    def clear(self, keys: Iterable[str]) -> None:
        """Take away what was left under these keys."""
        for key in keys:
            self._ask(lambda key=key: self._store.delete_key(key), None)  # type: ignore[misc]


def _answer(act: Callable[[], _Result], answers: list[_Result]) -> None:
    with suppress(RuntimeError):
        answers.append(act())


def _tried(act: Callable[[], _Result], otherwise: _Result) -> _Result:
    """What an act gives, or ``otherwise``: where word is left may be gone, which is no reason to fail."""
    try:
        return act()
    except (OSError, RuntimeError):
        return otherwise
