"""What a config file states, and how one table of keys turns it into the arguments of a recipe.

```
file ── entries (key, value, line) ── table ── settled: arguments, readings (the lines that gave them), notes
```

A table has one row for each key that a format knows: ``reads`` rows set an argument, ``refused`` rows shape the layout
in a way that no recipe has, ``harmless`` keys do not shape it. Another key is refused where it looks like a parallel
size or spreads experts, noted where its name has ``parallel`` or ``expert``, and else ignored.

>>> table = Table({"tp_degree": Read("tp")})
>>> settled = settle(table, [Entry(("tp_degree",), 4, 7)], "run.toml")
>>> settled.arguments, str(settled.readings[0]), settled.readings[0].line
({'tp': 4}, 'tp_degree = 4', 7)
>>> settle(table, [Entry(("tp_degre",), 4, 7)], "run.toml")
Traceback (most recent call last):
rankmesh.errors.PlanError: run.toml:7: tp_degre = 4; this looks like a parallel size, and is none that is \
read here; did you mean 'tp_degree'?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from typing import Any

from rankmesh.core.documents import Budget
from rankmesh.errors import PlanError, cut

__all__ = [
    "DOCUMENTS",
    "NO_LAYOUT",
    "Entry",
    "Missing",
    "Read",
    "Reading",
    "Refused",
    "Settled",
    "Table",
    "add_world",
    "flag",
    "gathered",
    "line_error",
    "place",
    "refused",
    "report",
    "run_it",
    "settle",
    "unless",
    "whole",
]

_SIZE = re.compile(
    r"parallel\w*_(sizes?|degrees?|shards)$|_(degree|tp_size|pp_size|dp_size|cp_size|ep_size)$|(^|_)[tpdce]p_world_size$"
)
# Names that may shape a layout; names with these words that count experts, or say how they compute and communicate.
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
# The code of an error that says that a file states no layout.
NO_LAYOUT = "no-layout"
# Numbers under unknown keys that are compared with the known ones, which takes half a millisecond each.
_SUSPECTS = 2_000
_NAME = re.compile(r"\$[{(]?(?:oc\.env:)?([A-Za-z_]\w*)")
DOCUMENTS = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True)
class Missing:
    """A value that the file leaves open: ``text`` as written, ``why`` it is unknown; ``runs``: only a run gives it."""

    text: str
    why: str
    runs: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Entry:
    """One setting as the file states it; ``also`` are further lines of its value.

    ``default``: the environment may overrule it.
    """

    path: tuple[str, ...]
    value: Any
    line: int
    also: tuple[int, ...] = ()
    default: bool = False

    @property
    def key(self) -> str:
        """The path as words: ``parallelism.tp``."""
        return ".".join(self.path)

    @property
    def name(self) -> str:
        """The last word of the path as a YAML spells it: ``tp_size`` of the option ``--tp-size``."""
        return self.path[-1].lstrip("-").replace("-", "_")

    @property
    def single(self) -> Entry:
        """The entry with the first of its words: in a script those after it may be the program's."""
        return replace(self, value=self.first)

    @property
    def first(self) -> Any:
        """The value, of several words the first."""
        return self.value[0] if isinstance(self.value, list) and self.value else self.value

    def __str__(self) -> str:
        return f"{cut(self.key)} = {cut(_shown(self.value))}"


@dataclass(frozen=True)
class Reading(Entry):
    """A setting that shaped the plan, with the argument of the recipe that it sets."""

    argument: str = ""


@dataclass(frozen=True)
class Read:
    """A key that sets ``argument``; ``convert`` makes its value from an entry, None leaves the argument alone."""

    argument: str
    convert: Callable[[Entry, str], object] | None = None

    def value(self, entry: Entry, path: str) -> object:
        """Return the value of the argument."""
        return (self.convert or whole)(entry, path)


@dataclass(frozen=True)
class Refused:
    """A key that shapes the layout in a way that no recipe has, unless its value is one of ``harmless``."""

    why: str
    harmless: tuple[object, ...] = (None, 0, 1, False)


@dataclass(frozen=True)
class Table:
    """The keys of a format. ``key`` names an entry as the rows do, None for one outside the sections that matter.

    ``closed``: the sections hold nothing but what the table knows, so an unknown whole number is refused.
    """

    reads: Mapping[str, Read]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    harmless: Collection[str] = ()
    key: Callable[[Entry], str | None] = lambda entry: entry.path[-1]
    closed: bool = False


