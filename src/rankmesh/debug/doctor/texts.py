"""Text files of a job: their last part, the process that each line is of, and the rank that a name or prefix states.

```
rank3.txt, stack.3.log, log.3, attempt_0/3/stderr.log      rank 3, by the name of the file or its folder
lora_rank8/train.log                                       no rank: a folder's whole name is a rank's
[rank3]:    File "train.py", line 8 in load                rank 3, by torch's own prefix
[default3]: ..., 3: ..., (Worker pid=71) ...               one process each; its number is perhaps the rank
```

Only a name or a prefix with the word "rank" states the rank. Other numbers may be process ids, hosts or local ranks:
they are ranks if they are about as many as the processes (``ranked``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankmesh.core.documents import Unreadable, open_regular

__all__ = ["Origin", "Text", "head_of", "origin_of", "ranked", "text_of"]

# Bytes that are read of a text, its last ones, and of any file to see what it is; of a line; and ranks of a job.
_SIZE, _HEAD, _LENGTH, _RANKS = 64 << 20, 1 << 12, 1 << 12, 2**20
_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d{0,9}(?:Z|[+-]\d\d:?\d\d)?\]?:? "
_COLOR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_PREFIX = re.compile(
    rf"(?:{_TIME}|\[(?:rank|default)?\d{{1,7}}\]:?[ ]?|[ ]{{0,3}}\d{{1,7}}: "
    r"|\(\w{1,80} ?[^()]{0,200}?pid=\d[^()]{0,200}\) ?|\[pod/[^\]\s]{1,200}\] ?)+"
)
_OF_TIME, _STATED = re.compile(_TIME), re.compile(r"rank[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,9}")
# The whole name: one that only ends in a number is of a run, such as ``lora_rank8``.
_OF_FOLDER = re.compile(r"(?:(?:(?P<rank>rank)|worker|task|proc|r)[-_.=]?)?(?P<number>\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Origin:
    """The origin of lines: the file, the prefix of a process in it, its ``rank`` or a number that may be one.

    ``folder`` is the one that has such files or folders of several processes.
    """

    path: str
    prefix: str = ""
    rank: int | None = None
    number: int | None = None
    folder: str = ""


@dataclass(frozen=True)
class Text:
    """The last part of a text file; ``is_cut``: the file has more before it."""

    path: Path
    content: str
    is_cut: bool = False

    def lines(self, begin: int = 0) -> Iterator[tuple[Origin, str]]:
        """Yield each line from a place on without its prefix, and its origin."""
        known: dict[str, Origin] = {}
        for line in self.content[begin:].splitlines():
            plain = _COLOR.sub("", line[:_LENGTH]) if "\x1b" in line else line[:_LENGTH]
            match = _PREFIX.match(plain)
            prefix = _OF_TIME.sub("", match[0]).strip() if match else ""
            if prefix not in known:
                known[prefix] = origin_of(self.path, prefix)
            yield known[prefix], plain[match.end() :] if match else plain

    def lines_with(self, mark: str) -> Iterator[str]:
        """Yield each line that has these characters, with its prefix."""
        if mark in self.content:
            yield from (line[:_LENGTH] for line in self.content.splitlines() if mark in line)


def head_of(path: Path) -> bytes:
    """Return the first bytes of a regular file; none of anything else, and of one that cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_HEAD)
    except (OSError, Unreadable):
        return b""


def text_of(path: Path) -> Text:
    """Return the last part of a text file; an empty text of anything else, and of one that cannot be read."""
    try:
        with open_regular(path) as file:
            if b"\0" in file.read(_HEAD):
                return Text(path, "")
            size = file.seek(0, 2)
            file.seek(max(0, size - _SIZE))
            return Text(path, file.read(_SIZE).decode("utf-8", "replace"), is_cut=size > _SIZE)
    except (OSError, Unreadable):
        return Text(path, "")


def origin_of(path: Path, prefix: str = "") -> Origin:
    """Return the origin of lines with a prefix, with the rank that it, the file's name or its folder states."""
    folder = _OF_FOLDER.fullmatch(path.parent.name)
    of_folder = [folder["number"]] if folder else []
    stated = _STATED.findall(prefix) or _STATED.findall(path.name) or (of_folder if folder and folder["rank"] else [])
    if stated:
        return Origin(path.name, prefix, int(stated[-1]) if int(stated[-1]) < _RANKS else None)
    numbers = [] if "pid=" in prefix or "pod/" in prefix else _NUMBER.findall(prefix)
    numbers, above = numbers or _NUMBER.findall(path.name), path.parent
    if not numbers and of_folder:
        numbers, above = of_folder, above.parent
    return Origin(path.name, prefix, None, int(numbers[-1]) if numbers else None, str(above))


def ranked(origins: Iterable[Origin], world_size: int = 0) -> dict[Origin, int | None]:
    """Return the rank of each origin; numbers count as ranks if they are about as many as the origins.

    If two files of one name in two folders have one number, the folders are hosts, and the number is not a rank.
    """
    numbers = {one: one.number if one.rank is None else one.rank for one in origins}
    known = {number for number in numbers.values() if number is not None}
    unclear = [one for one in numbers if one.rank is None and one.number is not None]
    in_folders = {(one.folder, _NUMBER.sub("", one.path + one.prefix), one.number) for one in unclear}
    is_of_hosts = len({each[1:] for each in in_folders}) < len(in_folders)
    is_rank = max(known, default=0) < max(2 * len(known), world_size) and not is_of_hosts
    return {one: number if one.rank is not None or is_rank else None for one, number in numbers.items()}
