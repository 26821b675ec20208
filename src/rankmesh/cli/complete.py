"""What the shell's completion offers: presets, recipes, and the groups of the plan typed so far.

>>> [name for name, _ in spec_names("megatron")][:2]
['megatron:', 'megatron-turing-530b']
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

import typer

from rankmesh.core import presets
from rankmesh.errors import RankmeshError
from rankmesh.readers.source import RECIPES, read, recipe_arguments

__all__ = ["answered", "group_names", "preset_names", "rejoined", "spec_names"]

_Completions = list[tuple[str, str]]

_AXES = ("tp", "cp", "ep", "dp", "pp")
_SIZES = (2, 4, 8)


def spec_names(incomplete: str) -> _Completions:
    """Recipes and presets, and their arguments or axes; files are the shell's own business.

    >>> [completion for completion, _ in spec_names("megatron:world=64,et")], spec_names("tp=2,")[0]
    (['megatron:world=64,etp=2', 'megatron:world=64,etp=4', 'megatron:world=64,etp=8'], ('tp=2,cp=2', 'axis'))
    """
    name, colon, arguments = incomplete.rpartition("/")[2].partition(":")
    if colon and name in RECIPES:
        return _pairs(incomplete, arguments, recipe_arguments(name), "argument")
    if colon or "=" in incomplete:
        return _pairs(incomplete, arguments if colon else name, _AXES, "axis")
    recipes = [(f"{name}:", "recipe") for name in RECIPES]
    return [completion for completion in recipes if completion[0].startswith(incomplete)] + preset_names(incomplete)


def preset_names(incomplete: str) -> _Completions:
    """Presets with their titles."""
    return [(name, presets.get(name).title) for name in presets.names() if name.startswith(incomplete)]


def _pairs(incomplete: str, arguments: str, names: Sequence[str], what: str) -> _Completions:
    """The names that may follow in ``name=size,...``, each with sizes: the shell stops after the equals sign."""
    *done, last = arguments.split(",")
    if "=" in last:
        return []
    taken = {item.partition("=")[0] for item in done}
    start = incomplete[: len(incomplete) - len(last)]
    fitting = [name for name in names if name.startswith(last) and name not in taken]
    return [(f"{start}{name}={size}", what) for name in fitting for size in _SIZES]


def group_names(ctx: typer.Context, incomplete: str) -> _Completions:
    """The kinds of group in the plan that the SPEC before names, after a comma too; nothing while it cannot be read."""
    done, comma, incomplete = incomplete.rpartition(",")
    try:
        # Before the value of an option is there, the words that are no options have no names yet.
        spec = ctx.params.get("spec") or next(iter(ctx.args), None)
        plan = read(str(spec), world_size=ctx.params.get("world_size")).plan
    except RankmeshError:
        return []
    return [
        (f"{done}{comma}{name}", f"{len(groups)} of {groups.size}")
        for name, groups in plan.kinds.items()
        if name.startswith(incomplete) and name not in done.split(",")
    ]


# -- bash -------------------------------------------------------------------------------------------------------------


_BREAKS = ("=", ":")


def rejoined(words: list[str], at: int) -> tuple[list[str], int, str]:
    """The words as they were typed, the place of the current one, and what of it bash keeps by itself.

    Bash cuts words at ``=`` and ``:`` too, and replaces only the last piece.

    ```
    typed                  COMP_WORDS                      the word    its piece after the last = or :
    rankmesh show tp=2,d   rankmesh show tp = 2,d          tp=2,d      2,d
    rankmesh show tp=      rankmesh show tp =              tp=         (nothing yet)
    ```

    >>> rejoined(["rankmesh", "show", "tp", "=", "2,d"], 4)
    (['rankmesh', 'show', 'tp=2,d'], 2, 'tp=')
    """
    typed: list[str] = []
    place, glue = at, False
    for number, word in enumerate(words):
        broken = word in _BREAKS
        if typed and (broken or glue):
            typed[-1] += word
        else:
            typed.append(word)
        glue = broken and len(typed) > 1
        if number == at:
            place = len(typed) - 1
    if at >= len(words):
        return typed, len(typed), ""
    return typed, place, typed[place][: max(map(typed[place].rfind, _BREAKS)) + 1]


def answered(run: Callable[[], None]) -> str:
    """What a completion of typer's answers to bash, without what bash keeps."""
    words, place, keeps = rejoined(_words(os.environ.get("COMP_WORDS", "")), int(os.environ.get("COMP_CWORD", "0")))
    os.environ.update(COMP_WORDS=shlex.join(words), COMP_CWORD=str(place))
    with redirect_stdout(StringIO()) as answer, suppress(SystemExit):
        run()
    return "".join(f"{line.removeprefix(keeps)}\n" for line in answer.getvalue().splitlines())


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is still open
        return text.split()
