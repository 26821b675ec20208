"""Options of a text, each with its line: of YAML, TOML and JSON, of a command, of a file of flags.

```
text ── Options (key, value, line) ── the table of a format ── Settled: arguments of a recipe ── plan
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from rankmesh.errors import PlanError, cut
from rankmesh.readers.script import Command
from rankmesh.readers.tokens import Missing, Word, gap_of, line_of, lines_of, shown, value_of

__all__ = [
    "DOCUMENTS", "NO_LAYOUT", "SETTING", "Option", "Options", "gathered", "line_error", "place", "refused", "report",
    "run_it",
]  # fmt: skip

# The code of an error: the file states no layout.
NO_LAYOUT = "no-layout"
DOCUMENTS = (".yaml", ".yml", ".json", ".toml")
_NONE = Command((), 0)
# A word of a command that is a setting.
SETTING = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Option:
    """One setting of a file or a command; ``also`` are further lines of its value.

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
    def single(self) -> Option:
        """The option with the first of its words: in a script those after it may be the program's."""
        return replace(self, value=self.first)

    @property
    def first(self) -> Any:
        """The value, of several words the first."""
        return self.value[0] if isinstance(self.value, list) and self.value else self.value

    def __str__(self) -> str:
        return f"{cut(self.key)} = {cut(_shown(self.value))}"


@dataclass(frozen=True)
class Options:
    """The options of a document, or of one command that starts training or serving.

    ``flags``    the values of a document, or the flags of a command
    ``command``  empty for a document
    ``world``    the ranks that the launcher starts; None: not stated
    ``counts``   options of the launcher, which count nodes and ranks
    ``strays``   words that are unknown, and not the value of a flag
    ``notes``, ``defaults``, ``texts``   of a script: remarks, lines with defaults, all texts by their places
    """

    path: str
    flags: tuple[Option, ...]
    command: Command = _NONE
    world: Option | None = None
    counts: tuple[Option, ...] = ()
    strays: tuple[Word, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()
    defaults: Mapping[int, str] = field(default_factory=dict)
    texts: Mapping[int, tuple[int, str]] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Return whether these are flags, of a command or of a file of them, and not the values of a document."""
        return bool(self.command.words) or self.command.line > 0

    @property
    def words(self) -> list[str]:
        """The words of the command as a person would recognise them."""
        return [shown(word) for word in self.command.words]

    @property
    def settings(self) -> list[Option]:
        """The words ``key=value`` of the command, as Hydra takes them."""
        found = []
        for word in self.command.words:
            setting = SETTING.fullmatch(shown(word))
            if setting is not None:
                lines, gap = lines_of(word) or (0,), gap_of(word)
                value = Missing(setting[2], gap.why, gap.runs) if gap else setting[2]
                found.append(Option(tuple(setting[1].split(".")), value, lines[0], lines[1:]))
        return found

    @property
    def stated(self) -> tuple[Option, ...]:
        """All options: the model that an engine is to serve, flags, settings, unknown words."""
        served = next((at + 1 for at, word in enumerate(self.words) if word == "serve" and at), len(self.words))
        model = [word for word in self.command.words[served : served + 1] if not shown(word).startswith("-")]
        unknown = [word for word in self.strays if lines_of(word)]
        named = [*((word, "model") for word in model), *((word, shown(word)) for word in unknown)]
        more = [Option((name,), value_of(word), line_of(word)) for word, name in named]
        return (*more[: len(model)], *self.flags, *self.settings, *more[len(model) :])


# Where problems of single options are gathered instead of raised, so that all are found at once.
_PROBLEMS: ContextVar[list[PlanError] | None] = ContextVar("problems", default=None)


@contextmanager
def gathered() -> Iterator[list[PlanError]]:
    """Gather the errors of single options inside this block; such an option is left out."""
    problems: list[PlanError] = []
    token = _PROBLEMS.set(problems)
    try:
        yield problems
    finally:
        _PROBLEMS.reset(token)


def report(error: PlanError) -> None:
    """Raise the error of one option, or add it to the gathered ones."""
    problems = _PROBLEMS.get()
    if problems is None:
        raise error
    problems.append(error)


def place(path: str, line: int) -> str:
    """Return file and line; a line of 0 is left out, as for a recorded command."""
    return f"{path}:{line}" if line else path


def run_it(path: str) -> str:
    """Return the remedy for a script that only bash can read."""
    return f"run it: rankmesh show --run {path}"


def line_error(path: str, line: int | None, problem: str, **values: object) -> PlanError:
    """Return the error of a line: file and line, and the problem; ``values`` are further attributes."""
    return PlanError(f"{place(path, line or 0)}: {problem}", path=path, line=line, **values)


def refused(path: str, option: Option, rule: str, remedy: str, **values: object) -> PlanError:
    """Return the error for one option: file and line, what is written there, the rule, the remedy.

    ``values`` are further attributes: the ``code`` of a finding of ``rankmesh lint``, its ``fix``.
    """
    received = str(option.value) if isinstance(option.value, Missing) else option.value
    return line_error(path, option.line, f"{option}; {rule}; {remedy}", key=option.key, received=received, **values)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
