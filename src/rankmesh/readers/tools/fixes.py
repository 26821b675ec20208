"""One changed size with which a layout fits: tried before it is proposed, and written as its file writes sizes.

>>> fitting({"world_size": 8, "dp_shard": 4}, lambda sizes: sizes.get("dp_replicate", 1) * sizes["dp_shard"] == 8)
('dp_replicate', 2)
>>> spelled("tp", 4, (Reading(("--tp-size",), 8, 1, argument="tp"),), None, "serve.sh")
'--tp-size 4'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

from rankmesh.readers.table import Reading, Table

__all__ = ["fitting", "smaller", "spelled", "written"]

_DATA = ("dp_replicate", "dp_shard", "dp")
_DENSE = (*_DATA, "tp", "cp", "sp", "pp")
# The sizes that are changed first: of experts, and of SGLang's attention.
_CHANGED_FIRST = {"ep", "attn_dp", "attn_cp", "dcp"}
# Sizes that are proposed, and how many are tried.
_LARGEST_SIZE, _TRIED = 1 << 14, 16


def fitting(arguments: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> tuple[str, int] | None:
    """Return one changed size with which the arguments of a recipe fit, None where no single one does.

    What data parallelism leaves of the world goes first, then experts, then others; a size that is not stated is added
    before one that is stated is changed.
    """
    for name, value in _candidates(arguments):
        if fits({**arguments, name: value}):
            return name, value
    return None


def _candidates(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    sizes = {name: value for name, value in arguments.items() if name != "world_size" and type(value) is int}
    world = arguments.get("world_size") or prod(sizes.values())
    stated = [name for name in _DATA if name in sizes]
    if "ep" in sizes and "etp" not in sizes and "tp" in sizes:
        yield "etp", 1  # its default is tp, by which experts often do not fit
    for name in [*(name for name in _DATA[:2] if stated and name not in sizes), *stated]:
        block = prod(sizes[other] for other in _DENSE if other in sizes and other != name)
        if world % block == 0 and world // block != sizes.get(name, 1):
            yield name, world // block
    for name in sorted(sizes, key=lambda name: name not in _CHANGED_FIRST):
        yield from ((name, value) for value in smaller(sizes[name], world, one=name == "etp"))


def smaller(value: int, number: int, *, one: bool = False) -> list[int]:
    """Return up to 16 divisors of a number that are smaller than a value, the largest first; 1 only beside 2."""
    tried = range(min(value - 1, number, _LARGEST_SIZE), 0 if value == 2 or one else 1, -1)
    return list(islice((each for each in tried if number % each == 0), _TRIED))


def spelled(argument: str, value: int, readings: Sequence[Reading], table: Table | None, path: str) -> str | None:
    """Return a setting of an argument as the file writes it, None for one that the format has no key for."""
    reading = next((each for each in readings if each.argument == argument), None)
    if reading is not None:
        return written(reading.path, value, path)
    name = next((name for name, row in table.reads.items() if row.argument == argument), None) if table else None
    beside = next((each.path for each in readings if each.argument != "world_size"), None)
    if name is None or beside is None:
        return None
    if beside[-1].startswith("--"):
        name = f"--{name}" if "_" in beside[-1] else f"--{name.replace('_', '-')}"
    elif "-" in beside[-1]:
        name = name.replace("_", "-")
    return written((*beside[:-1], name), value, path)


def written(key: Sequence[str], value: object, path: str) -> str:
    """Return a key with a value as a file of this kind has it: an option, a line of YAML, TOML or JSON, or a word.

    >>> [written(("a", "tp"), 4, f"run.{ending}") for ending in ("yaml", "toml", "json", "sh")]
    ['tp: 4', 'tp=4', '"tp": 4', 'a.tp=4']
    """
    last = key[-1]
    if key[0].startswith("-"):
        return f"{'.'.join(key)} {value}"
    if last.isupper():
        return f"{last}={value}"
    if path.endswith((".yaml", ".yml")):
        return f"{last}: {value}"
    if path.endswith((".toml", ".json")):
        return f"{last}={value}" if path.endswith(".toml") else f'"{last}": {value}'
    return f"{'.'.join(key)}={value}" if len(key) > 1 else f"--{last} {value}"