@dataclass
class Settled:
    """What a table made of a file; ``of_file``: what stands in another file, which it names."""

    arguments: dict[str, Any] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    table: Table | None = None
    of_file: Sequence[Entry] = ()

    def add(self, argument: str, value: object, entry: Entry, path: str) -> None:
        """Set an argument; a second, different value for it is refused."""
        before = self.reading(argument)
        if before is not None and self.arguments[argument] != value:
            raise refused(
                path,
                entry,
                f"line {before.line} says {before}" if before.line else f"the run also says {before}",
                "keep one of the two",
                code="contradiction" if before.path[:-1] == entry.path[:-1] else None,
            )
        self.arguments[argument] = value
        self.readings.append(Reading(**{**vars(entry), "argument": argument}))

    def reading(self, argument: str) -> Reading | None:
        """Return the first line that sets an argument, None if no line does."""
        return next((reading for reading in self.readings if reading.argument == argument), None)

    def drop(self, argument: str, why: str = "") -> None:
        """Leave out an argument; ``why`` is noted after each line that sets it."""
        self.arguments.pop(argument, None)
        dropped = [reading for reading in self.readings if reading.argument == argument]
        self.notes += [(reading.line, f"{reading} {why}") for reading in dropped if why]
        self.readings = [reading for reading in self.readings if reading.argument != argument]


def settle(table: Table, entries: Iterable[Entry], path: str) -> Settled:
    """Return the arguments that the entries set; raises ``PlanError`` for what is ambiguous or not modelled."""
    settled, budget = Settled(table=table), Budget(_SUSPECTS)
    for entry in entries:
        key = table.key(entry)
        try:
            if key is not None:
                _settle(table, settled, key, entry, path, budget)
        except PlanError as error:
            report(error)
    return settled


def _settle(table: Table, settled: Settled, key: str, entry: Entry, path: str, budget: Budget) -> None:
    if key in table.reads:
        value = table.reads[key].value(entry, path)
        if value is not None:
            settled.add(table.reads[key].argument, value, entry, path)
    elif key in table.refused:
        _check(table.refused[key], entry, path)
    elif key not in table.harmless:
        if _counts(entry.value):
            budget.spend()
            _suspect(table, key, entry, path)
        _unknown(settled, key, entry, path)


# Where problems of single entries are gathered instead of raised, so that all are found at once.
_PROBLEMS: ContextVar[list[PlanError] | None] = ContextVar("problems", default=None)


@contextmanager
def gathered() -> Iterator[list[PlanError]]:
    """Gather the errors of single entries inside this block; such an entry is left out."""
    problems: list[PlanError] = []
    token = _PROBLEMS.set(problems)
    try:
        yield problems
    finally:
        _PROBLEMS.reset(token)


def report(error: PlanError) -> None:
    """Raise the error of one entry, or add it to those that are gathered."""
    problems = _PROBLEMS.get()
    if problems is None:
        raise error
    problems.append(error)


def _unknown(settled: Settled, key: str, entry: Entry, path: str) -> None:
    """Note an unknown key that may shape the layout; refuse a switch that spreads experts over ranks."""
    name, value = key.lower().replace("-", "_"), entry.first
    if not _SHAPES.search(name) or _COMPUTES.search(name) or str(value).lower() in _OFF:
        return
    if "parallel" in name and "expert" in name and (entry.value is True or not _counts(entry.value)):
        rule = "this may spread the experts over ranks, and is not known here"
        raise refused(path, entry.single, rule, "give the layout as a SPEC, such as megatron:world=8,ep=8")
    if str(value).lower() == "true" or _counts(value):
        settled.notes.append((entry.line, f"{entry.single} is not known here; it may change the layout"))


def _check(rule: Refused, entry: Entry, path: str) -> None:
    value = _number(entry.value)
    if not any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in rule.harmless
    ):
        raise refused(path, entry, rule.why, "no recipe has this layout; describe it with axes, or remove the key")


def _suspect(table: Table, key: str, entry: Entry, path: str) -> None:
    """Refuse what looks like a parallel size: near a known key, named like one, or in a closed section."""
    entry = entry.single
    known = (*table.reads, *table.refused)
    near = _near(key, known) or [name for name in known if name.endswith(f"_{key}")][:1]
    if near or table.closed or _SIZE.search(key):
        spelt = [_spelt(name, entry) for name in near or table.reads]
        remedy = f"did you mean {spelt[0]!r}?" if near else f"the sizes that are read: {', '.join(spelt)}"
        rule = "this looks like a parallel size, and is none that is read here"
        typo = spelt[0] if get_close_matches(key, near, n=1, cutoff=_TYPO) else None
        raise refused(path, entry, rule, remedy, code="unknown-size" if typo else None, fix=typo)


