"""The parents of a YAML: the files that its ``defaults:`` name, whose values count where the file has none.

```
defaults: ../grpo.yaml                     NeMo-RL: a path, relative to the file
defaults: [base, _self_, {model: llama}]   Hydra: base.yaml, this file, model/llama.yaml below the key model
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from rankmesh.core.documents import Budget, Unreadable, read_text
from rankmesh.errors import quoted
from rankmesh.readers.documents import entries
from rankmesh.readers.reading import Entry

__all__ = ["with_parents"]

_FILES = 64
_KEY, _SELF = "defaults", "_self_"
_ITSELF = (_SELF, "", False)


def with_parents(found: list[Entry], path: str) -> list[Entry]:
    """Merge the entries of a file over its parents' entries, which have the line that names the parent.

    Raises ``Unreadable`` for a parent that cannot be read, which is named, and for more than 64 files.
    """
    return _merged(found, Path(path), Budget(_FILES), ())


def _merged(found: list[Entry], path: Path, budget: Budget, below: tuple[Path, ...]) -> list[Entry]:
    listed = next((entry for entry in found if entry.path == (_KEY,)), None)
    if listed is None or not isinstance(listed.value, str | list):
        return found
    values: dict[tuple[str, ...], list[Entry]] = {}
    settings = [entry for entry in found if entry is not listed]
    layers = list(_names(listed))
    for name, key, optional in layers if _ITSELF in layers else [*layers, _ITSELF]:
        if optional and not (path.parent / _file(name)).is_file():
            continue  # Hydra leaves it out
        layer = settings if name == _SELF else _parent(name, key, path, listed, budget, below)
        # A value over a mapping, or a mapping over a value, replaces all of it.
        for at in {entry.path for entry in layer}:
            for other in [old for old in values if old[: len(at)] == at or at[: len(old)] == old]:
                del values[other]
        for entry in layer:
            values.setdefault(entry.path, []).append(entry)
    return [entry for same in values.values() for entry in same]


def _file(name: str) -> str:
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"


def _names(listed: Entry) -> Iterator[tuple[str, str, bool]]:
    """Yield each file that is named, the key that its values are below, and whether it is optional.

    Hydra writes ``group@package: name``, with ``optional`` before the group or the name.
    """
    for item in listed.value if isinstance(listed.value, list) else [listed.value]:
        group, names = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", item)
        for name in names if isinstance(names, list) else [names]:
            if name is None and group:
                continue  # a group of which none is chosen
            if not isinstance(name, str) or not isinstance(group, str):
                raise Unreadable(f"names a parent that is not known, {quoted(item)} (line {listed.line})")
            optional = group.startswith("optional ") or (not group and name.startswith("optional "))
            folder, _, package = group.removeprefix("override ").removeprefix("optional ").strip("/").partition("@")
            if not folder:
                name, _, package = name.removeprefix("optional ").partition("@")
            key = "" if package == "_global_" else package.removeprefix("_here_") or folder.replace("/", ".")
            yield (f"{folder}/{name}" if folder else name), key, optional


def _parent(name: str, key: str, path: Path, listed: Entry, budget: Budget, below: tuple[Path, ...]) -> list[Entry]:
    budget.spend()
    file = _file(name)
    where = path.parent / file
    if PurePosixPath(file).is_absolute() or where.resolve() in (*below, path.resolve()):
        raise Unreadable(
            f"names the parent {quoted(name)}, an absolute path or a file that names it (line {listed.line})"
        )
    try:
        text = read_text(where)
    except Unreadable as error:
        raise Unreadable(f"needs its parent {quoted(file)} (line {listed.line}), which {error}") from error
    found = _merged(entries(text, str(where)), where, budget, (*below, path.resolve()))
    prefix = tuple(key.split(".")) if key else ()
    return [replace(entry, path=(*prefix, *entry.path), line=listed.line, also=()) for entry in found]
