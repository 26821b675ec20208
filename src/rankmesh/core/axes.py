"""Axis names, sizes and order strings: their notation, and an error for each mistake.

```
"tp=2,cp=2,dp=*,pp=2"      an axis string: name=size, the first axis adjacent; one size may be *
"dp-cp"                    a set of axes, joined by hyphens
```
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, prod
from typing import Any, TypeVar

from rankmesh.errors import LayoutError, RankmeshError, UnknownAxis, quoted

__all__ = [
    "RESERVED",
    "AxesLike",
    "array",
    "axis_name",
    "axis_names",
    "axis_size",
    "check_number",
    "fill",
    "find",
    "integer",
    "parse_axes",
]

AxesLike = str | Iterable[str]

# Words that are arguments of the methods which take axes as keywords.
RESERVED = frozenset({"offset", "rank_map", "view", "shared"})


def integer(value: object, what: str, *, least: int) -> int:
    """Return ``value`` as an int of at least ``least``; floats, strings and booleans are refused, never rounded.

    >>> integer(2.0, "size of axis 'tp'", least=1)
    Traceback (most recent call last):
    rankmesh.errors.LayoutError: size of axis 'tp' is 2.0; give an integer of at least 1
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # TypeError is caught
    except TypeError:
        number = None
    if number is None or number < least or isinstance(value, bool):
        raise LayoutError(
            f"{what} is {quoted(value)}; give an integer of at least {least}", received=value, what=what, least=least
        )
    return number


def check_number(value: object, what: str, error: type[RankmeshError], *, zero: bool = False, **values: object) -> None:
    """Raise an error for anything but a finite number above 0, or of at least 0 with ``zero``.

    >>> check_number(-1.0, "uplink", LayoutError)
    Traceback (most recent call last):
    rankmesh.errors.LayoutError: uplink is -1.0; give a number above 0
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not isfinite(number) or number < 0 or (number == 0 and not zero):
        least = "of at least" if zero else "above"
        raise error(f"{what} is {quoted(value)}; give a number {least} 0", received=value, **values)


_Item = TypeVar("_Item")


def array(value: Iterable[_Item], what: str) -> Sequence[_Item]:
    """Return a list of a saved mesh or plan; raise ``TypeError`` for a text, a mapping, or a list with booleans."""
    if not isinstance(value, list | tuple) or bool in map(type, value):
        raise TypeError(f"{what}: expected a list without booleans, got {quoted(value)}")
    return value


def axis_name(name: object) -> str:
    """Return ``name`` if it can name an axis: a Python identifier that is not an argument of the layout's methods."""
    if not isinstance(name, str) or not name.isidentifier():
        raise LayoutError(
            f"{quoted(name)} cannot name an axis; use letters, digits and underscores, such as tp or dp_shard",
            received=name,
        )
    if name in RESERVED:
        raise LayoutError(
            f"{name!r} cannot name an axis: {', '.join(sorted(RESERVED))} are arguments of the mesh; rename the axis",
            received=name,
        )
    return name


def axis_size(name: str, size: object) -> int:
    """Return the size of one axis, at least 1."""
    if isinstance(size, int) and size == -1:
        raise LayoutError(
            f"size of axis {name!r} is -1; write {name}=* in a SPEC to infer it, or an integer of at least 1",
            received=size,
            axis=name,
        )
    return integer(size, f"size of axis {name!r}", least=1)


def axis_names(axes: AxesLike) -> tuple[str, ...]:
    """Return the names in ``"dp-cp"`` or in a sequence of names, in the order of request, each once.

    >>> axis_names("dp-cp"), axis_names(("tp",))
    (('dp', 'cp'), ('tp',))
    >>> axis_names("tp-tp-dp")
    Traceback (most recent call last):
    rankmesh.errors.LayoutError: axes 'tp-tp-dp' name 'tp' twice; name it once
    """
    names = _listed(axes)
    for name in names if len(names) > 1 else ():
        if names.count(name) > 1:
            shown = axes if isinstance(axes, str) else "-".join(names)
            raise LayoutError(f"axes {quoted(shown)} name {name!r} twice; name it once", received=axes, axis=name)
    return names


def items_of(values: Any) -> tuple[Any, ...] | None:
    """Return the items of what can be iterated over, None for anything else, an array without dimensions included."""
    try:
        return tuple(values)
    except TypeError:
        return None