@lru_cache(maxsize=4096)
def _near(key: str, known: tuple[str, ...]) -> list[str]:
    return get_close_matches(key, known, n=1, cutoff=_NEAR)


def _spelt(name: str, entry: Entry) -> str:
    """Return a key as the file spells keys: ``--a-b`` where the entry is an argument."""
    return "--" + name.replace("_", "-") if entry.path[-1].startswith("--") else name


def _counts(value: object) -> bool:
    """Return whether a value could be a size of more than one."""
    if isinstance(value, list) and value:
        value = value[0]
    value = _number(value)
    return isinstance(value, Missing) or (isinstance(value, int) and not isinstance(value, bool) and value > 1)


def _number(value: object) -> object:
    """Return a text of digits as the number that it is; another value as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def whole(entry: Entry, path: str) -> int | None:
    """Return the value as a whole number of at least 1; None where the file has null."""
    value = entry.value
    if value is None:
        return None
    if isinstance(value, Missing):
        name = None if value.runs else _NAME.search(value.text)
        given = [f"give the variable a value: --set {name[1]}=2"] if name else []
        if name and value.text.startswith("$("):
            given = [f"add {name[1]} to the variables of the container"]
        run = [] if path.endswith(DOCUMENTS) else [run_it(path)]
        remedy = "; or ".join([*given, *run])
        raise refused(path, entry, value.why, remedy, code="unset-variable" if name else None)
    value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        code = "not-a-size" if re.fullmatch(r"-?\d+(\.\d*)?", str(value)) else None
        raise refused(path, entry, "a parallel size is a whole number of at least 1", "write one", code=code)
    return value


def unless(*off: object) -> Callable[[Entry, str], int | None]:
    """Return a converter: a whole number, nothing where the value is one of these, which switch the size off."""
    return lambda entry, path: None if entry.value in off else whole(entry, path)


def add_world(settled: Settled, entries: Sequence[Entry], keys: Sequence[tuple[str, ...]], path: str) -> None:
    """Set the world size where the document has all of these counts; otherwise it is asked for.

    It is one setting: ``trainer.nnodes 2 x trainer.n_gpus_per_node 8``, which is 16.
    """
    counts = [entry for key in keys for entry in entries if entry.path == key]
    unknown = (None, "", 0, -1, "-1", "auto")
    if len(counts) == len(keys) and not any(
        isinstance(entry.value, Missing | list) or entry.value in unknown for entry in counts
    ):
        key = " x ".join(f"{entry.key} {entry.value}" for entry in counts)
        also = tuple(entry.line for entry in counts[1:] if entry.line != counts[0].line)
        ranks = prod(whole(entry, path) or 1 for entry in counts)
        settled.add("world_size", ranks, Entry((key,), ranks, counts[0].line, also), path)


def flag(value: object) -> Callable[[Entry, str], object]:
    """Return a converter: ``value`` where the entry is true, nothing where it is false."""

    def convert(entry: Entry, path: str) -> object:
        if entry.value in (True, "true", "True"):
            return value
        if entry.value in (None, False, "false", "False"):
            return None
        raise refused(path, entry, "this is true or false", "write one of them")

    return convert


def place(path: str, line: int) -> str:
    """Return file and line; line 0 is none, as of what a recorded run was given."""
    return f"{path}:{line}" if line else path


def run_it(path: str) -> str:
    """Return the remedy for a script that only bash can read."""
    return f"run it: rankmesh show --run {path}"


def line_error(path: str, line: int | None, problem: str, **values: object) -> PlanError:
    """Return the error of a line: file and line, and the problem; ``values`` are further attributes."""
    return PlanError(f"{place(path, line or 0)}: {problem}", path=path, line=line, **values)


def refused(path: str, entry: Entry, rule: str, remedy: str, **values: object) -> PlanError:
    """Return the error for one entry: file and line, what is written there, the rule, the remedy.

    ``values`` are further attributes: the ``code`` of a finding of ``rankmesh lint``, its ``fix``.
    """
    received = str(entry.value) if isinstance(entry.value, Missing) else entry.value
    return line_error(path, entry.line, f"{entry}; {rule}; {remedy}", key=entry.key, received=received, **values)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
