"""Axis names, sizes and order strings: what a user may write, and what each mistake is told.

```
"tp=2,cp=2,dp=*,pp=2"      an axis string: name=size, the first axis adjacent; one size may be *
"dp-cp"                    a set of axes, joined by hyphens
```
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from math import prod

from rankmesh.errors import LayoutError, UnknownAxis

__all__ = ["RESERVED", "AxesLike", "axis_name", "axis_names", "axis_size", "fill", "find", "integer", "parse_axes"]

AxesLike = str | Iterable[str]

# Words that are arguments of the methods which take axes as keywords.
RESERVED = frozenset({"offset", "rank_map", "view", "shared"})


def integer(value: object, what: str, *, least: int) -> int:
    """``value`` as an int of at least ``least``; floats, strings and booleans are refused, never rounded.

    >>> integer(2.0, "size of axis 'tp'", least=1)
    Traceback (most recent call last):
    rankmesh.errors.LayoutError: received 2.0 as size of axis 'tp'; it must be an integer of at least 1
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # TypeError is caught
    except TypeError:
        number = None
    if number is None or number < least or isinstance(value, bool):
        raise LayoutError(
            f"received {value!r} as {what}; it must be an integer of at least {least}",
            received=value,
            what=what,
            least=least,
        )
    return number


def axis_name(name: object) -> str:
    """``name`` if it can name an axis: a Python identifier that is no argument of the layout's own methods."""
    if not isinstance(name, str) or not name.isidentifier():
        raise LayoutError(
            f"received axis name {name!r}; a name is letters, digits and underscores (tp, dp_shard); rename the axis",
            received=name,
        )
    if name in RESERVED:
        raise LayoutError(
            f"received axis name {name!r}; {', '.join(sorted(RESERVED))} are arguments of the mesh; rename the axis",
            received=name,
        )
    return name


def axis_size(name: str, size: object) -> int:
    """The size of one axis, at least 1."""
    return integer(size, f"size of axis {name!r}", least=1)


def axis_names(axes: AxesLike) -> tuple[str, ...]:
    """The names in ``"dp-cp"`` or in a sequence of names, in the order of request, each once.

    >>> axis_names("dp-cp"), axis_names(("tp",))
    (('dp', 'cp'), ('tp',))
    >>> axis_names("tp-tp-dp")
    Traceback (most recent call last):
    rankmesh.errors.LayoutError: received axes 'tp-tp-dp'; 'tp' is named twice and each axis counts once; name it once
    """
    names = _listed(axes)
    for name in names if len(names) > 1 else ():
        if names.count(name) > 1:
            shown = axes if isinstance(axes, str) else "-".join(names)
            raise LayoutError(
                f"received axes {shown!r}; {name!r} is named twice and each axis counts once; name it once",
                received=axes,
                axis=name,
            )
    return names


def _listed(axes: object) -> tuple[str, ...]:
    """What was given as axes, if it is a string or a sequence of names."""
    given = axes.split("-") if isinstance(axes, str) else axes
    # Lists and tuples first: asking whether something is an Iterable takes ten times as long.
    listed: tuple[object, ...] = tuple(given) if isinstance(given, list | tuple | Iterable) else (given,)
    names = tuple([name for name in listed if isinstance(name, str) and name])
    if len(names) < len(listed):
        raise LayoutError(f"received axes {axes!r}; axes are names joined by hyphens, such as 'dp-cp'", received=axes)
    return names


def parse_axes(text: str) -> dict[str, int | None]:
    """The sizes in an axis string, ``None`` where the text says ``*``.

    >>> parse_axes("tp=2, dp=*")
    {'tp': 2, 'dp': None}
    """
    if not isinstance(text, str):
        raise LayoutError(f"received {text!r} as an axis string; write one, such as 'tp=2,dp=4'", received=text)
    sizes: dict[str, int | None] = {}
    for item in text.split(","):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or not size:
            raise LayoutError(
                f"received {item.strip()!r} in {text!r}; each axis is written name=size, such as 'tp=2,dp=4'",
                received=text,
            )
        if axis_name(name) in sizes:
            raise LayoutError(
                f"received axis {name!r} twice in {text!r}; each axis counts once; name it once",
                received=text,
                axis=name,
            )
        sizes[name] = None if size == "*" else axis_size(name, _number(size, text))
    return sizes


def _number(size: str, text: str) -> int:
    try:
        return int(size)
    except ValueError:
        raise LayoutError(
            f"received size {size!r} in {text!r}; a size is a whole number, or * for what is left", received=text
        ) from None


def fill(sizes: Mapping[str, int | None], total: int | None, what: str) -> dict[str, int]:
    """Replace the one ``None`` by what is left of ``total``; without ``None``, check that the product is ``total``.

    >>> fill({"tp": 2, "dp": None}, 8, "world_size")
    {'tp': 2, 'dp': 4}
    """
    known = prod(size for size in sizes.values() if size is not None)
    open_axes = [name for name, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        raise LayoutError(
            f"received * for {' and '.join(open_axes)}; one size at most may be *; give the others", axes=open_axes
        )
    if total is None:
        if open_axes:
            raise LayoutError(
                f"received * for {open_axes[0]}, without {what}; what is left needs a total; give {what} or the size",
                axes=open_axes,
            )
        return {name: size for name, size in sizes.items() if size is not None}
    if open_axes and total % known:
        raise LayoutError(
            f"received {what} {total} and sizes whose product is {known}; the product must divide it so that "
            f"{open_axes[0]} can be what is left; change a size",
            total=total,
            product=known,
        )
    if not open_axes and known != total:
        raise LayoutError(
            f"received {what} {total} and sizes whose product is {known} ({_product(sizes)}); they must be equal; "
            "write * for the size that should be what is left",
            total=total,
            product=known,
        )
    return {name: total // known if size is None else size for name, size in sizes.items()}


def _product(sizes: Mapping[str, int | None]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def find(name: str, known: Iterable[str], what: str = "axis") -> str:
    """``name`` if it is known, else ``UnknownAxis`` with the nearest name."""
    names = tuple(known)
    if name not in names:
        raise UnknownAxis(name, names, what)
    return name
