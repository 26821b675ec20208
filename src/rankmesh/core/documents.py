r"""Files and texts from outside, read within one budget of work and memory.

```
path ── read_bytes, read_text ── regular files of a bounded size; a FIFO, device or folder is refused at once
text ── parse_json, parse_yaml, parse_toml ── at most so many values, so deep, as data that JSON could hold
work ── Budget.spend ── what a reader makes of a text, such as the words that a script expands to
```

Whatever is refused is an ``Unreadable``, whose message ends a sentence; each reader makes it its own error:

>>> try:
...     parse_yaml("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", Limits(values=12))
... except Unreadable as error:
...     print(f"model.yaml {error}")
model.yaml holds more than 12 values, its aliases written out
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

from rankmesh.errors import RankmeshError, first_line, quoted

if TYPE_CHECKING:
    import yaml

__all__ = [
    "DOCUMENT",
    "INDEX",
    "Budget",
    "Invalid",
    "Limits",
    "Several",
    "Unreadable",
    "YamlTree",
    "check_regular",
    "compose_documents",
    "compose_yaml",
    "limited",
    "open_regular",
    "opened",
    "parse",
    "parse_json",
    "parse_toml",
    "parse_yaml",
    "read_bytes",
    "read_text",
    "refused_as",
]


_T = TypeVar("_T")


class Unreadable(ValueError):
    """A file or a text cannot be read; the message ends a sentence: ``is a FIFO``, ``is not valid YAML (...)``."""


class Invalid(Unreadable):
    """A text that is not of this syntax, and may be of another; ``fix`` ends the message."""

    fix = "fix the file"


class Several(Invalid):
    """A YAML text of several documents, where one is read."""

    fix = "give a file with one of them; of manifests, rankmesh lint reads every document"


@dataclass(frozen=True)
class Limits:
    """Limits of reading one file: ``size`` in bytes, ``values`` in the document or steps of work, ``depth``."""

    size: int = 4 << 20
    values: int = 60_000
    depth: int = 64


# What people write; and JSON that programs write: the index of a checkpoint, the nodes of a cluster.
DOCUMENT = Limits()
INDEX = Limits(size=256 << 20, values=1 << 25, depth=32)

# No number of a layout, shape or byte count is larger; larger ones would take much memory.
_LARGEST = 2**63
# A scalar this long is not a number or date, which YAML's constructors would compute.
_SCALAR = 64
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
# What parsers raise for a text of another syntax.
_MALFORMED: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


class Budget:
    """A limit on the work of a reader; ``remaining`` steps.

    >>> budget = Budget(2)
    >>> budget.spend(2)
    >>> budget.spend()
    Traceback (most recent call last):
    rankmesh.core.documents.Unreadable: takes more than 2 steps to read
    """

    def __init__(self, steps: int = DOCUMENT.values) -> None:
        self.steps, self.remaining = steps, steps

    def spend(self, steps: int = 1) -> None:
        """Count some steps of work. Raises ``Unreadable`` when none remain."""
        self.remaining -= steps
        if self.remaining < 0:
            raise Unreadable(f"takes more than {self.steps:,} steps to read")


@contextmanager
def refused_as(error: type[RankmeshError], what: str, fix: str, **values: object) -> Iterator[None]:
    """Turn errors of reading a file inside this block into one error, ``{what} {why}; {fix}``.

    These are ``Unreadable``, and the errors that Python raises for data of an unexpected shape, depth or size.
    """
    try:
        yield
    except RankmeshError:
        raise
    except Unreadable as found:
        fix = found.fix if isinstance(found, Invalid) else fix
        raise error(f"{what} {found}; {fix}", **values) from found
    except RecursionError as found:
        raise error(f"{what} is nested too deeply; {fix}", **values) from found
    except MemoryError as found:
        raise error(f"{what} takes too much memory to read; {fix}", **values) from found
    except KeyError as found:
        raise error(f"{what} has no {quoted(next(iter(found.args), ''))}; {fix}", **values) from found
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as found:
        why = f"{type(found).__name__}: {first_line(found)[:80]}"
        raise error(f"{what} has values of another kind than expected ({why}); {fix}", **values) from found


# -- files ----------------------------------------------------------------------------------------------------------


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read it. Raises ``Unreadable`` for anything else, without waiting for it.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    rankmesh.core.documents.Unreadable: is a device, and only regular files are read
    """
    with _reading():
        return _Whole(FileIO(opened(path, os.O_RDONLY, check_regular)))


class _Whole(BufferedReader):
    """An open file; a file of the kernel may have nothing to read now, for which Python returns None."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most so many bytes."""
        if (data := super().read(size)) is None:
            raise Unreadable("cannot be read (it has nothing to read now)")
        return data


