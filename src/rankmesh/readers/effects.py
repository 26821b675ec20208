"""What commands do to the variables of a script, and which branch of a ``case`` is taken.

```
read NAME   mapfile NAME   getopts OPTIONS NAME      one variable, whose value is not followed
let NAME=1   ((NAME++))    printf -v NAME FORMAT     the same
source env.sh          . env.sh               another file, which is not read
eval "$(command)"      eval "$VARIABLE"       text that is not in the script
export $(command)      declare $NAME=4        names that are not in the script
```

What the last three may have set is unresolved from there on: it is refused where a size needs it.

>>> assigned_by(["let", "TP=4", "PP*=2", "TP==2"]), assigned_by(["printf", "-v", "TP", "%d", "4"])
(['TP', 'PP'], ['TP'])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rankmesh.readers.tokens import Word, gap_of, shown, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["assigned_by", "assigned_in", "chosen_branch", "kept", "may_set_any"]

_LET = re.compile(r"(?:\+\+|--)?(\w+)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=)|$)")
_COMPARISONS = ("==", "!=", "<=", ">=")
# Files and texts that activate an environment: they are known to set no variable that a run would take a size from.
_ACTIVATES = re.compile(r".*/activate|(.*/)?conda\.sh|.*/(modules|lmod)/init/\w+")
_HOOKS = re.compile(r"\$\(\s*\S*(conda|mamba|micromamba|pyenv|modulecmd)\b.*\)|`\S*(conda|mamba|pyenv)\b.*`")
# What no file sets: arguments, what Slurm sets, and names of our own.
_KEPT = re.compile(r"\d+|@|SLURM_\w+|__part_\w+")


def may_set_any(words: tuple[Word, ...]) -> str | None:
    """Why a command may set any variable, None if it cannot.

    >>> from rankmesh.readers.tokens import Part
    >>> may_set_any(((Part("source", (1,)),), (Part("env.sh", (1,)),)))
    'source env.sh is another file, which is not read'
    """
    name = text_of(words[0])
    written = " ".join(map(shown, words))
    if name in ("source", ".") and len(words) > 1:
        harmless = _ACTIVATES.fullmatch(shown(words[1]))
        return None if harmless else f"{_short(written)} is another file, which is not read"
    if name == "eval":
        gaps = [part for word in words[1:] for part in word if part.text is None]
        if any(not _HOOKS.fullmatch(part.shown) for part in gaps):
            return f"{_short(written)} runs a text that is not in this file"
    return None


def kept(name: str) -> bool:
    """Whether a variable stays what it is whatever another file sets."""
    return _KEPT.fullmatch(name) is not None


def chosen_branch(node: Node, expand: Callable[[Node], Word]) -> list[Node] | None:
    """The statements of the branch that a ``case`` takes, none where nothing matches; None if that is not known."""
    value = node.child_by_field_name("value")
    text = text_of(expand(value)) if value is not None else None
    if text is None:
        return None
    for item in node.named_children:
        if item.type != "case_item":
            continue
        found = [_matches(pattern, text, expand) for pattern in item.children_by_field_name("value")]
        if None in found or (True in found and any(child.type in (";&", ";;&") for child in item.children)):
            return None
        if True in found:
            return list(_body(item))
    return []


def _matches(pattern: Node, text: str, expand: Callable[[Node], Word]) -> bool | None:
    word = expand(pattern)
    written = None if gap_of(word) else text_of(word)
    if written is None:
        return None
    if pattern.type in ("string", "raw_string"):
        return written == text
    if any(sign in written for sign in "()\\"):
        return None
    return fnmatchcase(text, written)


def _body(item: Node) -> Iterator[Node]:
    patterns = {pattern.id for pattern in item.children_by_field_name("value")}
    return (child for child in item.named_children if child.id not in patterns)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def assigned_by(names: Sequence[str]) -> list[str]:
    """The variables that a command sets, from its words."""
    if names[0] in ("read", "mapfile", "readarray", "getopts"):
        return list(names[1:])
    if names[0] == "let":
        return [found[1] for found in map(_LET.match, names[1:]) if found]
    if names[0] == "printf" and len(names) > 2 and names[1] == "-v":
        return [names[2]]
    return []


def assigned_in(node: Node, source_of: Callable[[Node], str]) -> Iterator[str]:
    """The variables that an arithmetic command ``(( ))`` sets."""
    for child in node.named_children:
        sign = next((part.type for part in child.children if not part.is_named), "")
        sets = sign in ("++", "--") or (sign.endswith("=") and sign not in _COMPARISONS)
        if sets and child.named_children and child.named_children[0].type == "variable_name":
            yield source_of(child.named_children[0])
        yield from assigned_in(child, source_of)