def _listed(axes: object) -> tuple[str, ...]:
    """Return the names of the given axes, if it is a string or a sequence of names."""
    given = axes.split("-") if isinstance(axes, str) else axes
    listed = items_of(given)
    listed = (given,) if listed is None else listed
    names = tuple([name for name in listed if isinstance(name, str) and name])
    if len(names) < len(listed):
        raise LayoutError(f"axes are {quoted(axes)}; write names joined by hyphens, such as 'dp-cp'", received=axes)
    return names


def parse_axes(text: str) -> dict[str, int | None]:
    """Return the sizes in an axis string, ``None`` where the text has ``*``.

    >>> parse_axes("tp=2, dp=*")
    {'tp': 2, 'dp': None}
    """
    if not isinstance(text, str):
        raise LayoutError(f"axis string is {quoted(text)}; write a text such as 'tp=2,dp=4'", received=text)
    sizes: dict[str, int | None] = {}
    for item in text.split(","):
        name, equals, size = (part.strip() for part in item.partition("="))
        if not equals or not size:
            raise LayoutError(
                f"{quoted(item.strip())} in {quoted(text)} is not an axis; write name=size, such as tp=2", received=text
            )
        if axis_name(name) in sizes:
            raise LayoutError(f"{quoted(text)} names axis {name!r} twice; name it once", received=text, axis=name)
        sizes[name] = None if size == "*" else axis_size(name, _number(size, text))
    return sizes


def _number(size: str, text: str) -> int:
    try:
        return int(size)
    except ValueError:
        raise LayoutError(
            f"size {quoted(size)} in {quoted(text)} is not a whole number; write one, or * to infer it", received=text
        ) from None


def fill(sizes: Mapping[str, int | None], total: int | None, what: str) -> dict[str, int]:
    """Infer the one ``None`` from ``total``; without ``None``, check that the product is ``total``.

    >>> fill({"tp": 2, "dp": None}, 8, "world_size")
    {'tp': 2, 'dp': 4}
    """
    known = prod(size for size in sizes.values() if size is not None)
    open_axes = [name for name, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        raise LayoutError(
            f"* stands for {' and '.join(open_axes)}; only one size can be inferred; give the others", axes=open_axes
        )
    if total is None:
        if open_axes:
            raise LayoutError(
                f"{open_axes[0]}=* cannot be inferred without {what}; give {what} (--world-size) or write the size",
                axes=open_axes,
            )
        return {name: size for name, size in sizes.items() if size is not None}
    if open_axes and total % known:
        raise LayoutError(
            f"{what} is {total}, which {_product(sizes)} does not divide, so {open_axes[0]}=* has no size; "
            f"{_divisors(sizes, total)}",
            total=total,
            product=known,
        )
    if not open_axes and known != total:
        start = f"start {known} ranks, or " if what == "world_size" else ""
        raise LayoutError(
            f"{what} is {total}, but {_product(sizes)}; {start}{_fitting(sizes, total)}", total=total, product=known
        )
    return {name: total // known if size is None else size for name, size in sizes.items()}


def _product(sizes: Mapping[str, int | None]) -> str:
    """Return the sizes that are given, and their product: ``tp 2 x dp 4 = 8``, or ``tp=2``."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if len(given) == 1:
        return next(f"{name}={size}" for name, size in given.items())
    return f"{' x '.join(f'{name} {size}' for name, size in given.items()) or '1'} = {prod(given.values())}"


_MOST = 1 << 16  # sizes that an error tries


def _divisors(sizes: Mapping[str, int | None], total: int) -> str:
    """Return the sizes of one axis that fit beside the others and an open one; the first axis that has some."""
    for name, size in sizes.items():
        rest = prod(other for axis, other in sizes.items() if other is not None and axis != name)
        if size is not None and total % rest == 0:
            fits = [str(each) for each in range(1, min(total // rest, _MOST) + 1) if total // rest % each == 0]
            return f"sizes of {name} that fit: {', '.join(fits)}"
    return "change a size"


def _fitting(sizes: Mapping[str, int | None], total: int) -> str:
    """One size that may be changed alone to fit the total; the last axis first, as it is usually the slowest."""
    for name, size in reversed(list(sizes.items())):
        rest = prod(other for other in sizes.values() if other is not None) // (size or 1)
        if total % rest == 0:
            return f"set {name}={total // rest}, or write {name}=* to infer it"
    name = list(sizes)[-1]
    rest = prod(size for other, size in sizes.items() if other != name and size is not None)
    return f"write {name}=* and choose a multiple of {rest}"


def find(name: str, known: Iterable[str], what: str = "axis") -> str:
    """Return ``name`` if it is known. Raises ``UnknownAxis`` with the nearest name."""
    names = tuple(known)
    if str(name) not in names:  # an array would be compared with each of them
        raise UnknownAxis(name, names, what)
    return name