def opened(
    path: str | os.PathLike[str],
    flags: int,
    check: Callable[[os.stat_result], object],
    *,
    folder: int | None = None,
    follow: bool = True,
) -> int:
    """Open what is at a path, which may be relative to an open ``folder``, once ``check`` has passed it.

    Without ``follow`` a symbolic link is not followed.
    """
    # Opening may wait for others; and something else may take its place before it is opened.
    check(os.stat(path, dir_fd=folder, follow_symlinks=follow))
    names = ("O_NONBLOCK", "O_CLOEXEC", *(() if follow else ("O_NOFOLLOW",)))  # no Windows has them
    descriptor = os.open(path, sum((getattr(os, name, 0) for name in names), flags), dir_fd=folder)
    try:
        check(os.fstat(descriptor))
    except Unreadable:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror or first_line(error)})") from error
    except Unreadable:
        raise
    except ValueError as error:  # NUL bytes, lone surrogates
        raise Unreadable(f"is not a path of a file ({first_line(error)})") from error


def check_regular(found: os.stat_result) -> None:
    """Raise ``Unreadable`` for anything but a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for test, name in _KINDS if test(found.st_mode)), "no regular file")
        raise Unreadable(f"is {kind}, and only regular files are read")


def read_bytes(path: str | os.PathLike[str], size: int = DOCUMENT.size) -> bytes:
    """Read a regular file of at most ``size`` bytes. Raises ``Unreadable``."""
    with open_regular(path) as file, _reading():
        return limited(file, size)


def limited(file: BinaryIO, size: int) -> bytes:
    """Return the rest of an open file. Raises ``Unreadable`` where that is more than ``size`` bytes."""
    data = file.read(size + 1)
    if len(data) > size:
        raise Unreadable(f"is larger than {f'{size >> 20} MiB' if size >= 1 << 20 else f'{size >> 10} KiB'}")
    return data


def read_text(path: str | os.PathLike[str], size: int = DOCUMENT.size) -> str:
    """Return the text of a regular file, at most ``size`` bytes of UTF-8 without NUL bytes. Raises ``Unreadable``."""
    data = read_bytes(path, size)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise Unreadable(f"is not text (a NUL byte at {text.index(chr(0))})")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


# -- JSON and TOML --------------------------------------------------------------------------------------------------


def parse_json(text: str, limits: Limits = DOCUMENT) -> Any:
    """Return the data of a JSON text. Raises ``Unreadable``.

    >>> parse_json('{"tp": NaN}')
    Traceback (most recent call last):
    rankmesh.core.documents.Invalid: is not valid JSON (NaN is not JSON)
    """
    _check_text(text)
    _check_count(text, ",[{", limits)
    data = _made("JSON", lambda: json.loads(text, parse_constant=_no_constant, parse_int=_integer), limits)
    return _checked(data, limits, texts=_ESCAPED.search(text) is not None)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise Unreadable(f"is {quoted(text)}, not a text")


def _check_count(text: str, signs: str, limits: Limits) -> None:
    """Refuse a text with too many values before any of them is made: each has a sign before or after it."""
    if sum(map(text.count, signs)) > limits.values:
        raise Unreadable(f"holds more than {limits.values:,} values")


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -_LARGEST <= int(digits) < _LARGEST:
        raise Unreadable(f"holds a number of {len(digits.lstrip('-'))} digits, {digits[:20]}...")
    return int(digits)


def parse_toml(text: str, limits: Limits = DOCUMENT) -> dict[str, object]:
    """Return the data of a TOML text. Raises ``Unreadable``."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    _check_count(text, "=,[.", limits)
    # A key of many parts takes time that grows with the square of their number.
    keys = (part for line in text.split("\n") for part in line.split("=")[:-1] or [line])
    if any(max(map(_dots, re.split("[{,]", key))) > limits.depth for key in keys if _dots(key) > limits.depth):
        raise _too_deep(limits)
    return _checked(_made("TOML", lambda: tomllib.loads(text), limits), limits)


def _dots(text: str) -> int:
    return text.count(".")


def _made(syntax: str, make: Callable[[], _T], limits: Limits, *errors: type[Exception]) -> _T:
    """Call a parser and return its result; ``errors`` are its own error types that have no built-in base."""
    refused = (*_MALFORMED, *errors)
    try:
        return make()
    except RecursionError as error:
        raise _too_deep(limits) from error
    except Unreadable:
        raise
    except refused as error:
        raise Invalid(f"is not valid {syntax} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return first_line(error)
    return f"line {mark.line + 1}: {first_line(ValueError(problem))}"


def _too_deep(limits: Limits) -> Unreadable:
    return Unreadable(f"is nested more than {limits.depth} deep")


def _checked(data: _T, limits: Limits, *, texts: bool = True) -> _T:
    """Return the data if its depth, numbers and texts may be in a document. It has no cycles."""
    depth = 0
    layer: list[object] = [data]
    while layer:
        if depth > limits.depth:
            raise _too_deep(limits)
        inner: list[object] = []
        for value in layer:
            if isinstance(value, dict):
                inner += value.values()
                _check_texts(value)
            elif isinstance(value, list | tuple | set):
                inner += value
            elif isinstance(value, str):
                if texts:
                    _check_texts((value,))
            elif isinstance(value, float):
                if not math.isfinite(value):
                    raise Unreadable(f"holds the number {value}")
            elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise Unreadable(f"holds a number of more than {len(str(_LARGEST)) - 1} digits")
        layer, depth = inner, depth + 1
    return data


def _check_texts(texts: Iterable[object]) -> None:
    for text in texts:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise Unreadable("holds a text that is not Unicode (half of a surrogate pair)") from error


# -- YAML -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class YamlTree:
    """The nodes of a YAML text, with their lines; ``node`` is None for a text without a value."""

    node: yaml.Node | None
    loader: yaml.SafeLoader

    def value(self, node: yaml.Node) -> object:
        """Return the data of one node; of a scalar with another library's tag its text, of a collection None."""
        import yaml

        try:
            return _checked(self.loader.construct_document(node), DOCUMENT)
        except (yaml.YAMLError, ValueError):
            return node.value if isinstance(node.value, str) else None


def parse_yaml(text: str, limits: Limits = DOCUMENT) -> Any:
    """Return the data of a YAML text: what JSON could hold, dates too. Raises ``Unreadable``."""
    import yaml

    tree = compose_yaml(text, limits)
    if tree.node is None:
        return None
    return _checked(_made("YAML", lambda: tree.loader.construct_document(tree.node), limits, yaml.YAMLError), limits)


def compose_yaml(text: str, limits: Limits = DOCUMENT) -> YamlTree:
    """Return the nodes of a YAML text. Raises ``Unreadable``; an alias counts as all that it stands for.

    Of several documents one may hold something: ``Several`` is raised for more.
    """
    import yaml

    found = compose_documents(text, limits)
    full = [(tree, tree.node) for tree in found if tree.node is not None and tree.node.value != ""]
    if len(full) > 1:
        line = full[1][1].start_mark.line + 1
        raise Several(f"has {len(full)} YAML documents (the second at line {line}), and one is read")
    return full[0][0] if full else found[0] if found else YamlTree(None, yaml.SafeLoader(""))


def compose_documents(text: str, limits: Limits = DOCUMENT) -> list[YamlTree]:
    """Return the nodes of each document of a YAML text, after its events are checked; `compose_yaml` reads one."""
    import yaml

    _check_text(text)
    loader, parser = yaml.SafeLoader(""), getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def composed() -> list[YamlTree]:
        _check_events(yaml.parse(text, Loader=parser), loader, limits)
        return [YamlTree(node, loader) for node in yaml.compose_all(text, parser)]

    return _made("YAML", composed, limits, yaml.YAMLError)


def _check_events(events: Iterable[yaml.Event], loader: yaml.SafeLoader, limits: Limits) -> None:
    """Refuse a YAML text that is too deep, or holds too many values once its aliases are written out."""
    import yaml

    count = 0
    values: dict[str | None, int | None] = {}  # of each anchor; None while what it names is open
    inside: list[tuple[str | None, int]] = []
    for event in events:
        anchor: str | None = getattr(event, "anchor", None)
        before = count
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            values[anchor] = count - before
            continue
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, count))
            values[anchor] = None
            if len(inside) > limits.depth + 1:
                raise _too_deep(limits)
        if isinstance(event, yaml.AliasEvent):
            meant = values.get(anchor, 0)
            if meant is None:
                raise Unreadable("holds an alias inside of what it stands for")
            count += meant
        elif isinstance(event, yaml.NodeEvent):
            count += 1
        if isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _SCALAR:
                _check_scalar(event, loader)
                count += len(event.value) >> 8
            values[anchor] = count - before
        if count > limits.values:
            raise Unreadable(f"holds more than {limits.values:,} values, its aliases written out")


def _check_scalar(event: yaml.ScalarEvent, loader: yaml.SafeLoader) -> None:
    import yaml

    tag = event.tag or loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
    if tag.rpartition(":")[2] in ("int", "float", "timestamp"):
        raise Unreadable(f"holds a number of {len(event.value)} characters")


def parse(text: str) -> Any:
    """Return the data of a text that is JSON, as large as programs write it, or YAML. Raises ``Unreadable``.

    >>> parse("levels: [{name: host}]") == parse('{"levels": [{"name": "host"}]}')
    True
    """
    if text.lstrip()[:1] not in ("{", "["):
        return parse_yaml(text)
    try:
        return parse_json(text, INDEX)
    except Invalid as of_json:
        try:
            return parse_yaml(text)
        except Invalid as of_yaml:
            json_reason, yaml_reason = (str(one).removeprefix("is not valid ") for one in (of_json, of_yaml))
            raise Invalid(f"is neither valid {json_reason} nor {yaml_reason}") from of_yaml
