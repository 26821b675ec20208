"""Tables of keys, which turn options into the arguments of a recipe: one for each format.

A table has one row for each key that a format knows: ``reads`` rows set an argument, ``refused`` rows shape the layout
in a way that no recipe has, ``harmless`` keys do not shape it. Another key is refused where it looks like a parallel
size or spreads experts, noted where its name has ``parallel`` or ``expert``, and else ignored.

>>> table = Table({"tp_degree": Read("tp")})
>>> settled = settle(table, [Option(("tp_degree",), 4, 7)], "run.toml")
>>> settled.arguments, str(settled.readings[0]), settled.readings[0].line
({'tp': 4}, 'tp_degree = 4', 7)
>>> settle(table, [Option(("tp_degre",), 4, 7)], "run.toml")
Traceback (most recent call last):
rankmesh.errors.PlanError: run.toml:7: tp_degre = 4; this looks like a parallel size, and is none that is \
read here; did you mean 'tp_degree'?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from typing import Any

from rankmesh.core.documents import Budget
from rankmesh.errors import PlanError
from rankmesh.readers.options import DOCUMENTS, Option, Options, refused, report, run_it
from rankmesh.readers.tokens import Missing

__all__ = ["Format", "Read", "Reading", "Refused", "Settled", "Table", "add_world", "flag", "settle", "unless", "whole"]

_SIZE = re.compile(
    r"parallel\w*_(sizes?|degrees?|shards)$|_(degree|tp_size|pp_size|dp_size|cp_size|ep_size)$|(^|_)[tpdce]p_world_size$"
)
# Names that may shape a layout; the exceptions: they count experts, or configure computation and communication.
_SHAPES = re.compile(r"parallel|expert")
_COMPUTES = re.compile(
    r"num_\w*experts?|n_\w*experts|experts?_(per|capacity|bias|interval|rank|input|for|layer|gate|glu|inter|hidden|ffn)"
    r"|experts_(wgrad|weight)|expert_(weights?|dropout|location|distribution)|shared_expert|grouped_gemm|per_(token|expert)"
    r"|overlap|comm(_|$)|(fully|ckpt)_parallel|_(port|rank|interval|algo|impl|workers|samples|layout|backend|overlap)s?$"
    r"|parallel_(output|random_init|layers|residual|attn|attention|save|load|weights?|logits|cross_entropy)"
    r"|vocab_parallel|sequence_parallel(ism)?$|async_tensor|tokenizers?_parallelism|tool_calls"
)
_OFF = {"", "none", "null", "false", "off", "0", "1"}
_NEAR, _TYPO = 0.75, 0.92
# Numbers under unknown keys that are compared with the known ones, which takes half a millisecond each.
_SUSPECTS = 2_000
_NAME = re.compile(r"\$[{(]?(?:oc\.env:)?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Reading(Option):
    """A setting that shaped the plan, with the argument of the recipe that it sets."""

    argument: str = ""


@dataclass(frozen=True)
class Read:
    """A key that sets ``argument``; ``convert`` makes its value from an option, None leaves the argument alone."""

    argument: str
    convert: Callable[[Option, str], object] | None = None

    def value(self, option: Option, path: str) -> object:
        """Return the value of the argument."""
        return (self.convert or whole)(option, path)


@dataclass(frozen=True)
class Refused:
    """A key that shapes the layout in a way that no recipe has, unless its value is one of ``harmless``."""

    why: str
    harmless: tuple[object, ...] = (None, 0, 1, False)


@dataclass(frozen=True)
class Table:
    """The keys of a format. ``key`` names an option as the rows do, None for one outside the sections that matter.

    ``closed``: the sections have no other keys, so an unknown key with a whole number is refused.
    """

    reads: Mapping[str, Read]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    harmless: Collection[str] = ()
    key: Callable[[Option], str | None] = lambda option: option.path[-1]
    closed: bool = False


@dataclass
class Settled:
    """The arguments that options set, and why; ``of_file``: options of another file, which the text names."""

    arguments: dict[str, Any] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    table: Table | None = None
    of_file: Sequence[Option] = ()

    def add(self, argument: str, value: object, option: Option, path: str) -> None:
        """Set an argument; a second, different value for it is refused."""
        before = self.reading(argument)
        if before is not None and self.arguments[argument] != value:
            raise refused(
                path,
                option,
                f"line {before.line} says {before}" if before.line else f"the run also says {before}",
                "keep one of the two",
                code="contradiction" if before.path[:-1] == option.path[:-1] else None,
            )
        self.arguments[argument] = value
        self.readings.append(Reading(**{**vars(option), "argument": argument}))

    def reading(self, argument: str) -> Reading | None:
        """Return the first line that sets an argument, None if no line does."""
        return next((reading for reading in self.readings if reading.argument == argument), None)

    def add_run(self, options: Options) -> Settled:
        """Add the notes of a command's script, and the world size of its launcher unless an option sets it."""
        self.notes += options.notes
        world = options.world
        if "world_size" not in self.arguments and world is not None and not isinstance(world.value, Missing):
            self.add("world_size", world.value, world, options.path)
        return self

    def drop(self, argument: str, why: str = "") -> None:
        """Leave out an argument; ``why`` is noted after each line that sets it."""
        self.arguments.pop(argument, None)
        dropped = [reading for reading in self.readings if reading.argument == argument]
        self.notes += [(reading.line, f"{reading} {why}") for reading in dropped if why]
        self.readings = [reading for reading in self.readings if reading.argument != argument]


@dataclass(frozen=True)
class Format:
    """A format: which options are of it, what they set, and the titles of its documents and of its commands."""

    matches: Callable[[Options], bool]
    settle: Callable[[Options], Settled]
    title: str = ""
    command: str = ""


def settle(table: Table, options: Iterable[Option], path: str) -> Settled:
    """Return the arguments that the options set; raises ``PlanError`` for what is ambiguous or not modelled."""
    settled, budget = Settled(table=table), Budget(_SUSPECTS)
    for option in options:
        key = table.key(option)
        try:
            if key is not None:
                _settle(table, settled, key, option, path, budget)
        except PlanError as error:
            report(error)
    return settled


def _settle(table: Table, settled: Settled, key: str, option: Option, path: str, budget: Budget) -> None:
    if key in table.reads:
        value = table.reads[key].value(option, path)
        if value is not None:
            settled.add(table.reads[key].argument, value, option, path)
    elif key in table.refused:
        _check(table.refused[key], option, path)
    elif key not in table.harmless:
        if _counts(option.value):
            budget.spend()
            _suspect(table, key, option, path)
        _unknown(settled, key, option, path)


def _unknown(settled: Settled, key: str, option: Option, path: str) -> None:
    """Note an unknown key that may shape the layout; refuse a switch that spreads experts over ranks."""
    name, value = key.lower().replace("-", "_"), option.first
    if not _SHAPES.search(name) or _COMPUTES.search(name) or str(value).lower() in _OFF:
        return
    if "parallel" in name and "expert" in name and (option.value is True or not _counts(option.value)):
        rule = "this may spread the experts over ranks, and is not known here"
        raise refused(path, option.single, rule, "give the layout as a SPEC, such as megatron:world=8,ep=8")
    if str(value).lower() == "true" or _counts(value):
        settled.notes.append((option.line, f"{option.single} is not known here; it may change the layout"))


def _check(rule: Refused, option: Option, path: str) -> None:
    value = _number(option.value)
    if not any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in rule.harmless
    ):
        raise refused(path, option, rule.why, "no recipe has this layout; describe it with axes, or remove the key")


def _suspect(table: Table, key: str, option: Option, path: str) -> None:
    """Refuse what looks like a parallel size: near a known key, named like one, or in a closed section."""
    option = option.single
    known = (*table.reads, *table.refused)
    near = _near(key, known) or [name for name in known if name.endswith(f"_{key}")][:1]
    if near or table.closed or _SIZE.search(key):
        spelt = [_spelt(name, option) for name in near or table.reads]
        remedy = f"did you mean {spelt[0]!r}?" if near else f"the sizes that are read: {', '.join(spelt)}"
        rule = "this looks like a parallel size, and is none that is read here"
        typo = spelt[0] if get_close_matches(key, near, n=1, cutoff=_TYPO) else None
        raise refused(path, option, rule, remedy, code="unknown-size" if typo else None, fix=typo)


@lru_cache(maxsize=4096)
def _near(key: str, known: tuple[str, ...]) -> list[str]:
    return get_close_matches(key, known, n=1, cutoff=_NEAR)


def _spelt(name: str, option: Option) -> str:
    """Return a key as the file spells keys: ``--a-b`` where the option is an argument."""
    return "--" + name.replace("_", "-") if option.path[-1].startswith("--") else name


def _counts(value: object) -> bool:
    """Return whether a value could be a size of more than one."""
    if isinstance(value, list) and value:
        value = value[0]
    value = _number(value)
    return isinstance(value, Missing) or (isinstance(value, int) and not isinstance(value, bool) and value > 1)


def _number(value: object) -> object:
    """Return a text of digits as the number that it is; another value as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def whole(option: Option, path: str) -> int | None:
    """Return the value as a whole number of at least 1; None where the file has null."""
    value = option.value
    if value is None:
        return None
    if isinstance(value, Missing):
        name = None if value.runs else _NAME.search(value.text)
        given = [f"give the variable a value: --set {name[1]}=2"] if name else []
        if name and value.text.startswith("$("):
            given = [f"add {name[1]} to the variables of the container"]
        run = [] if path.endswith(DOCUMENTS) else [run_it(path)]
        remedy = "; or ".join([*given, *run])
        raise refused(path, option, value.why, remedy, code="unset-variable" if name else None)
    value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        code = "not-a-size" if re.fullmatch(r"-?\d+(\.\d*)?", str(value)) else None
        raise refused(path, option, "a parallel size is a whole number of at least 1", "write one", code=code)
    return value


def unless(*off: object) -> Callable[[Option, str], int | None]:
    """Return a converter: a whole number, nothing where the value is one of these, which switch the size off."""
    return lambda option, path: None if option.value in off else whole(option, path)


def add_world(settled: Settled, options: Sequence[Option], keys: Sequence[tuple[str, ...]], path: str) -> None:
    """Set the world size if the options have all of these counts.

    It is one setting: ``trainer.nnodes 2 x trainer.n_gpus_per_node 8``, which is 16.
    """
    counts = [option for key in keys for option in options if option.path == key]
    unknown = (None, "", 0, -1, "-1", "auto")
    if len(counts) == len(keys) and not any(
        isinstance(option.value, Missing | list) or option.value in unknown for option in counts
    ):
        key = " x ".join(f"{option.key} {option.value}" for option in counts)
        also = tuple(option.line for option in counts[1:] if option.line != counts[0].line)
        ranks = prod(whole(option, path) or 1 for option in counts)
        settled.add("world_size", ranks, Option((key,), ranks, counts[0].line, also), path)


def flag(value: object) -> Callable[[Option, str], object]:
    """Return a converter: ``value`` where the option is true, nothing where it is false."""

    def convert(option: Option, path: str) -> object:
        if option.value in (True, "true", "True"):
            return value
        if option.value in (None, False, "false", "False"):
            return None
        raise refused(path, option, "this is true or false", "write one of them")

    return convert
